"""Resumption of long runs from the newest complete state with the same settings."""

from __future__ import annotations

import pytest
import typer

from resume import Progress


def test_the_newest_state_stays_alone(tmp_path):
    progress = Progress(tmp_path / "run", {"tokens": 3})
    assert progress.latest("a") is None
    for position in (5, 40):
        progress.save("a", position, lambda folder, text=str(position): (folder / "x").write_text(text))
    progress.save("b", 1, lambda folder: None)
    assert (progress.latest("a") / "x").read_text() == "40"
    assert [path.name for path in (tmp_path / "run" / "a").iterdir()] == ["000000040"]
    progress.remove()
    assert not (tmp_path / "run").exists()


def test_rows_whose_names_hold_paths_have_a_state_each(tmp_path):
    progress = Progress(tmp_path / "run", {})
    rows = ["prose, predictor=../../p", "code, predictor=../../p", "predictor=/p"]
    for number, row in enumerate(rows):
        progress.save(row, 1, lambda folder, text=str(number): (folder / "x").write_text(text))
    assert [(progress.latest(row) / "x").read_text() for row in rows] == ["0", "1", "2"]
    progress.remove()
    assert not list(tmp_path.iterdir())


def test_a_state_that_was_cut_short_does_not_count(tmp_path):
    progress = Progress(tmp_path, {})
    progress.save("a", 5, lambda folder: None)

    def cut(folder):
        (folder / "x").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        progress.save("a", 6, cut)
    assert progress.latest("a").name == "000000005"
    progress.save("a", 6, lambda folder: None)
    assert list(progress.latest("a").iterdir()) == []


def test_other_settings_are_refused(tmp_path):
    Progress(tmp_path, {"tokens": 2})  # it was stopped before it reached anything
    Progress(tmp_path, {"tokens": 3, "model": None}).save("a", 5, lambda folder: None)
    Progress(tmp_path, {"model": None, "tokens": 3})
    with pytest.raises(typer.BadParameter, match="holds what a run with other settings has reached: remove it"):
        Progress(tmp_path, {"tokens": 4, "model": None})
