"""Answers from one prefill shared by all rows, against a prefill for each row."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from letters import letters
from tiny import prompt, tiny_model

import common
from hf_offload.model.model_support import on_device
from tasks.answers import Reading, answer
from tasks.prompts import Prompt
from tasks.samples import Sample

ROWS = (
    "full",
    "scout:budget=64,sinks=8,recent=16,block_size=8",
    "scout:budget=64,sinks=8,recent=16,block_size=8,digest=quest,host_dtype=int8",
    "window:budget=48,sinks=8,block_size=8",
    "fixed_hybrid:budget=0.2,sinks=8,local=16,block_size=8",
    "quest:budget=64,sinks=8,recent=16,block_size=8",
    "hgca:window=32,block_size=8",
    "h2o:heavy=0.2,recent=0.2,prompt_queries=20",
    "infinigen:partial=0.5,prompt_queries=20",
    "dynamic",
)
LENGTH = 150
parse_row = partial(common.row_of, stock=common.STOCK)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def ids():
    return prompt(1, LENGTH)[0]


def sample(score=float, **more):
    return Sample("qa", "1", "", "", 8, score, **more)


@torch.inference_mode()
def go_on(model, cache, logits, steps=12):
    """Logits `[steps, V]` of the tokens that a cache leads to, greedily."""
    found = []
    for _ in range(steps):
        logits = model(logits.argmax(-1, keepdim=True), past_key_values=cache).logits[:, -1]
        found.append(logits[0])
    return torch.stack(found)


@pytest.mark.parametrize("text", ROWS)
@pytest.mark.parametrize("tokens", [pytest.param(LENGTH, marks=pytest.mark.slow), 101])
@torch.inference_mode()
def test_taken_over_is_as_if_it_had_read_itself(model, ids, text, tokens):
    row = parse_row(text)
    reading = Reading(model, ids)
    got = reading.start(row, tokens)
    assert got[0].get_seq_length() == tokens
    shared = reading._read is not None
    assert shared == (not on_device(model) and row.policy not in ("hgca", "h2o", "infinigen", "dynamic"))
    cache = row.make_cache(model)
    want = common.prefill(model, cache, ids[:, :tokens])
    if tokens == LENGTH:
        assert torch.equal(got[1], want)
        assert torch.equal(go_on(model, *got), go_on(model, cache, want))
        return
    question = ids[:, tokens, None]  # keys and values of a longer forward differ in their last bits
    got, want = (go_on(model, c, model(question, past_key_values=c).logits[:, -1]) for c in (got[0], cache))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-2)


@torch.inference_mode()
def test_one_forward_reads_for_all_rows(model, ids, monkeypatch):
    read, real = [], common.prefill

    def prefill(model, cache, ids, *chunk):
        read.append(ids.shape[1])
        return real(model, cache, ids, *chunk)

    monkeypatch.setattr(common, "prefill", prefill)
    reading = Reading(model, ids)
    for text in ROWS[:5]:
        reading.start(parse_row(text), LENGTH)
        reading.start(parse_row(text), 101)
    assert read == ([LENGTH, 101] * 5 if on_device(model) else [LENGTH])
    del read[:]
    Reading(model, ids, chunk=64).start(parse_row(ROWS[1]), LENGTH)
    Reading(model, ids).start(parse_row(f"{ROWS[1]},tier=split"), LENGTH)
    assert read == [LENGTH, LENGTH]


def test_the_answer_is_that_of_generate(model, ids):
    """A budget that covers the prompt is full attention, whether the question is fed at once or token by token."""
    row = parse_row("scout:budget=512")
    common.FULL.activate(model)
    want = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)[0, LENGTH:]
    for setup, steps in (("dense", 8), ("sparse", 8 + 20)):
        found = answer(Reading(model, ids), row, setup, Prompt(ids, 20, LENGTH), sample(len), letters(), 9)
        assert found["answer"] == letters().decode(want, skip_special_tokens=True)
        assert (found["score"], found["new_tokens"]) == (len(found["answer"]), 9)
        assert found["steps"] == steps


def test_an_answer_ends_where_it_should(model, ids):
    row = parse_row("dynamic")

    def ask(**more):
        return answer(Reading(model, ids), row, "dense", Prompt(ids, 20, LENGTH), sample(len, **more), letters(), 30)

    whole = ask()
    assert (whole["new_tokens"], whole["steps"]) == (30, None)
    stop = whole["answer"][4:6]
    cut = ask(until=(stop,))
    assert cut["answer"] == whole["answer"].split(stop)[0]
    assert cut["score"] == len(cut["answer"]) < whole["score"]
    assert cut["new_tokens"] < 30


def test_a_first_token_may_be_the_end(model, ids, monkeypatch):
    row = parse_row("dynamic")
    common.FULL.activate(model)
    with torch.inference_mode():
        first = int(model(ids).logits[0, -1].argmax())
    monkeypatch.setattr(model.generation_config, "eos_token_id", [first])
    found = answer(Reading(model, ids), row, "dense", Prompt(ids, 20, LENGTH), sample(len), letters(), 30)
    assert found["new_tokens"] == 1
