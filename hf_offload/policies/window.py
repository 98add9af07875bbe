"""Attention to sinks and the newest tokens (StreamingLLM, Xiao et al. 2023), the control for sparse policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_offload.knobs import check_tokens
from hf_offload.policies.base import EVER, Plan, Policy, Requirements

if TYPE_CHECKING:
    from hf_offload.attention.step import Step


@dataclass(frozen=True)
class Window(Policy):
    """Attend the first `sinks` tokens and the newest ones, `budget` tokens in all.

    Source: StreamingLLM, with every token at its own position.

    Args:
        budget: tokens that each row and KV head attends.
        sinks: first tokens of a row that are always attended.

    Raises:
        ValueError: a number is not positive, or the sinks leave no room for newest tokens.
    """

    name = "window"
    budget: int = 2048
    sinks: int = 32

    def __post_init__(self) -> None:
        check_tokens("budget", self.budget)
        check_tokens("sinks", self.sinks, least=0)

    @property
    def requirements(self) -> Requirements:
        return Requirements(budget=self.budget, sinks=self.sinks, recalls=False, capturable=True)

    def plan(self, step: Step) -> Plan:
        return Plan(step.attend(step.recent(self.budget // step.block_size)), until=EVER)
