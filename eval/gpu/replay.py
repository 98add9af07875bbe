"""Scout with a scripted choice: a random model's own choice of blocks drifts in ways that no trained model's does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hf_offload import Scout
from hf_offload.policies.base import Plan, Selection
from hf_offload.policies.scout import ScoutState
from hf_offload.tools.plan import parse_setting


@dataclass(frozen=True)
class Script:
    """What is resident at first and what every step chooses."""

    resident: torch.Tensor  # `[B, Hkv, k]` int32, ascending
    chosen: torch.Tensor  # `[steps, B, Hkv, k]` int32, ascending
    miss: float  # share of the chosen blocks that is not resident, on average, if every recall does its work
    drift: float  # share of the chosen blocks that was not chosen one step before, on average


def parse(text: str) -> dict[str, Any]:
    """Read "miss=0.08,drift=0.15,recall=8"; recall, the steps between recalls (0: never), may be left out."""
    return {"recall": 8} | parse_setting(f"script:{text}")[1]


def write_script(
    lines: tuple[int, int], blocks_at: list[int], budget: int, fixed: tuple[int, int],
    *, miss: float, drift: float, recall: int, device: str,
) -> Script:  # fmt: skip
    """Write the script of a run.

    Args:
        lines: `B, Hkv`.
        blocks_at: blocks of a row at each step, the newest one included.
        budget: k, blocks that are chosen; as many are resident.
        fixed: how many of the first and of the newest blocks are always among them.
        miss, drift: as in `Script`, the aim.
        recall: steps between recalls, 0 for never.
        device: where the script lies.
    """
    (first, newest), count = fixed, lines[0] * lines[1]
    free, middle = np.arange(first, blocks_at[0] - newest), budget - first - newest
    if middle < 2 or len(free) < 2 * middle:
        raise ValueError(
            f"{blocks_at[0]} blocks are too few for a script of {budget} that are chosen; give more tokens"
        )
    order = np.random.default_rng(0).permuted(np.tile(free, (count, 1)), axis=1)
    near, far = order[:, :middle], order[:, middle:]  # resident blocks, and the others
    start, path, missing = near, [], []
    for step in range(1, len(blocks_at) + 1):
        # Whole numbers of blocks whose means are as wanted.
        misses, moves = (int(step * aim) - int((step - 1) * aim) for aim in (miss * budget, drift * budget / 2))
        # Half of what changes are resident blocks that come and go, half are others.
        near, far = np.roll(near, -moves, 1), np.roll(far, -moves, 1)
        chosen = np.concatenate([near[:, misses:], far[:, :misses]], 1)
        path.append(chosen)
        missing.append(misses)
        if recall and step % recall == 0:
            near, far = chosen, np.concatenate([far[:, misses:], near[:, :misses]], 1)

    middles = np.stack([start, *path])  # [1 + steps, B · Hkv, middle]
    fixed_at = [np.r_[:first, blocks - newest : blocks] for blocks in (blocks_at[0], *blocks_at)]
    whole = np.sort(np.concatenate([np.repeat(np.stack(fixed_at)[:, None], count, 1), middles], 2))
    every = torch.from_numpy(whole.reshape(-1, *lines, budget).astype(np.int32)).to(device)
    new = (middles[2:, :, :, None] != middles[1:-1, :, None]).all(3).sum(2)
    return Script(every[0], every[1:], np.mean(missing).item() / budget, new.mean().item() / budget)


@dataclass(slots=True)
class ReplayState(ScoutState):
    """What Scout remembers, and the step of the script that comes, int64 `[1]` on the device."""

    at: Any = None


class Scripted:
    """A step whose choice is the script's; choosing costs what it costs Scout."""

    def __init__(self, step: Any, script: Script) -> None:
        self._step, self._script = step, script

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def choose(self, join: str, blocks: int) -> tuple[torch.Tensor, Selection]:
        score, _ = self._step.choose(join, blocks)
        chosen = self._script.chosen.index_select(0, self._step.state.at)[0]
        return wanted(score, chosen), whole(chosen, self._step.block_size)


def wanted(score: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """A score `[B, Hkv, N]` under which a recall brings these blocks and no others."""
    return torch.full_like(score, float("-inf")).scatter_(2, blocks.long(), 1.0)


def whole(blocks: torch.Tensor, size: int) -> Selection:
    """All blocks of `[B, Hkv, k]`, of `size` tokens, as a selection."""
    counts = torch.full(blocks.shape[:2], blocks.shape[2], dtype=torch.int32, device=blocks.device)
    return Selection(blocks, counts, size)


@dataclass(frozen=True)
class Replay(Scout):
    """Scout that does all of its work and then attends what a script says."""

    name = "replay"
    smoothing: float = 0.0
    script: Script = field(kw_only=True, compare=False, repr=False)

    def new_state(self, layer: Any) -> ReplayState:
        at = torch.zeros(1, dtype=torch.int64, device=layer.device)
        return ReplayState(super().new_state(layer).clock, at=at)

    def before_layer(self, step: Any) -> None:
        super().before_layer(Scripted(step, self.script))

    def plan(self, step: Any) -> Plan:
        plan = super().plan(Scripted(step, self.script))
        step.state.at.add_(1).clamp_(max=len(self.script.chosen) - 1)
        return plan

    def place(self, step: Any, slots: int) -> Selection:
        blocks = self.script.resident
        if slots < blocks.shape[2]:  # one slot is kept for the block that comes
            blocks = torch.cat([blocks[:, :, :1], blocks[:, :, 1 - slots :]], 2)
        step.learn(wanted(step.score(self.join), blocks), 0.0)
        return whole(blocks, step.block_size)
