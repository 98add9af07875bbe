"""Fluxion's baseline: sinks and newest tokens on the device, a fixed share of the others on the CPU (section 8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hf_offload.blocks.digests import DIGESTS
from hf_offload.knobs import check_choice, check_number, check_tokens
from hf_offload.policies.base import Plan, Policy, Requirements, check_dense
from hf_offload.policies.fluxion.selector import SelectorState
from hf_offload.policies.fluxion.step import attend_local, join, select

if TYPE_CHECKING:
    from hf_offload.attention.step import Step
    from hf_offload.cache.layer import HybridLayer


@dataclass(frozen=True)
class FixedHybrid(Policy):
    """Attend sinks and newest tokens and, for each query head, a fixed share of the host's tokens.

    Source: the baseline of Fluxion, section 8. The device attends sinks and newest tokens, the CPU the others. Each
    query head takes its best blocks by its own scores; a KV head attends the union of what its query heads took.

    Args:
        budget: share of the host's tokens that a query head takes, 0 to 1, rounded up to blocks.
        digest: `"quest"` (the paper's), `"submean"` or `"mean"`.
        sinks: first tokens of a row that are always attended and resident.
        local: newest tokens that are always attended and resident.
        dense: whether all blocks are resident where a device has room for them, and steps attend them all: `"auto"` and
            True: they do, which is exact and takes less time than a choice on the CPU.

    Raises:
        ValueError: a knob has a value that is not allowed.
    """

    name = "fixed_hybrid"
    block_size = 16
    budget: float = 0.05
    digest: str = "quest"
    sinks: int = 64
    local: int = 256
    dense: Literal["auto"] | bool = "auto"

    def __post_init__(self) -> None:
        check_number("budget", self.budget, "a share of the host's tokens", least=0, most=1)
        check_choice("digest", self.digest, sorted(DIGESTS))
        check_tokens("sinks", self.sinks, least=0)
        check_tokens("local", self.local, least=0)
        check_dense(self.dense)

    @property
    def requirements(self) -> Requirements:
        return Requirements(
            sinks=self.sinks, recent=self.local, digest=self.digest, digest_memory="host",
            leaves_out=self.budget < 1, holds_all=self.dense is not False,
        )  # fmt: skip

    def attends_all(self, layer: HybridLayer, tokens: int) -> bool:
        return self.dense is not False

    def new_state(self, layer: HybridLayer) -> SelectorState:
        return SelectorState(layer)

    def plan(self, step: Step) -> Plan:
        """The CPU begins, the device attends beside it."""
        selected = select(step, (float(self.budget), 0.0, False), (step.block_size,))
        return join(step, attend_local(step), selected)
