"""Functions shared by the evaluation scripts."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import common
from records import Records, write_csv


def test_a_row_has_a_policy_and_options(tmp_path: Path) -> None:
    for text, policy, options in (
        ("scout:budget=512,tier=split,recall=8", "scout", {"budget": 512, "tier": "split", "recall": 8}),
        ("hgca:gpu_ratio=0.1,reevaluate=False", "hgca", {"gpu_ratio": 0.1, "reevaluate": False}),
        ("scout-512-int8", "scout", {"budget": 512, "host_dtype": "int8"}),
    ):
        row = common.row_of(text)
        assert (row.name, row.policy, row.options) == (text, policy, options)
    own = {"mine": common.Row("mine", "full"), "both": ["mine", "window-512"]}
    rows = common.rows_of(["full, scout:budget=512,tier=split,both", "quest:budget=512"], "one", known=own)
    assert [row.name for row in rows[1:]] == ["scout:budget=512,tier=split", "mine", "window-512", "quest:budget=512"]
    assert [row.options.get("tier") for row in rows[:2]] == ["one", "split"]
    file = tmp_path / "some.safetensors"
    file.write_text("one")
    row = common.row_of(f"fluxion:predictor={file},tau=0.1")
    assert (row.name, row.files.keys()) == ("fluxion:predictor=some.safetensors,tau=0.1", {"predictor"})
    for text, message in (
        ("nonesuch", "policy='nonesuch' is unknown"),
        ("scout:window=512", "window: not a knob of policy 'scout'"),
        ("full,full", "twice"),
    ):
        with pytest.raises(typer.BadParameter, match=message):
            common.rows_of([text])


def test_csv_carries_what_the_result_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file that a command names it tells the name, and not where it lay."""
    given = ["/home/me/novel.txt", "--row=fluxion:predictor=/a/p.safetensors,tau=0.1", "Qwen/Qwen3-8B"]
    monkeypatch.setattr("sys.argv", ["eval/quality.py", *given])
    monkeypatch.setattr("__main__.__spec__", None)  # as of a script, and not of a module such as pytest
    path = tmp_path / "new" / "results.csv"
    write_csv(path, [{"row": "a", "ms": 1.23456789}, {"row": "b", "ms": 2, "note": "late"}])
    with path.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["ms"], first["note"], second["note"]) == ("1.23457", "", "late")
    told = "python eval/quality.py novel.txt --row=fluxion:predictor=p.safetensors,tau=0.1 Qwen/Qwen3-8B"
    assert first["command"] == told


def test_options_of_a_script_are_its_parameters(tmp_path: Path) -> None:
    seen = []

    def main(count: int = 2, *, setting: common.TextSetting = common.EXACT_TEXT) -> None:
        """Count."""
        seen.append((count, setting))

    book = tmp_path / "book.txt"
    book.write_text("Call me Ishmael.")
    result = CliRunner().invoke(common.command(main), ["--count", "3", "--prose", str(book), "--model", "m"])
    assert result.exit_code == 0, result.output
    assert seen == [(3, common.TextSetting("m", "float32", 0, common.OUT, book))]


def record(sample: str, **more: Any) -> dict[str, Any]:
    return {"sample": sample, "answer": "Añ\u2028o\n", **more}


def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    first = Records(file, ["sample"], {"model": "m"})
    first.add(record("1"))
    first.add(record("2"))
    whole = file.read_bytes()
    for cut in (2, 30):  # killed while it wrote: of the last line a part is missing
        file.write_bytes(whole[:-cut])
        again = Records(file, ["sample"], {"model": "m"})
        assert list(again.found) == [("1",)]
        again.add(record("3"))
        assert list(Records(file, ["sample"], {"model": "m"}).found.values()) == [record("1"), record("3")]
    with pytest.raises(typer.BadParameter, match=r"other settings.*\"m\".*remove it"):
        Records(file, ["sample"], {"model": "n"})
    processes = [Records(tmp_path / "shared.jsonl", ["sample"], {}) for _ in range(3)]
    for number, process in enumerate(processes):
        process.add(record(str(number)))
    processes[0].read()
    assert [*processes[0].found] == [("0",), ("1",), ("2",)]
    processes[0].remove()
    assert {*tmp_path.iterdir()} == {file}


def test_rows_are_asked_about_texts_until_all_have_answered(tmp_path: Path) -> None:
    """A stopped run reads again only the text at which it was."""
    setting, rows = common.Setting(out=tmp_path / "out.csv"), [common.Row(name, "full") for name in "ab"]
    places, read, asked = [{"text": 1}, {"text": 2}], [], []

    def measure(shared: int, row: common.Row) -> list[dict[str, Any]]:
        asked.append((shared, row.name))
        if len(asked) == 4:
            raise KeyboardInterrupt
        return [{"way": way, "twice": 2 * shared} for way in (0, 1)]

    def run() -> list[dict[str, Any]]:
        return common.over_texts(setting, rows, places, lambda place: read.append(place) or place["text"], measure)

    with pytest.raises(KeyboardInterrupt):
        run()
    lines = run()
    assert (read, asked[4:]) == ([places[0], places[1], places[1]], [(2, "b")])
    assert len(lines) == 8
    assert lines[-1] == {"row": "b", "text": 2, "way": 1, "twice": 4}
    assert {path.name for path in tmp_path.iterdir()} == {"out.csv"}
