"""Every evaluation script explains itself and refuses unknown names before it loads a model."""

import pytest
from typer.testing import CliRunner

import common
import cpu_ratio
import decode
import fidelity
import needle

MAINS = [cpu_ratio.main, decode.main, fidelity.main, needle.main]


@pytest.mark.parametrize("main", MAINS, ids=lambda main: main.__module__)
def test_help(main):
    result = CliRunner().invoke(common.command(main), ["--help"])
    assert result.exit_code == 0
    assert "--threads" in result.output


@pytest.mark.parametrize(
    ("main", "option"),
    [
        (cpu_ratio.main, "--kind"),
        (decode.main, "--rows"),
        (decode.main, "--contexts"),
        (fidelity.main, "--rows"),
        (fidelity.main, "--kinds"),
        (needle.main, "--rows"),
        (needle.main, "--kinds"),
    ],
)
def test_unknown_names_are_refused(main, option, monkeypatch):
    monkeypatch.setattr(common.assets, "load_model", lambda *a, **k: pytest.fail("the model was loaded"))
    result = CliRunner().invoke(common.command(main), [option, "nonesuch"])
    assert result.exit_code == 2
    assert "nonesuch" in result.output


@pytest.mark.parametrize("main", MAINS, ids=lambda main: main.__module__)
def test_unknown_dtype_is_refused(main):
    result = CliRunner().invoke(common.command(main), ["--dtype", "int3"])
    assert result.exit_code == 2
    assert "int3" in result.output
