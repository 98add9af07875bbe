"""One script on two commits in turns, each with its own package."""

from __future__ import annotations

import csv
import subprocess
import sys
from types import SimpleNamespace

import pandas as pd
import pytest
from typer.testing import CliRunner

import common
import versus

SCRIPT = """
import csv, os, sys
import hf_offload
from turns import turn

def tell(word):
    with open(sys.argv[1], "a") as file:
        print(hf_offload.SPEED, word, file=file)

assert hf_offload.Scout == "of a module"
assert hf_offload.demo_text("code") == "of this checkout"
tell("prepares")
for number in range(3):
    turn()
    tell(number)
    if number == int(sys.argv[2]):
        raise ArithmeticError("seven")
with open(sys.argv[sys.argv.index("--out") + 1], "w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(["row", "p20", "p50", "p80", "threads"])
    writer.writerow(["scout", hf_offload.SPEED, 2 * hf_offload.SPEED, 7, 3])
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with a package that has become twice as fast, and a script."""
    package = tmp_path / "hf_offload"
    package.mkdir()
    (package / "inner.py").write_text('Scout = "of a module"\n')
    (package / "__init__.py").write_text("from hf_offload import inner\nSPEED = 2\n")
    for line in ("init -q", "add .", "-c user.name=a -c user.email=a@b.c commit -q -m 1"):
        subprocess.run(["git", *line.split()], cwd=tmp_path, check=True)
    (package / "__init__.py").write_text("from hf_offload import inner\nSPEED = 1\n")
    (tmp_path / "steps.py").write_text(SCRIPT)
    (tmp_path / "texts.py").write_text('def demo_text(kind):\n    return "of this checkout"\n')
    texts = SimpleNamespace(__name__="hf_offload.texts", __file__=str(tmp_path / "texts.py"))
    monkeypatch.setitem(sys.modules, "hf_offload.texts", texts)
    monkeypatch.setattr(versus.hf_offload.load_demo_model, "__module__", "hf_offload.texts")
    monkeypatch.setattr(versus, "ROOT", tmp_path)
    monkeypatch.setattr(versus, "EVAL", tmp_path)
    return tmp_path


def invoke(checkout, *arguments):
    options = ["HEAD", "--script", "steps", "--out", str(checkout / "out.csv"), *arguments]
    return CliRunner().invoke(common.command(versus.main), options)


def test_two_commits_take_turns(checkout):
    result = invoke(checkout, "--", str(checkout / "log"), "9")
    assert result.exit_code == 0, result.output
    order = (checkout / "log").read_text().splitlines()
    assert order == ["2 prepares", "1 prepares", "1 0", "2 0", "2 1", "1 1", "1 2", "2 2"]
    with (checkout / "out.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    told = {
        "script": "steps",
        "row": "scout",
        "p50_base": "4",
        "p50": "2",
        "p50_ratio": "0.5",
        "p20_ratio": "0.5",
        "threads": "3",
    }
    assert told.items() <= row.items()
    assert row["base"] == versus.git("rev-parse", "--short=12", "HEAD").decode().strip()
    assert "p80_base" not in row


def test_what_fails_or_cannot_be_compared_is_told_and_no_process_is_left(checkout, monkeypatch):
    made, start = [], subprocess.Popen
    monkeypatch.setattr(versus.subprocess, "Popen", lambda *a, **k: made.append(start(*a, **k)) or made[-1])
    result = invoke(checkout, "--", str(checkout / "log"), "1")
    assert "ArithmeticError: seven" in str(result.exception)
    assert "the script ended with status 1" in str(result.exception)
    assert not (checkout / "out.csv").exists()
    assert all(process.poll() is not None for process in made)
    assert "nonesuch" in str(invoke(checkout, "--script", "nonesuch").exception)
    result = CliRunner().invoke(common.command(versus.main), ["nonesuch", "--script", "steps"])
    assert (result.exit_code, "revision" in result.output) == (2, True)


def test_numbers_are_medians_over_runs():
    """Of a script without percentiles all that differs is compared."""

    def rows(*times):
        return [pd.DataFrame({"row": ["a"], "p50": one, "p80": one + 1, "commit": "c"}) for one in times]

    assert versus.compare(rows(4, 2, 9), rows(3, 1, 2)) == [{"row": "a", "p50_base": 4, "p50": 2, "p50_ratio": 0.5}]
    base = pd.DataFrame({"row": ["a", "b"], "kl": [0.5, 0], "same": True, "top1": 1})
    found = versus.compare([base], [base.assign(kl=[0, 1], same=False)])
    differs = {"kl_base": 0.5, "kl": 0, "kl_ratio": 0, "same_base": True, "same": False}
    assert found[0] == {"row": "a", "top1": 1, **differs}
    assert found[1] == {"row": "b", "top1": 1, **differs, "kl_base": 0, "kl": 1, "kl_ratio": None}
    with pytest.raises(ValueError, match="the other commit has 2 rows and this one 1"):
        versus.compare([base], [base[:1]])
