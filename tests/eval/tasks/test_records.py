"""Records of stopped runs: kept answers, not mixed with those of other settings."""

from __future__ import annotations

import json

import pytest
import typer

from tasks.records import Records, key_of


def record(sample, row="full", **more):
    return {"task": "qasper", "sample": sample, "row": row, "setup": "dense", "answer": "Añ\u2028o\n", **more}


def test_a_run_goes_on_where_it_was_stopped(tmp_path):
    file = tmp_path / "out.jsonl"
    first = Records(file, {"model": "m"})
    first.add(record("1"))
    first.add(record("2", "scout"))
    whole = file.read_bytes()
    for cut in (1, 30):  # killed while it wrote: of the last line a part is missing
        file.write_bytes(whole[:-cut])
        again = Records(file, {"model": "m"})
        assert list(again.found) == [key_of(record("1"))]
        again.add(record("3"))
        assert list(Records(file, {"model": "m"}).found.values()) == [record("1"), record("3")]


def test_a_run_with_other_settings_is_refused(tmp_path):
    Records(tmp_path / "out.jsonl", {"model": "m"}).add(record("1"))
    with pytest.raises(typer.BadParameter, match=r"other settings.*\"m\".*remove it"):
        Records(tmp_path / "out.jsonl", {"model": "n"})


def test_a_run_that_answered_nothing_is_in_nobodys_way(tmp_path):
    file = tmp_path / "out.jsonl"
    Records(file, {"model": "m"})
    Records(file, {"model": "n"}).add(record("1"))
    assert json.loads(file.read_text(encoding="utf-8").split("\n")[0]) == {"settings": {"model": "n"}}
    with pytest.raises(typer.BadParameter, match="other settings"):
        Records(file, {"model": "m"})


def test_processes_write_apart_and_read_together(tmp_path):
    file = tmp_path / "out.jsonl"
    parts = [Records(file, {}, process) for process in range(3)]
    for number, part in enumerate(parts):
        part.add(record(str(number)))
    assert len(list(tmp_path.glob("*.jsonl"))) == 3
    assert {key[1] for key in Records(file, {}, 1).found} == {"0", "1", "2"}
    parts[0].join()
    assert list(tmp_path.iterdir()) == [file]
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]]
    assert [line.get("sample") for line in lines] == [None, "0", "1", "2"]
    assert parts[0].found.keys() == Records(file, {}).found.keys()


def test_another_runs_file_is_no_part_of_this_one(tmp_path):
    for name in ("out.2048.jsonl", "out.4k.jsonl"):
        Records(tmp_path / name, {}).add(record("1"))
    Records(tmp_path / "out.jsonl", {}).join()
    assert {path.name for path in tmp_path.iterdir()} == {"out.jsonl", "out.2048.jsonl", "out.4k.jsonl"}
    assert not Records(tmp_path / "out.jsonl", {}).found


def test_answers_by_another_file_of_that_name_are_refused(tmp_path):
    found = Records(tmp_path / "out.jsonl", {})
    found.add(record("1", "fluxion", files={"predictor": "a"}))
    found.add(record("1"))
    found.check("fluxion", {"predictor": "a"})
    found.check("full", {})
    found.check("scout", {})
    with pytest.raises(typer.BadParameter, match="--row fluxion with another predictor: remove it"):
        found.check("fluxion", {"predictor": "b"})


def test_a_damaged_line_is_told_by_its_number(tmp_path):
    Records(tmp_path / "out.jsonl", {}).add(record("1"))
    with (tmp_path / "out.jsonl").open("a", encoding="utf-8") as file:
        file.write("half\n")
    with pytest.raises(typer.BadParameter, match=r"out.jsonl, line 3, is no JSON .*: remove that line"):
        Records(tmp_path / "out.jsonl", {})
