"""The quickstart as a user runs it."""

import subprocess
import sys
from pathlib import Path

import pytest

from hf_offload import assets

SCRIPT = Path(__file__).parents[2] / "examples" / "quickstart.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=600, check=False
    )


def test_a_question_needs_its_text():
    done = run("--question", "Who?")
    assert done.returncode == 2
    assert "add --file" in " ".join(done.stderr.replace("│", " ").split())


def test_short_prompt_is_answered_by_every_row(smollm2):
    done = run("--tokens", "1500", "--budget", "512")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("yes") == 3


@pytest.mark.slow
def test_default_finds_the_number():
    try:
        assets.find_smollm2()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("yes") == 3
