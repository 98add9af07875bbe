"""Quest's block selection (Tang et al. 2024) with offloading: the device fetches the chosen blocks at every step."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Literal

from hf_offload.blocks.digests import DIGESTS
from hf_offload.knobs import Moved, check_choice, check_tokens, shown
from hf_offload.policies.base import EVER, Plan, Policy, Requirements, Selection, attends_all, check_dense
from hf_offload.policies.choices import BUDGET

if TYPE_CHECKING:
    from hf_offload.attention.step import Step
    from hf_offload.cache.layer import HybridLayer

JOINS = ("max", "mean", "raw")


@dataclass(frozen=True)
class Quest(Policy):
    """Attend the best blocks within a budget on the device; the CPU attends nothing.

    Source: Quest (Tang et al. 2024). The device holds the digests. A step chooses blocks by its real query, copies
    those that are not resident to the device, and waits for them. With one memory nothing is copied.

    As in Quest, a digest is the minimum and maximum of each channel, and blocks have 16 tokens. Unlike in Quest, keys
    and values are offloaded, the first two layers are sparse, too, and the query heads of a KV head share a choice.

    Args:
        budget: tokens that each row and KV head attends; sinks, recent tokens and the open block included.
        digest: `"quest"`, `"submean"` or `"mean"`.
        join: how the query heads of a KV head are joined: `"raw"`: the mean of their scores; `"max"`, `"mean"`: of the
            softmax of each head's scores.
        sinks: first tokens of a row that are always attended and resident, rounded up to blocks.
        recent: newest tokens in sealed blocks that are always attended and resident, rounded in the same way.
        dense: whether steps attend all tokens while all are resident, without a choice: exact, and no digest is scored.
            `"auto"`: within the budget, and where a GPU takes less time for it (`policies.base.DENSE_BYTES`).

    Raises:
        ValueError: a knob has a value that is not allowed, or is `samples`, which `scout` has.
    """

    name = "quest"
    block_size = 16
    budget: int = BUDGET
    digest: str = "quest"
    join: Literal["max", "mean", "raw"] = "raw"
    sinks: int = 0
    recent: int = 0
    dense: Literal["auto"] | bool = "auto"
    samples: InitVar[int | None] = None

    def __post_init__(self, samples: int | None) -> None:
        if samples is not None:
            raise Moved(
                f"samples={shown(samples)} is a knob of policy 'scout', not of 'quest'; use 'scout' with "
                f"samples={shown(samples)}, recent=0, block_size=16"
            )
        check_tokens("budget", self.budget)
        check_tokens("sinks", self.sinks, least=0)
        check_tokens("recent", self.recent, least=0)
        check_choice("digest", self.digest, sorted(DIGESTS))
        check_choice("join", self.join, JOINS)
        check_dense(self.dense)

    @property
    def requirements(self) -> Requirements:
        return Requirements(
            budget=self.budget, sinks=self.sinks, recent=self.recent, digest=self.digest, holds_all=True,
            capturable=True,
        )  # fmt: skip

    def attends_all(self, layer: HybridLayer, tokens: int) -> bool:
        return attends_all(self.dense, layer, tokens, self.budget)

    def plan(self, step: Step) -> Plan:
        """Choose blocks by the real query, fetch them and attend them."""
        return Plan(step.fetch(*step.choose(self.join, self.budget // step.block_size)), until=EVER)

    def place(self, step: Step, slots: int) -> Selection:
        """Return sinks and newest blocks. Blocks that are always attended are never fetched, so all sinks must fit."""
        return step.recent(slots - 1)  # sinks after padding may take one more block
