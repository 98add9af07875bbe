"""Scout with a scripted choice: a random model's own choice of blocks drifts in ways that no trained model's does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hf_offload import Scout
from hf_offload.policies.base import Plan, Selection
from hf_offload.policies.scout import ScoutState

DISTINCT = 64  # different scripts; more rows and heads than that share them


@dataclass(frozen=True)
class Script:
    """What is resident at first and what every step chooses.

    Args:
        resident: `[B, Hkv, k]` int32, ascending.
        chosen: `[steps, B, Hkv, k]` int32, ascending.
        interval: steps between recalls.
        miss: share of the chosen blocks that is not resident, on average, if every recall does its work.
        drift: share of the chosen blocks that was not chosen one step before, on average.
    """

    resident: torch.Tensor
    chosen: torch.Tensor
    interval: int
    miss: float
    drift: float


def parse(text: str) -> dict[str, float]:
    """Read "miss=0.08,drift=0.15,recall=8"; recall, the steps between recalls, may be left out."""
    numbers = {"recall": 8.0}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in ("miss", "drift", "recall"):
            raise ValueError(f"replay={text!r}: {name!r} is not one of miss, drift, recall")
        numbers[name] = float(value)
    if not ("miss" in numbers and "drift" in numbers and 0 <= numbers["miss"] < 0.5 and 0 <= numbers["drift"] < 1):
        raise ValueError(f"replay={text!r} must give miss (below 0.5) and drift (below 1)")
    if numbers["recall"] < 0 or numbers["recall"] % 1:
        raise ValueError(f"replay={text!r}: recall must be a whole number of steps, 0 for never")
    return numbers


def write_script(
    lines: tuple[int, int], blocks_at: list[int], budget: int, fixed: tuple[int, int],
    *, miss: float, drift: float, recall: float, device: str,
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
    first, newest = fixed
    free, middle, steps = np.arange(first, blocks_at[0] - newest), budget - first - newest, len(blocks_at)
    if middle < 2 or len(free) < 2 * middle:
        raise ValueError(f"{blocks_at[0]} blocks are too few for a script with a budget of {budget}")
    rng, count = np.random.default_rng(0), min(lines[0] * lines[1], DISTINCT)
    found = [_one_line(rng, free, middle, steps, miss * budget, drift * budget, int(recall)) for _ in range(count)]

    def whole(middles: np.ndarray, blocks: int) -> np.ndarray:
        """`[lines, middle]` with the first and the newest blocks around them."""
        around = np.arange(first), np.arange(blocks - newest, blocks)
        before, behind = (np.tile(each, (len(middles), 1)) for each in around)
        return np.concatenate([before, middles, behind], -1)

    def tensor(array: np.ndarray) -> torch.Tensor:
        picked = array[..., np.arange(lines[0] * lines[1]) % count, :]
        return torch.from_numpy(picked.reshape(*array.shape[:-2], *lines, budget).astype(np.int32)).to(device)

    starts, paths, far, moved = (np.array(each) for each in zip(*found, strict=True))
    chosen = np.stack([whole(paths[:, step], blocks) for step, blocks in enumerate(blocks_at)])
    return Script(
        tensor(whole(starts, blocks_at[0])), tensor(chosen), int(recall), far.mean() / budget, moved.mean() / budget
    )


def _one_line(
    rng: np.random.Generator, free: np.ndarray, middle: int, steps: int, miss: float, drift: float, recall: int
) -> tuple[list[int], list[list[int]], list[int], list[int]]:
    """One row and KV head: resident blocks, the choice of each step, and how many are missing and new in each.

    `miss` and `drift` are numbers of blocks here, `middle` is how many are chosen of the `free` ones.
    """

    def some(of: set[int], count: int) -> set[int]:
        pool = sorted(of)
        return set(rng.choice(pool, min(max(count, 0), len(pool)), replace=False).tolist())

    everything = set(free.tolist())
    resident = some(everything, middle)
    start, chosen = sorted(resident), set(resident)
    path, missing, changes = [], [], []
    for step in range(steps):
        aim, change = min(int(miss + rng.random()), middle), int(drift + rng.random())  # their means are as wanted
        before, near, far = set(chosen), chosen & resident, chosen - resident
        # Half of what changes are resident blocks that come and go, as far as there are any; the others are far.
        spare = resident - chosen
        swap = min(change // 2, len(spare), len(near))
        near = (near - some(near, swap)) | some(spare, swap)
        far -= some(far, max(change - swap, len(far) - aim))
        far |= some(everything - resident - far, aim - len(far))
        wanted = middle - len(far)
        near -= some(near, len(near) - wanted)
        near |= some(resident - near, wanted - len(near))
        chosen = near | far
        path.append(sorted(chosen))
        missing.append(len(far))
        changes.append(len(chosen - before))
        if recall and (step + 1) % recall == 0:
            resident = set(chosen)
    return start, path, missing, changes


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
    script: Script | None = field(default=None, compare=False, repr=False)

    def new_state(self, layer: Any) -> ReplayState:
        at = torch.zeros(1, dtype=torch.int64, device=layer.device)
        return ReplayState(super().new_state(layer).clock, at=at)

    def before_layer(self, step: Any) -> None:
        super().before_layer(Scripted(step, self._script))

    def plan(self, step: Any) -> Plan:
        plan = super().plan(Scripted(step, self._script))
        step.state.at.add_(1).clamp_(max=len(self._script.chosen) - 1)
        return plan

    def place(self, step: Any, slots: int) -> Selection:
        blocks = self._script.resident
        if slots < blocks.shape[2]:  # one slot is kept for the block that comes
            blocks = torch.cat([blocks[:, :, :1], blocks[:, :, 1 - slots :]], 2)
        step.learn(wanted(step.score(self.join), blocks), 0.0)
        return whole(blocks, step.block_size)

    @property
    def _script(self) -> Script:
        assert self.script is not None
        return self.script
