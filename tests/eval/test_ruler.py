"""RULER's tasks generated for a tokenizer from local sources."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from letters import letters
from tiny import tiny_model
from typer.testing import CliRunner

pytest.importorskip("wonderwords", reason="needs lm-eval[ruler]: pip install hf-offload[eval]")

import common
import ruler

WORDS = [f"word{letter}" for letter in "abcdefghijklmnopqrst"]
PARAGRAPHS = [f"Paragraph {n} tells of the town of Place{n}. Its mayor is Person{n}." for n in range(30)]


@pytest.fixture(autouse=True)
def few_words(monkeypatch):
    """lm-eval joins every adjective with every noun when it is imported: millions of words."""
    kinds = dict.fromkeys(("noun", "nouns", "adjective", "adjectives", "verb", "verbs"), WORDS)
    monkeypatch.setattr("wonderwords.RandomWord", lambda: SimpleNamespace(_categories=kinds))
    monkeypatch.setattr("nltk.download", lambda *_: True)
    for name in [name for name in sys.modules if name.startswith("lm_eval.tasks.ruler")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def sources(tmp_path):
    squad = {
        "data": [
            {
                "paragraphs": [
                    {
                        "context": text,
                        "qas": [
                            {
                                "question": f"Who is the mayor of Place{n}?",
                                "answers": [{"text": f"Person{n}"}],
                                "is_impossible": False,
                            }
                        ],
                    }
                    for n, text in enumerate(PARAGRAPHS)
                ]
            }
        ]
    }
    (tmp_path / "squad.json").write_text(json.dumps(squad))
    (tmp_path / "novel.txt").write_text(" ".join(f"Sentence {n} of the novel is short." for n in range(900)))
    return tmp_path


def make(task, sources, samples=2, length=4096):
    return ruler.samples_of(task, length, letters(), samples, sources, sources / "novel.txt")


@pytest.mark.parametrize("task", ["niah_single_1", "niah_single_2", "niah_multiquery", "fwe"])
def test_tasks_fit_and_score(sources, task):
    found = make(task, sources)
    assert len(found) == 2
    for sample in found:
        assert 2000 < len(sample.prompt + sample.start) <= 4096
        assert sample.prompt.rstrip().endswith(sample.question)
        assert len(sample.question) < 400
        assert sample.score("nothing") == 0
    assert make(task, sources)[1].prompt == found[1].prompt


def test_the_answer_is_in_the_haystack(sources):
    sample = make("niah_single_2", sources, 1)[0]
    number = sample.prompt.partition(" is: ")[2].partition(".")[0]
    assert number.isdigit()
    assert sample.score(f"It is {number}.") == 100
    assert "of the novel" in sample.prompt
    assert sample.start.endswith("mentioned in the provided text is")


def test_questions_from_a_file(sources):
    sample = make("qa_squad", sources, 1, 2048)[0]
    place = sample.question.partition("Place")[2].partition("?")[0]
    assert sample.score(f"It is Person{place}!") == 100
    assert sample.task == "qa_squad, 2k"
    assert make("qa_hotpot", sources) == []


def test_thirteen_tasks():
    assert len(ruler.BUILDERS) == 13
    assert len(ruler.SETS["niah"]) == 8


def test_a_task_without_room_is_told_before_any_answer(sources, monkeypatch):
    monkeypatch.setattr(common, "load", lambda *_: (tiny_model("llama"), letters()))
    options = ["--tasks", "niah_single_1", "--lengths", "16", "--row", "full", "--prose", str(sources / "novel.txt")]
    result = CliRunner().invoke(common.command(ruler.main), [*options, "--out", str(sources / "ruler.csv")])
    assert result.exit_code == 2
    assert "niah_single_1, 16 cannot be built" in " ".join(result.output.replace("│", " ").split())
