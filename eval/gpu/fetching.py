"""Load, then attend: what is chosen and not resident is fetched within the step, and the CPU attends nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpu.replay import Replay, Scripted
from hf_offload import Scout
from hf_offload.policies.base import Plan


@dataclass(frozen=True)
class Fetch(Scout):
    """Scout's choice of blocks, as offloaders without a CPU part attend it: the model waits for what is missing."""

    name = "fetch"

    def plan(self, step: Any) -> Plan:
        return step.fetch(*step.choose(self.join, self.budget // step.block_size))


@dataclass(frozen=True)
class FetchReplay(Replay):
    """The same with a scripted choice."""

    name = "fetch-replay"

    def plan(self, step: Any) -> Plan:
        plan: Plan = step.fetch(*Scripted(step, self._script).choose(self.join, self.budget // step.block_size))
        step.state.at.add_(1).clamp_(max=len(self._script.chosen) - 1)
        return plan
