"""Forged files: any contents are refused by a ValueError or load; no process dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
QUICK = ("scout-split", "hgca-split", "full-int8-one", "linear-one", "predictor", "profile")
OTHERS = (
    "scout-one", "scout-attend-split", "scout-quest-int8-one", "full-int8-split", "window-split", "quest-split",
    "hgca-one", "hgca-int8-one", "fixed_hybrid-split", "fluxion-one", "fluxion-split", "h2o-split", "infinigen-one",
    "infinigen-int8-split", "sliding-split",
)  # fmt: skip


@pytest.mark.parametrize(
    ("every", "cases"),
    [
        pytest.param(50, QUICK, id="some"),
        *(pytest.param(1, (case,), id=case, marks=pytest.mark.slow) for case in (*QUICK, *OTHERS)),
    ],
)
def test_every_forged_field_is_refused_or_serves(tmp_path: Path, every: int, cases: tuple[str, ...]) -> None:
    paths = os.pathsep.join((str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")))
    log = tmp_path / "log"
    with log.open("w") as out, subprocess.Popen(
        [sys.executable, HERE / "forging.py", tmp_path, str(every), *cases],
        env={**os.environ, "PYTHONPATH": paths}, stdout=out, stderr=subprocess.STDOUT,
    ) as child:  # fmt: skip
        try:
            ended = child.wait(1800)
        except subprocess.TimeoutExpired:
            child.kill()
            ended = -1
    assert ended == 0, f"ended with {ended}, at last:\n{log.read_text()[-4000:]}"
