"""Parsing of rows (policies with options) from text."""

from __future__ import annotations

import pytest
import typer

from tasks.rows import parse_row, parse_rows


def test_a_row_has_a_policy_and_options():
    row = parse_row("scout:budget=512,tier=split,recall=8")
    assert (row.name, row.policy) == ("scout:budget=512,tier=split,recall=8", "scout")
    assert row.options == {"budget": 512, "tier": "split", "recall": 8}
    assert parse_row("full").options == {}
    assert parse_row("hgca:gpu_ratio=0.1,reevaluate=False").options == {"gpu_ratio": 0.1, "reevaluate": False}


def test_the_folder_of_a_file_is_not_in_the_name(tmp_path):
    assert parse_row(f"fluxion:predictor={tmp_path}/some.safetensors,tau=0.1").name == (
        "fluxion:predictor=some.safetensors,tau=0.1"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonesuch", "policy='nonesuch' is unknown"),
        ("scout:window=512", "window: not a knob of policy 'scout'"),
        ("window:budget=many", "budget='many'"),
        ("dynamic:budget=512", "policy='dynamic' is unknown"),
        ("fluxion", "needs a predictor"),
        ("scout:512", "not a policy with options"),
    ],
)
def test_wrong_rows_are_refused(text, message):
    with pytest.raises(typer.BadParameter, match=message):
        parse_row(text)


def test_a_row_is_there_once():
    with pytest.raises(typer.BadParameter, match="twice"):
        parse_rows(["full", "full"])
