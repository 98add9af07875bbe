"""Attention to sinks and the newest tokens (StreamingLLM, Xiao et al. 2023), the control for sparse policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hf_offload.knobs import check_tokens
from hf_offload.policies.base import EVER, Plan, Policy, Requirements, check_dense

if TYPE_CHECKING:
    from hf_offload.attention.step import Step
    from hf_offload.cache.layer import HybridLayer


@dataclass(frozen=True)
class Window(Policy):
    """Attend the first `sinks` tokens and the newest ones, `budget` tokens in all.

    Source: StreamingLLM, with every token at its own position.

    Args:
        budget: tokens that each row and KV head attends.
        sinks: first tokens of a row that are always attended.
        dense: whether rows within the budget, all of it resident, are attended without a list of blocks: `"auto"` and
            True: they are.

    Raises:
        ValueError: a number is not positive, or the sinks leave no room for newest tokens.
    """

    name = "window"
    budget: int = 2048
    sinks: int = 32
    dense: Literal["auto"] | bool = "auto"

    def __post_init__(self) -> None:
        check_tokens("budget", self.budget)
        check_tokens("sinks", self.sinks, least=0)
        check_dense(self.dense)

    @property
    def requirements(self) -> Requirements:
        return Requirements(budget=self.budget, sinks=self.sinks, recalls=False, capturable=True)

    def attends_all(self, layer: HybridLayer, tokens: int) -> bool:
        size = layer.settings.block_size
        return self.dense is not False and -(-tokens // size) <= self.budget // size

    def plan(self, step: Step) -> Plan:
        return Plan(step.attend(step.recent(self.budget // step.block_size)), until=EVER)
