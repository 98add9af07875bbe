"""Recall schedules: intervals, the CPU ratio, profiles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hf_offload import Scout
from hf_offload.policies.recall import RecallClock

CPU = torch.device("cpu")


def steps_of(clock: RecallClock, ratios: list[float]) -> list[int]:
    answers = [clock.due(torch.tensor(ratio)) for ratio in ratios]
    return [step for step, due in enumerate(answers) if due is not None and due.item()]


@pytest.mark.parametrize(
    ("recall", "ratios", "steps"),
    [
        (3, [0.0] * 9, [2, 5, 8]),
        (0, [1.0] * 9, []),
        # One odd step is forgiven after quiet ones, a rise is not, and a recall starts anew.
        ("adaptive", [0.05, 0.05, 0.15, 0.05, 0.12, 0.16, 0.16, 0.02, 0.05], [5, 6]),
        ("adaptive", [0.5, 0.1, 0.13], [0]),  # with the first ratio the average would be .3 and .2
    ],
)
def test_steps_of_a_recall(recall: int | str, ratios: list[float], steps: list[int]) -> None:
    assert steps_of(RecallClock.of(recall, 0.12, 0, CPU), ratios) == steps


def test_a_profile_gives_each_layer_its_interval(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({"intervals": [1, 4]}))
    assert Scout(recall=str(file)).recall == str(file)
    assert steps_of(RecallClock.of(file, 0.12, 1, CPU), [0.0] * 8) == [3, 7]
    with pytest.raises(ValueError, match="has 2 layers"):
        RecallClock.of(file, 0.12, 2, CPU)


def test_wrong_values_and_files_that_are_no_profile_are_named(tmp_path: Path) -> None:
    for recall in (-1, True, 1.5, None):
        with pytest.raises(ValueError, match=f"recall={recall!r}"):
            Scout(recall=recall)  # type: ignore[arg-type]
    file = tmp_path / "wrong.json"
    for text in ("", "[]", '{"intervals": [0]}', '{"intervals": 3}', '{"steps": [1]}'):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"wrong\.json.*not a profile"):
            Scout(recall=file)
