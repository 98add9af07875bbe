"""Every evaluation script explains itself and refuses what it cannot do before it loads a model."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted(p for p in (Path(__file__).parents[2] / "eval").glob("*.py") if p.stem != "common")
WRONG = {"needle": "--rows", "fidelity": "--rows", "decode": "--rows", "cpu_ratio": "--kind"}


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_help(script):
    done = run(script, "--help")
    assert done.returncode == 0, done.stderr
    assert "--threads" in done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_wrong_names_are_refused_with_the_choices(script):
    if script.stem not in WRONG:
        pytest.skip("has no such option")
    done = run(script, WRONG[script.stem], "nonesuch")
    assert done.returncode == 2, done.stderr
    assert "nonesuch" in done.stderr
    assert "choose among" in " ".join(done.stderr.replace("│", " ").split())
