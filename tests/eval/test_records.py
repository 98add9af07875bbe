"""Records of stopped runs: kept answers, not mixed with those of other settings."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import typer

from common import Records
from tasks.run import KEYS, check_files


def record(sample, row="full", **more):
    return {"task": "qasper", "sample": sample, "row": row, "setup": "dense", "answer": "Añ\u2028o\n", **more}


def test_a_run_goes_on_where_it_was_stopped(tmp_path):
    file = tmp_path / "out.jsonl"
    first = Records(file, KEYS, {"model": "m"})
    first.add(record("1"))
    first.add(record("2", "scout"))
    whole = file.read_bytes()
    for cut in (1, 30):  # killed while it wrote: of the last line a part is missing
        file.write_bytes(whole[:-cut])
        again = Records(file, KEYS, {"model": "m"})
        assert list(again.found) == [again.key(record("1"))]
        again.add(record("3"))
        assert list(Records(file, KEYS, {"model": "m"}).found.values()) == [record("1"), record("3")]


def test_a_run_with_other_settings_is_refused(tmp_path):
    Records(tmp_path / "out.jsonl", KEYS, {"model": "m"}).add(record("1"))
    with pytest.raises(typer.BadParameter, match=r"other settings.*\"m\".*remove it"):
        Records(tmp_path / "out.jsonl", KEYS, {"model": "n"})


def test_a_run_that_answered_nothing_is_in_nobodys_way(tmp_path):
    file = tmp_path / "out.jsonl"
    Records(file, KEYS, {"model": "m"})
    Records(file, KEYS, {"model": "n"}).add(record("1"))
    assert json.loads(file.read_text(encoding="utf-8").split("\n")[0]) == {"settings": {"model": "n"}}
    with pytest.raises(typer.BadParameter, match="other settings"):
        Records(file, KEYS, {"model": "m"})


def test_processes_write_apart_and_read_together(tmp_path):
    file = tmp_path / "out.jsonl"
    parts = [Records(file, KEYS, {}, process) for process in range(3)]
    for number, part in enumerate(parts):
        part.add(record(str(number)))
    assert len(list(tmp_path.glob("*.jsonl"))) == 3
    assert {key[1] for key in Records(file, KEYS, {}, 1).found} == {"0", "1", "2"}
    parts[0].join()
    assert list(tmp_path.iterdir()) == [file]
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]]
    assert [line.get("sample") for line in lines] == [None, "0", "1", "2"]
    assert parts[0].found.keys() == Records(file, KEYS, {}).found.keys()


def test_another_runs_file_is_no_part_of_this_one(tmp_path):
    for name in ("out.2048.jsonl", "out.4k.jsonl"):
        Records(tmp_path / name, KEYS, {}).add(record("1"))
    Records(tmp_path / "out.jsonl", KEYS, {}).join()
    assert {path.name for path in tmp_path.iterdir()} == {"out.jsonl", "out.2048.jsonl", "out.4k.jsonl"}
    assert not Records(tmp_path / "out.jsonl", KEYS, {}).found


def test_answers_by_another_file_of_that_name_are_refused(tmp_path):
    found = Records(tmp_path / "out.jsonl", KEYS, {})
    found.add(record("1", "fluxion", files={"predictor": "a"}))
    found.add(record("1"))
    rows = [SimpleNamespace(name=name, files={}) for name in ("full", "scout")]
    check_files(found, [SimpleNamespace(name="fluxion", files={"predictor": "a"}), *rows])
    with pytest.raises(typer.BadParameter, match="--row fluxion with another predictor: remove it"):
        check_files(found, [*rows, SimpleNamespace(name="fluxion", files={"predictor": "b"})])


def test_a_damaged_line_is_told_by_its_number(tmp_path):
    Records(tmp_path / "out.jsonl", KEYS, {}).add(record("1"))
    with (tmp_path / "out.jsonl").open("a", encoding="utf-8") as file:
        file.write("half\n")
    with pytest.raises(typer.BadParameter, match=r"out.jsonl, line 3, is no JSON .*: remove that line"):
        Records(tmp_path / "out.jsonl", KEYS, {})


def test_what_is_known_is_not_done_again(tmp_path):
    done = []

    def work():
        done.append(1)
        return {"kl": 0.5}

    for _ in range(2):
        found = Records(tmp_path / "out.jsonl", ("row",), {})
        assert found.once({"row": "full"}, work) == {"row": "full", "kl": 0.5}
    assert len(done) == 1
    found.remove()
    assert not list(tmp_path.iterdir())
