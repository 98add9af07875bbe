"""Quest's block selection (Tang et al. 2024) with offloading: the device fetches the chosen blocks at every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hf_offload.cache.digests import DIGESTS
from hf_offload.knobs import check_choice, check_tokens
from hf_offload.policies.base import EVER, Plan, Policy, Requirements, Selection
from hf_offload.policies.drawing import BUDGET, SINKS, check_samples, draw

if TYPE_CHECKING:
    from hf_offload.attention.step import Step

JOINS = ("max", "mean", "raw")


@dataclass(frozen=True)
class Quest(Policy):
    """Attend the best blocks within a budget on the device; the CPU attends nothing.

    Source: Quest (Tang et al. 2024). The device holds the digests. A step chooses blocks by its real query, copies
    those that are not resident to the device, and waits for them. With one memory nothing is copied.

    As in Quest, a digest is the minimum and maximum of each channel, and blocks have 16 tokens. Unlike in Quest, keys
    and values are offloaded, the first two layers are sparse, too, and the query heads of a KV head share a choice.

    Args:
        budget: tokens that each row and KV head attends; sinks, recent tokens and the open block included. None: 2048,
            unless `samples` says how many.
        samples: as for `Scout`.
        digest: `"quest"`, `"submean"` or `"mean"`. None: `"quest"`, with `samples` `"submean"`.
        join: how the query heads of a KV head are joined: `"raw"`: the mean of their scores; `"max"`, `"mean"`: of the
            softmax of each head's scores. None: `"raw"`, with `samples` `"max"`.
        sinks: first tokens of a row that are always attended and resident. None: 0, with `samples` 4.
            Rounded up to blocks, with samples to pairs.
        recent: newest tokens in sealed blocks that are always attended and resident, rounded in the same way.

    Raises:
        ValueError: a knob has a value that is not allowed.
    """

    name = "quest"
    block_size = 16
    budget: int | None = None
    samples: int | None = None
    digest: str | None = None
    join: Literal["max", "mean", "raw"] | None = None
    sinks: int | None = None
    recent: int = 0

    def __post_init__(self) -> None:
        drawn = self.samples is not None
        digest = ("submean" if drawn else "quest") if self.digest is None else self.digest
        join = ("max" if drawn else "raw") if self.join is None else self.join
        budget = BUDGET if self.budget is None and not drawn else self.budget
        sinks = (SINKS if drawn else 0) if self.sinks is None else self.sinks
        check_samples(budget, self.samples, digest, join)
        for name, value in (("digest", digest), ("join", join), ("budget", budget), ("sinks", sinks)):
            object.__setattr__(self, name, value)
        check_tokens("sinks", self.sinks, least=0)
        check_tokens("recent", self.recent, least=0)
        check_choice("digest", self.digest, sorted(DIGESTS))
        check_choice("join", self.join, JOINS)

    @property
    def requirements(self) -> Requirements:
        assert self.sinks is not None
        return Requirements(
            budget=self.budget, sinks=self.sinks, recent=self.recent, digest=self.digest, leaves_out=True,
            capturable=True,
        )  # fmt: skip

    def check(self, *, block_size: int, two_memories: bool) -> None:
        super().check(block_size=block_size, two_memories=two_memories)
        if self.samples is not None and two_memories:
            raise ValueError(
                f"samples={self.samples}: the device fetches whole blocks; use budget= with two memories, or scout"
            )

    def plan(self, step: Step) -> Plan:
        """Choose blocks by the real query, fetch them and attend them."""
        assert self.join is not None
        if self.samples is not None:
            return draw(step, self.join, self.samples)
        assert self.budget is not None
        return Plan(step.fetch(*step.choose(self.join, self.budget // step.block_size)), until=EVER)

    def place(self, step: Step, slots: int) -> Selection:
        """Return sinks and newest blocks. Blocks that are always attended are never fetched, so all sinks must fit."""
        return step.recent(slots - 1)  # sinks after padding may take one more block
