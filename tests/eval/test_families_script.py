"""The script over model types: its processes, crashes and hangs, and the page that it writes."""

import os

import pytest
from typer.testing import CliRunner

import common
import families
from walk import configs, page


def test_unknown_types_are_refused():
    result = CliRunner().invoke(common.command(families.main), ["--types", "llama,nonesuch"])
    assert result.exit_code == 2
    assert "nonesuch" in result.output


@pytest.mark.parametrize("given", ["--out", "--markdown"])
def test_a_walk_that_goes_elsewhere_leaves_the_page_alone(given, monkeypatch, tmp_path):
    """`docs/models.md` is made of the usual CSV alone."""
    kept = tmp_path / "page.md"
    monkeypatch.setattr(families, "PAGE", kept)
    row = {"model_type": "a", "status": "refused", "model": "A", "message": "ValueError: A has no layer"}
    monkeypatch.setattr(families, "walk", lambda types, rows, here, *rest: rows.update(a=row | here))
    options = ["--out", str(tmp_path / "some.csv")]
    if given == "--markdown":
        options += ["--markdown", str(tmp_path / "other.md")]
    result = CliRunner().invoke(common.command(families.main), options)
    assert result.exit_code == 0, result.output
    assert not kept.exists()
    assert (tmp_path / "other.md").exists() == (given == "--markdown")


def _die(pipe):
    if pipe.recv() == "hangs":
        pipe.recv()
    os._exit(7)


@pytest.mark.slow
def test_a_type_that_crashes_or_hangs_does_not_end_the_walk(monkeypatch):
    monkeypatch.setattr(families, "serve", _die)
    helper = families.Helper(limit=60)
    assert helper.compare("crashes") == {
        "model_type": "crashes",
        "status": "error",
        "message": "the process ended with code 7",
    }
    helper.limit = 0.2
    assert helper.compare("hangs")["message"] == "no end after 0 s"
    helper.stop()


@pytest.mark.parametrize(("model_type", "kinds"), [("llama", None), ("gemma3_text", {"sliding", "full"})])
def test_a_tiny_config_has_all_kinds_of_layers(model_type, kinds):
    config = configs.tiny_config(model_type)
    assert config.num_hidden_layers == configs.LAYERS
    if kinds:
        assert {kind.removesuffix("_attention") for kind in config.layer_types} == kinds


def test_the_page_says_what_became_of_each_type():
    here = {"transformers": "5", "torch": "2", "python": "3", "commit": "abc", "command": "python eval/families.py"}
    rows = [
        {"model_type": "a", "status": "exact", "model": "A", "held": 2, "layers": 4, "error": "1e-06", "message": ""},
        {"model_type": "b", "status": "refused", "model": "B", "message": "ValueError: B has no layer"},
    ]
    text = page.render([row | here for row in rows], {"a"})
    assert "| exact | 1 | 0 |" in text
    assert "| wrong | 0 | 0 |" in text
    assert "**2 of 4 layers held** (1): `a`." in text
    assert "**the model has no layer** (1): `b`." in text
