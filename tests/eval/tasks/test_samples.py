"""Samples read from a folder: whole lines, and errors that name the wrong line."""

from __future__ import annotations

import json

import pytest
import typer

from tasks.samples import read_rows


def write(folder, *lines):
    (folder / "qa.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_a_row_may_hold_any_character(tmp_path):
    rows = [{"input": "a\u2028b\x85c\u2029\x1c", "answers": []}, {"input": "", "answers": ["d\n"]}]
    write(tmp_path, *(json.dumps(row, ensure_ascii=False) for row in rows), "")
    assert read_rows(tmp_path, "qa", ["input", "answers"]) == rows
    assert read_rows(tmp_path, "other", ["input"]) == []


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"input": ', "line 2, is no JSON"),
        ('{"question": "Who?"}', "line 2, has no input, answers$"),
        ("[1, 2]", "line 2, has no input, answers$"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, line, told):
    write(tmp_path, '{"input": "Who?", "answers": []}', line)
    with pytest.raises(typer.BadParameter, match=told):
        read_rows(tmp_path, "qa", ["input", "answers"])
