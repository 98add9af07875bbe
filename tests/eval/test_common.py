"""Functions shared by the evaluation scripts."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import common
from common import Records


def test_lists_are_parsed_and_refused() -> None:
    assert common.numbers("128, 2k,8k") == [128, 2048, 8192]
    assert common.kinds_of("code, prose,code") == ["code", "prose"]
    for parse, text in ((common.numbers, "1,x"), (common.kinds_of, "code,poetry")):
        with pytest.raises(typer.BadParameter, match=r"1,x|poetry"):
            parse(text)


def test_a_row_has_a_policy_and_options(tmp_path: Path) -> None:
    for text, policy, options in (
        ("scout:budget=512,tier=split,recall=8", "scout", {"budget": 512, "tier": "split", "recall": 8}),
        ("hgca:gpu_ratio=0.1,reevaluate=False", "hgca", {"gpu_ratio": 0.1, "reevaluate": False}),
        ("scout-512-int8", "scout", {"budget": 512, "host_dtype": "int8"}),
    ):
        row = common.row_of(text, stock=common.STOCK)
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
    path = tmp_path / "new" / "results.csv"
    common.write_csv(path, [{"row": "a", "ms": 1.23456789}, {"row": "b", "ms": 2, "note": "late"}])
    with path.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["ms"], first["note"], second["note"]) == ("1.23457", "", "late")
    told = "python eval/quality.py novel.txt --row=fluxion:predictor=p.safetensors,tau=0.1 Qwen/Qwen3-8B"
    assert first["command"] == told


def test_a_dataclass_among_the_parameters_stands_for_its_options(tmp_path: Path) -> None:
    seen = []

    def main(count: int = 2, *, setting: common.TextSetting = common.EXACT_TEXT) -> None:
        """Count."""
        seen.append((count, setting))

    app, book = common.command(main), tmp_path / "book.txt"
    book.write_text("Call me Ishmael.")
    result = CliRunner().invoke(app, ["--count", "3", "--prose", str(book), "--model", "m"])
    assert result.exit_code == 0, result.output
    assert seen == [(3, common.TextSetting("m", "float32", 0, common.RESULTS / "test_common.csv", book))]
    assert seen[0][1].text("prose") == "Call me Ishmael."


def record(sample: str, **more: Any) -> dict[str, Any]:
    return {"sample": sample, "answer": "Añ\u2028o\n", **more}


def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    first = Records(file, ["sample"], {"model": "m"})
    first.add(record("1"))
    first.add(record("2"))
    whole = file.read_bytes()
    for cut in (1, 30):  # killed while it wrote: of the last line a part is missing
        file.write_bytes(whole[:-cut])
        again = Records(file, ["sample"], {"model": "m"})
        assert list(again.found) == [("1",)]
        again.add(record("3"))
        assert list(Records(file, ["sample"], {"model": "m"}).found.values()) == [record("1"), record("3")]
    with pytest.raises(typer.BadParameter, match=r"other settings.*\"m\".*remove it"):
        Records(file, ["sample"], {"model": "n"})
    with file.open("a", encoding="utf-8") as lines:
        lines.write("half\n")
    with pytest.raises(typer.BadParameter, match=r"out.jsonl, line 4, is no JSON .*: remove that line"):
        Records(file, ["sample"], {"model": "m"})


def test_processes_write_apart_and_read_together(tmp_path: Path) -> None:
    file, other = tmp_path / "out.jsonl", tmp_path / "out.2048.jsonl"
    Records(other, ["sample"], {}).add(record("another run's"))
    parts = [Records(file, ["sample"], {}, process) for process in range(3)]
    for number, part in enumerate(parts):
        part.add(record(str(number)))
    assert {key[0] for key in Records(file, ["sample"], {}, 1).found} == {"0", "1", "2"}
    parts[0].join()
    assert set(tmp_path.iterdir()) == {file, other}
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]]
    assert [line.get("sample") for line in lines] == [None, "0", "1", "2"]
