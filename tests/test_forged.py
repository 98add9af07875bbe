"""Forged files: any contents are refused by a ValueError or load; no process dies."""

from __future__ import annotations

from pathlib import Path

import forging
import pytest
from forks import in_fork

QUICK = ("scout-split", "hgca-split", "full-int8-one", "linear-one", "predictor")
OTHERS = (
    "scout-one", "scout-attend-split", "scout-quest-int8-one", "full-int8-split", "window-split", "quest-split",
    "hgca-one", "hgca-int8-one", "fixed_hybrid-split", "fluxion-one", "fluxion-split", "h2o-split", "infinigen-one",
    "infinigen-int8-split", "sliding-split",
)  # fmt: skip


@pytest.mark.parametrize(
    ("every", "cases"),
    [
        pytest.param(131, QUICK, id="some"),
        *(pytest.param(1, (case,), id=case, marks=pytest.mark.slow) for case in (*QUICK, *OTHERS)),
    ],
)
def test_every_forged_field_is_refused_or_serves(tmp_path: Path, every: int, cases: tuple[str, ...]) -> None:
    assert in_fork(lambda: forging.main(tmp_path, every, cases), 1800.0) == 0
