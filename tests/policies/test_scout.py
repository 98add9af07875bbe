"""Scout's knobs and modes, and when it recalls."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import DEVICE, feed, prompt
from transformers import PreTrainedModel

from hf_offload import HybridCache, Scout
from hf_offload.attention.step_split import SplitStep
from hf_offload.policies.recall import RecallClock

SMALL: dict[str, Any] = {"budget": 96, "sinks": 16, "recent": 16}
SELECTED: dict[str, Any] = {"attend_resident": "selected"}
CPU = torch.device("cpu")
CACHE: dict[str, Any] = {"block_size": 16, "resident": 144}


def decode(model: PreTrainedModel, cache: HybridCache, steps: int = 20) -> list[int]:
    out = model.generate(prompt(1, 300)[0], past_key_values=cache, max_new_tokens=steps, do_sample=False)
    return out[0, 300:].tolist()


def test_the_paper_in_one_word() -> None:
    paper = Scout.paper(1024)
    assert (paper.budget, paper.digest, paper.join, paper.lookahead) == (1024, "quest", "raw", "attend")
    assert (paper.correction, paper.smoothing, paper.synchronous_layers) == (False, 0.0, (0,))
    assert Scout.paper(512, lookahead="off", recall=8).recall == 8


@pytest.mark.parametrize(
    ("knobs", "ahead"),
    [
        ({}, ()), ({"lookahead": "attend"}, (3,)), ({"lookahead": "attend", "synchronous_layers": (2,)}, (1, 3)),
        ({"tier": "one", "synchronous_layers": ()}, ()),
    ],
)  # fmt: skip
def test_layers_that_look_ahead(model: PreTrainedModel, knobs: dict[str, Any], ahead: tuple[int, ...]) -> None:
    if knobs.get("tier") == "one" and DEVICE != "cpu":
        pytest.skip("beside a device there are two memories")
    cache = HybridCache(model, "scout", **SMALL, block_size=16, **({"tier": "split", "resident": 144} | knobs))
    decode(model, cache, 3)
    layers = cache.stats().as_dict()["layers"]
    assert tuple(row["layer"] for row in layers if row["query_cosine"] is not None) == ahead


@pytest.mark.skipif(DEVICE != "cpu", reason="beside a device there are two memories")
def test_looking_ahead_needs_two_memories(model: PreTrainedModel) -> None:
    for policy in (Scout(lookahead="select"), Scout.paper()):
        told = f'lookahead={policy.lookahead!r} needs two memories; use tier="split", a model on a GPU, or lookahead='
        with pytest.raises(ValueError, match=f"^{re.escape(told)}"):
            HybridCache(model, policy, tier="one")


@pytest.mark.parametrize("lookahead", ["off", "select", "attend"])
def test_the_budget_is_kept(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, lookahead: Any) -> None:
    """No layer attends more blocks in a step than the budget has, on both sides together."""
    knobs = {**SMALL, **CACHE, **SELECTED, "lookahead": lookahead, "synchronous_layers": (0,)}
    seen, attend_device, plan = [], SplitStep.attend_device, Scout.plan

    def count(step: SplitStep, device: Any) -> Any:
        seen.append(device.counts)
        return attend_device(step, device)

    def look(policy: Scout, step: Any) -> Any:
        made = plan(policy, step)
        seen.append((seen.pop() + (0 if made.host is None else made.host.host.counts)).max())
        return made

    monkeypatch.setattr(SplitStep, "attend_device", count)
    monkeypatch.setattr(Scout, "plan", look)
    decode(model, HybridCache(model, "scout", tier="split", **knobs))
    # A predicted and a real selection may differ: then both sides attend what each of them wants.
    assert 0 < max(seen) <= (12 if lookahead == "attend" else 6)


def test_recall_lowers_the_share_of_the_cpu(model: PreTrainedModel) -> None:
    """Ten steps of one token want much the same blocks; the next token wants others."""
    (ids, mask), ratios = prompt(1, 340), []
    ids[:, 300:] = ids[:, 300::10].repeat_interleave(10, 1)
    for recall in (0, 1):
        cache = HybridCache(model, "scout", **SMALL, **CACHE, tier="split", recall=recall, smoothing=0.5)
        feed(model, cache, ids, mask, (0, *range(300, 341)))
        total = cache.stats().as_dict()
        ratios.append(total["cpu_ratio"])
        assert (total["recalls"] > 0) == (total["recall_bytes"] > 0) == (recall > 0)
    assert ratios[1] < 0.8 * ratios[0]


def test_the_correction_brings_attending_ahead_nearer_to_the_truth(model: PreTrainedModel) -> None:
    """Teacher-forced logits: with the correction the distance to the real query's is smaller."""
    found = []
    for knobs in ({"lookahead": "off"}, *({"lookahead": "attend", "correction": each} for each in (False, True))):
        cache = HybridCache(model, "scout", **SMALL, **CACHE, tier="split", recall=0, synchronous_layers=(0,), **knobs)
        found.append(torch.cat(feed(model, cache, *prompt(1, 320), (0, *range(300, 321)))[1:], 1).log_softmax(-1))
    plain, corrected = (float((found[0].exp() * (found[0] - other)).sum(-1).mean()) for other in found[1:])
    assert 0 < corrected < plain


def test_a_change_of_the_rows_keeps_the_clock(model: PreTrainedModel) -> None:
    cache = HybridCache(model, "scout", tier="split", recall=5, **(SMALL | CACHE))
    feed(model, cache, *prompt(2, 303), (0, *range(300, 304)))
    cache.reorder_cache(torch.tensor([1, 0]))
    assert [float(layer.state.clock.since) for layer in cache.layers] == [3.0] * 4


# --- recall ----------------------------------------------------------------------------------------------------------


def steps_of(clock: RecallClock, ratios: list[float]) -> list[int]:
    answers = [clock.due(torch.tensor(ratio)) for ratio in ratios]
    return [step for step, due in enumerate(answers) if due is not None and due.item()]


@pytest.mark.parametrize(
    ("recall", "ratios", "steps"),
    [
        (3, [0.0] * 9, [2, 5, 8]),
        (0, [1.0] * 9, []),
        # One odd step is forgiven after quiet ones, a rise is not, and a recall starts anew.
        ("adaptive", [0.05, 0.05, 0.15, 0.05, 0.12, 0.16, 0.16, 0.02, 0.05], [5, 6]),
        ("adaptive", [0.5, 0.1, 0.13], [0]),  # with the first ratio the average would be .3 and .2
    ],
)
def test_steps_of_a_recall(recall: int | str, ratios: list[float], steps: list[int]) -> None:
    assert steps_of(RecallClock.of(recall, 0.12, 0, CPU), ratios) == steps


def test_a_profile_gives_each_layer_its_interval(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({"intervals": [1, 4]}))
    assert Scout(recall=str(file)).recall == str(file)
    assert steps_of(RecallClock.of(file, 0.12, 1, CPU), [0.0] * 8) == [3, 7]
    with pytest.raises(ValueError, match="has 2 layers"):
        RecallClock.of(file, 0.12, 2, CPU)


def test_wrong_values_and_files_that_are_no_profile_are_named(tmp_path: Path) -> None:
    for recall in (-1, True, 1.5, None):
        with pytest.raises(ValueError, match=f"recall={recall!r}"):
            Scout(recall=recall)  # type: ignore[arg-type]
    file = tmp_path / "wrong.json"
    for text in ("", "[]", '{"intervals": [0]}', '{"intervals": 3}', '{"steps": [1]}'):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"wrong\.json.*not a profile"):
            Scout(recall=file)
