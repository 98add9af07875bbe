"""Prompts of benchmark samples: length, truncation of the middle alone, position of the question."""

from __future__ import annotations

import pytest
import typer
from letters import letters
from tiny import tiny_model

from tasks.prompts import Prompter
from tasks.samples import Sample


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture
def tokenizer():
    made = letters()
    made.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}>"
    return made


def sample(prompt, question, **more):
    return Sample("qa", "1", prompt, question, 8, lambda answer: 0.0, **more)


def spoken(tokenizer, prompt):
    return tokenizer.decode(prompt.ids[0])


def test_a_short_prompt_is_whole(model, tokenizer):
    prompt = Prompter(model, tokenizer, None, True)(sample("abc\nWhy?", "\nWhy?", start=" So"), 8)
    assert spoken(tokenizer, prompt) == "[abc\nWhy?]> So"
    assert (prompt.whole, prompt.asked) == (14, len("Why?]> So"))


def test_a_long_one_loses_its_middle_and_keeps_its_frame(model, tokenizer):
    text = "".join(map(str, range(100)))
    prompt = Prompter(model, tokenizer, 33, True)(sample(f"{text}\nWhy?", "\nWhy?", start="!"), 8)
    assert spoken(tokenizer, prompt) == f"[{text[:14]}{text[-9:]}\nWhy?]>!"
    assert prompt.ids.shape[1] <= 33
    assert prompt.whole == 32 + len(text) + 5 - 29
    assert prompt.asked == len("Why?]>!")


@pytest.mark.parametrize(("chat", "allowed"), [(False, True), (True, False)])
def test_without_a_template(model, tokenizer, chat, allowed):
    prompt = Prompter(model, tokenizer, None, chat)(sample("abc Why?", " Why?", chat=allowed), 8)
    assert spoken(tokenizer, prompt) == "abc Why?"
    assert prompt.asked == 4


def test_the_answer_has_its_positions(model, tokenizer):
    prompt = Prompter(model, tokenizer, None, True)(sample("x" * 2000 + "Why?", "Why?"), 24)
    assert prompt.ids.shape[1] == 999  # two halves and a frame of three


def test_a_question_that_would_be_cut_is_refused(model, tokenizer):
    with pytest.raises(typer.BadParameter, match="17 tokens do not hold the question of qa"):
        Prompter(model, tokenizer, 20, True)(sample("x" * 50 + "Who was the first?", "Who was the first?"), 8)
    with pytest.raises(typer.BadParameter, match="this model has 1024 positions"):
        Prompter(model, tokenizer, 2000, True)
