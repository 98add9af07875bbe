"""Load, then attend: what is chosen and not resident is fetched within the step, and the CPU attends nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gpu.replay import Replay, Scripted
from hf_offload import Scout
from hf_offload.gpu import move
from hf_offload.policies import Plan, Selection


@dataclass(frozen=True)
class Fetch(Scout):
    """Scout's choice of blocks, as offloaders without a CPU part attend it: the model waits for what is missing."""

    name = "fetch"

    def plan(self, step: Any) -> Plan:
        return fetched(step, *step.choose(self.join, self.budget // step.block_size))


@dataclass(frozen=True)
class FetchReplay(Replay):
    """The same with a scripted choice."""

    name = "fetch-replay"

    def plan(self, step: Any) -> Plan:
        plan = fetched(step, *Scripted(step, self._script).choose(self.join, self.budget // step.block_size))
        step.state.at.add_(1).clamp_(max=len(self._script.chosen) - 1)
        return plan


def fetched(step: Any, score: torch.Tensor, chosen: Selection) -> Plan:
    """Exchange resident blocks until all that is chosen is there, on the model's stream, which waits for it."""
    resident, store = step.resident, step.store
    step.learn(score, 0.0)
    moves = resident.exchange(step.limits, step.sinks[1], step.recent_blocks, None)
    tables = resident.tables.block_ptr(), resident.tables.table()
    move.fetch(resident.pool, *moves, *tables, packed=store.packed)
    step.layer.count("moves", moves.counts)
    return Plan(device=step.split(chosen)[0])
