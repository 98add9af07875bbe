"""Facts hidden in a text: their positions, their answers after prompts, and the sampled steps."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hf_offload.tools.training.needle_samples import ask
from hf_offload.tools.training.samples import Sampling

TEXT = [ord("~")] * 4000


class Letters:
    """A token a character; what a chat template writes is in capitals."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        said = [m["content"].strip("\x1f") if self.chat_template == "strips" else m["content"] for m in messages]
        return "BEGIN" + "".join(f"<{m['role'].upper()}>{text}<END>" for m, text in zip(messages, said, strict=True))


def asked(tokenizer: Any, seed: int, **change: int) -> str:
    settings = {"interval": 1000, "first": 64, "local": 300} | change
    return "".join(map(chr, ask(TEXT, tokenizer, **settings, seed=seed)[0].tolist()))


@pytest.mark.parametrize("template", [None, "marks"])
@pytest.mark.parametrize("seed", range(8))
def test_answers_follow_at_every_interval(template: str | None, seed: int) -> None:
    text = asked(Letters(template), seed)
    assert len(text) == 4000
    assert text.startswith("BEGIN<USER>") == (template is not None)
    facts = list(re.finditer(r"~\n([^~\n]+)\n~", text))
    assert len(facts) == 8  # two in each stretch
    for fact in facts:
        assert fact.start(1) >= 64
        assert fact.end(1) <= (fact.start() // 1000 + 1) * 1000 - 300
    for end in (1000, 2000, 3000):
        prompt, answer = text[:end], text[end : end + 60]
        frame, stop = ("\n\n", "\n\n") if template is None else ("<END><ASSISTANT>", "<END><USER>")
        assert prompt.endswith(frame)
        question = prompt.removesuffix(frame).rsplit("\n", 1)[1]
        owner = re.search(r'(?:for the |does the |Where is the |\[")([a-z]+ [a-z]+)', question)
        assert owner is not None
        (fact,) = [one[1] for one in facts if owner[1] in one[1] and one.end() < end]
        said = answer.split(stop)[0]
        secret = re.search(r'(?:is|key|under|=) "?([^ ".]+)"?\.?( Keep it\.)?$', fact)
        assert secret is not None
        assert secret[1] in said


def test_the_same_seed_hides_the_same() -> None:
    assert asked(Letters(None), 3) == asked(Letters(None), 3)
    assert asked(Letters(None), 3) != asked(Letters(None), 4)


@pytest.mark.parametrize(
    ("template", "interval", "message"),
    [(None, 420, "interval=420 leaves no room for facts 300 tokens before"), ("strips", 1000, "chat template")],
)
def test_refused(template: str | None, interval: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}.*use asked=0"):
        asked(Letters(template), 0, interval=interval)


def test_half_of_the_steps_lie_in_the_answers() -> None:
    plan = Sampling(interval=400, steps=8).positions(1700, seed=1, asked=True)
    assert list(plan) == [400, 800, 1200, 1600]
    for length, steps in plan.items():
        assert sum(step < length + 24 for step in steps) == 4
        assert len({*steps}) == 8
        assert all(length <= step < min(length + 400, 1700) for step in steps)
    assert Sampling(interval=400, steps=8).positions(408, seed=1, asked=True) == {400: list(range(400, 408))}
