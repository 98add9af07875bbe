"""Needles in a second turn: prompts, their order, and the counted needles."""

from __future__ import annotations

import csv

import pytest
import torch
from tiny import prompt, tiny_model
from typer.testing import CliRunner

import common
import second_turn
from hf_offload.tools import assets


class Letters:
    """A tokenizer: a token a letter, a template of marks."""

    chat_template = "marks"

    def __call__(self, text, **_):
        return {"input_ids": torch.tensor([[3 + ord(letter) % 100 for letter in text]])}

    def decode(self, ids, **_):
        return " ".join(str(int(token)) for token in ids)

    def apply_chat_template(self, turns, **_):
        return "".join(f"<{turn['role'][0]}>{turn['content']}</>" for turn in turns) + "<a>"


def test_what_follows_an_answer():
    seen = []

    class Told(Letters):
        def __call__(self, text, **options):
            seen.append((text, options["add_special_tokens"]))
            return super().__call__(text)

    second_turn.next_turn(Told(), "Which number?")
    bare = Told()
    bare.chat_template = None
    second_turn.next_turn(bare, "Which number?")
    assert seen == [("</><u>Which number?</><a>", False), ("\n\nWhich number?\n", False)]


@torch.inference_mode()
def test_the_first_turn_is_decoded_token_by_token():
    model, ids = tiny_model("llama"), prompt(1, 120)[0]
    text, answer, question = ids[:, :80], ids[:, 80:90], ids[:, 90:]
    row = common.Row("full", "full")
    cache = second_turn.first_turn(model, row, text, answer)
    assert cache.get_seq_length() == 89
    assert cache.stats().as_dict()["steps"] == 9
    got = second_turn.generate(model, cache, torch.cat([text, answer, question], 1), 6)
    want = second_turn.generate(model, common.FULL.make_cache(model), ids, 6)
    assert torch.equal(got, want)


def test_needles_that_full_attention_finds_are_counted(tmp_path, monkeypatch):
    """Full attention misses needle 0, gives needle 1 away at once, and finds the others; the window loses them."""
    model = tiny_model("llama")
    monkeypatch.setattr(common, "load", lambda *_: (model, Letters()))
    monkeypatch.setattr(common, "text_of", lambda kind, prose: kind)

    def random_needle(text, tokenizer, seed, *, tokens, question):
        assert question == second_turn.FIRST_QUESTION
        return assets.Needle(prompt(1, tokens, seed)[0], f"{1_000_000 + seed}")

    said = [
        ("7 words", "nothing"),
        ("the number is 1000001", "1,000,001"),
        ("7 words", "it is 1000002", "no idea"),
        ("7 words", "1000003.", "1000002"),
    ]
    answers = iter([answer for of_needle in said for answer in of_needle])
    monkeypatch.setattr(assets, "random_needle", random_needle)
    monkeypatch.setattr(Letters, "decode", lambda self, ids, **_: next(answers))
    out = tmp_path / "second.csv"
    options = ["--found", "2", "--rows", "window-1024", "--tokens", "70", "--answer", "3", "--kinds", "code"]
    result = CliRunner().invoke(common.command(second_turn.main), [*options, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "2 of 4 numbers found by full attention" in " ".join(result.output.split())
    assert "2 of 2" in result.output
    with out.open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [(line["row"], line["seed"], line["found"]) for line in lines] == [
        ("dynamic", "0", "0"), ("dynamic", "1", "1"), ("dynamic", "2", "1"), ("window-1024", "2", "0"),
        ("dynamic", "3", "1"), ("window-1024", "3", "0"),
    ]  # fmt: skip
    assert next(answers, None) is None


def test_it_gives_up_where_full_attention_finds_nothing():
    with pytest.raises(second_turn.typer.BadParameter, match="found 1 of 20 numbers: give fewer --tokens"):
        second_turn.hunt(5, ["code"], lambda seed, kind: seed == 3)
