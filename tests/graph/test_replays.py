"""Replayed steps are those in Python: of each policy and family, and whatever happens between them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tiny import prompt
from torch import nn

from hf_offload import HybridCache

from ._graphs import AHEAD, DRAWN, FAMILIES, SCOUT, counted, eager_cache, graph_cache, model_of, run, told_of
from .packages import adapted, fused, in_four_bits, of_package, packed

POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "scout-attend": ("scout", {**AHEAD, "synchronous_layers": (0,)}),
    "full": ("full", {}),
    "window": ("window", {"budget": 96, "sinks": 16}),
    "scout-off": ("scout", {**SCOUT, "lookahead": "off"}),
    "scout-select": ("scout", {**SCOUT, "lookahead": "select", "synchronous_layers": (0,)}),
    "scout-quest": ("scout", {**AHEAD, "digest": "quest", "join": "raw", "recall": 3}),
    "scout-int8": ("scout", {**AHEAD, "attend_resident": "all", "host_dtype": "int8"}),
    "quest": ("quest", {"budget": 96, "sinks": 16}),
    "drawn-off": ("scout", {**DRAWN, "lookahead": "off"}),
    "drawn-select": ("scout", {**DRAWN, "lookahead": "select"}),
    "drawn-attend": ("scout", {**DRAWN, "lookahead": "attend"}),
    "full-fetch": ("full", {"host": "fetch"}),
}
SLOW = {"window", "scout-off", "scout-attend", "drawn-off", "full-fetch", "quest"}


def matrix() -> Iterator[Any]:
    """Each policy with another family; on a GPU also with Llama. Rows alternate between one and three."""
    families = [family for family in FAMILIES if family != "opt"]
    on_gpu = families[:8]
    for i, policy in enumerate(POLICIES):
        slow = [pytest.mark.slow] if policy in SLOW else []
        yield pytest.param("cpu", policy, families[i % len(families)], 3 - 2 * (i % 2), marks=slow)
        for each in dict.fromkeys(("llama", on_gpu[i % 8])):
            yield pytest.param("cuda", policy, each, 1 + 2 * (i % 2), marks=pytest.mark.gpu)


@pytest.mark.parametrize(("device", "policy", "family", "rows"), list(matrix()))
def test_replays_give_the_logits_of_eager_steps(device: str, policy: str, family: str, rows: int) -> None:
    """Beyond a window's length, and through a second turn, which uses the same captured step."""
    model, (name, knobs) = model_of(family).to(device), POLICIES[policy]
    sizes = {"block_size": 16, "resident": 96}
    if device == "cuda":
        eager = HybridCache(model, name, cuda_graph=False, **sizes, **knobs)
        cache = HybridCache(model, name, cuda_graph="auto" if rows == 3 else True, **sizes, **knobs)
    else:
        eager, cache = eager_cache(model, name, **knobs), graph_cache(model, name, auto=True, **knobs)
    with told_of() as told, counted() as count:
        want, got = (run(model, each, (150, 12), (170, 8), rows=rows) for each in (eager, cache))
    assert not told
    assert torch.equal(got.argmax(-1), want.argmax(-1))
    assert (got - want).abs().max() <= (0 if device == "cpu" else 1e-5 * want.abs().max())
    assert cache.graph._capture is not None
    if device == "cpu":
        assert 1 <= count["record"] <= 2
        assert count["replay"] >= 15
    mine, other = cache.stats().as_dict(), eager.stats().as_dict()
    for key in ("steps", "recalls", "recall_blocks", "cpu_ratio"):
        assert mine[key] == pytest.approx(other[key])


# -- what happens between two replays ----------------------------------------------------------------------------------


def generate_behind_a_long_prompt(model: Any, cache: Any) -> torch.Tensor:
    """The prompt takes all blocks of the pool, which grows before steps are captured."""
    return model.generate(prompt(1, 602)[0], past_key_values=cache, max_new_tokens=20, do_sample=False)


def run_for(*turns: tuple[int, int], rows: int = 1) -> Callable[[Any, Any], torch.Tensor]:
    return lambda model, cache: run(model, cache, *turns, rows=rows)


def embed_every_fifth(model: Any, cache: Any) -> torch.Tensor:
    """Steps from embeddings are not replayed; what they recall is waited for all the same."""
    cache.settings.worker.delay = 0.005
    found, ids = [run(model, cache, (150, 1))], prompt(1, 180)[0]
    with torch.no_grad():
        for i in range(151, 180):
            token = ids[:, i : i + 1]
            given = {"inputs_embeds": model.model.embed_tokens(token)} if i % 5 == 0 else {"input_ids": token}
            found.append(model(**given, past_key_values=cache).logits)
    return torch.cat(found, 1)


def crop_fork_and_hide(model: Any, cache: Any) -> torch.Tensor:
    changed = prompt(2, 240)[1].clone()
    changed[0, 20:30] = 0
    found = [run(model, cache, (150, 6), rows=2)]
    cache.crop(-3)
    found.append(run(model, cache, (153, 5), rows=2))
    fork = cache.fork()
    found.append(run(model, cache, (158, 3), rows=2))
    found.append(run(model, fork, (166, 1), rows=2))
    found.append(run(model, cache, (161, 3), rows=2))
    return torch.cat([*found, run(model, cache, (164, 7), rows=2, mask=changed)], 1)


def then(change: Callable[[Any], None], *changes: Callable[[Any], None]) -> Callable[[Any, Any], torch.Tensor]:
    """A change of the model after every four steps."""

    def script(model: Any, cache: Any) -> torch.Tensor:
        found = [run(model, cache, (155, 4))]
        for number, each in enumerate((change, *changes)):
            each(model)
            found.append(run(model, cache, (159 + 4 * number, 4)))
        return torch.cat(found, 1)

    return script


def replace(model: Any) -> None:
    layer = model.model.layers[1].mlp
    layer.up_proj.weight = nn.Parameter(layer.up_proj.weight * 2)


def move(model: Any) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data * 2


def swap(model: Any) -> None:
    layer = model.model.layers[1].mlp
    fresh = nn.Linear(*reversed(layer.up_proj.weight.shape), bias=False)
    with torch.no_grad():
        fresh.weight.copy_(layer.up_proj.weight * 2)
    layer.up_proj = fresh


def with_modules(made: type[nn.Module], part: str = "up_proj", **state: Any) -> Callable[[], Any]:
    """A model with modules of a package in place of a layer's own."""

    def make() -> Any:
        model = model_of("llama")
        for layer in model.model.layers:
            owner = layer if part == "input_layernorm" else layer.mlp
            module = made(getattr(owner, part))
            vars(module).update(copy.deepcopy(state))
            setattr(owner, part, module)
        return model

    return make


def set_adapter(**state: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        vars(model.model.layers[2].mlp.up_proj).update(state)

    return change


def rescale(model: Any) -> None:
    model.model.layers[2].mlp.up_proj.scaling["b"] = 1.0


LORA = with_modules(
    of_package("peft.tuners.lora.layer", "Linear", adapted),
    _active_adapter=["a"], _disable_adapters=False, scaling={"a": 0.5, "b": 0.25},
)  # fmt: skip


def draft(model: Any, cache: Any) -> torch.Tensor:
    """Some drafts are right, two are not, in two rounds."""
    ids = prompt(1, 240)[0].clamp(min=3)
    found = [run(model, cache, (90, 6))]
    cache.activate_past_recording()
    found.append(run(model, cache, (96, 1)))
    with torch.no_grad():
        for first in (97, 104):
            found.append(model(ids[:, first : first + 4], past_key_values=cache, logits_to_keep=4).logits[:, :2])
            cache.crop(-2)
            found.append(run(model, cache, (first + 2, 5)))
    return torch.cat(found, 1)


def hide(*hidden: tuple[int, int], rows: int) -> Callable[[Any, Any], torch.Tensor]:
    """A token is hidden while it is in the windows, whose replayed steps have no mask."""

    def script(model: Any, cache: Any) -> torch.Tensor:
        mask = prompt(rows, 240)[1].clone()
        for row, token in hidden:
            mask[row, token] = 0
        return run(model, cache, (155, 45), rows=rows, mask=mask)

    return script


def mask_by_kind(model: Any, cache: Any) -> torch.Tensor:
    masks = {"full_attention": None, "sliding_attention": None}
    return torch.cat([run(model, cache, (40, 6)), run(model, cache, (46, 1), attention_mask=masks)], 1)


def hold_windows(model: Any, cache: Any) -> torch.Tensor:
    """What a cache gives of its windows is a copy; a fork has windows of its own."""
    found = [run(model, cache, (60, 6))]
    keys = next(iter(cache))[0]
    before, forked = keys.clone(), cache.fork()
    found.append(run(model, cache, (66, 4)))
    assert torch.equal(keys, before)
    again = run(model, forked, (66, 4))
    torch.testing.assert_close(again, found[-1], rtol=0, atol=1e-5)
    return torch.cat(found, 1)


def llama() -> Any:
    return model_of("llama")


def gemma3() -> Any:
    return model_of("gemma3")


@dataclass
class Row:
    """What is done with a model and a cache, and how often a step is captured meanwhile."""

    script: Callable[[Any, Any], torch.Tensor]
    captures: int | None = None
    model: Callable[[], Any] = llama
    policy: str = "scout"
    knobs: dict[str, Any] = field(default_factory=lambda: SCOUT)
    auto: bool = True
    slow: bool = False


OUT_OF_SLOTS = run_for((165, 30), rows=2)
WINDOWS: dict[str, Any] = {"model": gemma3, "policy": "full", "knobs": {}}
FOUR_BITS = of_package("bitsandbytes.nn.modules", "Linear4bit", in_four_bits)
GPTQ = of_package("gptqmodel.nn_modules.qlinear.marlin", "MarlinQuantLinear", packed)
AWQ = of_package("awq.modules.linear.gemm", "WQLinear_GEMM", packed)
LIGER = of_package("liger_kernel.transformers.rms_norm", "LigerRMSNorm", fused)
ROWS = {
    "blocks fill behind a long prompt": Row(
        generate_behind_a_long_prompt, 1, knobs={**SCOUT, "block_size": 8}, slow=True
    ),
    # While all blocks are resident nothing is handed over; behind token 176 the CPU has a part.
    "slots run out, full": Row(OUT_OF_SLOTS, 2, policy="full", knobs={"resident": 176}),
    "slots run out, chosen": Row(OUT_OF_SLOTS, 2, knobs={**DRAWN, "dense": False, "resident": 176}),
    # What is captured before any block has a digest must not serve the steps after.
    "a prompt of 15": Row(run_for((15, 60)), knobs={**SCOUT, "budget": 64, "recent": 0}),
    "embeddings": Row(embed_every_fifth, knobs={**AHEAD, "recall": 1}, slow=True),
    "crop, fork, another mask": Row(crop_fork_and_hide),
    "weights replaced": Row(then(replace), 2),
    "weights moved": Row(then(move), 2, auto=False),
    "a module swapped": Row(then(swap), 2),
    "adapters": Row(
        then(
            set_adapter(_active_adapter=["b"]),
            set_adapter(_disable_adapters=True),
            set_adapter(_disable_adapters=False),
            rescale,
        ),
        model=LORA,
    ),
    "four bits": Row(run_for((156, 6)), model=with_modules(FOUR_BITS)),
    "gptq": Row(run_for((156, 6)), model=with_modules(GPTQ)),
    "awq": Row(run_for((156, 6)), model=with_modules(AWQ)),
    "liger": Row(run_for((156, 6)), model=with_modules(LIGER, "input_layernorm")),
    "drafts": Row(draft, knobs={**AHEAD, "synchronous_layers": (0,)}),
    "drafts, windows": Row(draft, **WINDOWS),
    "a token hidden in a row": Row(hide((0, 170), rows=3), **WINDOWS),
    "tokens hidden": Row(hide((0, 165), (0, 195), rows=1), **WINDOWS),
    "tokens hidden in all rows": Row(hide((0, 160), (1, 160), (1, 171), (1, 172), rows=2), **WINDOWS),
    "masks by kind of layer": Row(mask_by_kind, **WINDOWS),
    "windows held": Row(hold_windows, **WINDOWS),
    "windows fill": Row(run_for((10, 20)), 1, **WINDOWS),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if ROWS[name].slow else ()) for name in ROWS]
)
def test_between_replays(name: str) -> None:
    row, found = ROWS[name], []
    for graph in (False, True):
        model = row.model()
        cache = (
            graph_cache(model, row.policy, auto=row.auto, **row.knobs)
            if graph
            else eager_cache(model, row.policy, **row.knobs)
        )
        with told_of() as told, counted() as count:
            found.append(row.script(model, cache))
        assert not told
    assert torch.equal(*found)
    assert count["replay"] > 2
    assert row.captures is None or count["record"] == row.captures


def test_steps_that_are_checked_run_eagerly_and_the_others_are_replayed() -> None:
    model = llama()
    want = run(model, eager_cache(model, "scout", **SCOUT), (150, 14), rows=1)
    cache = graph_cache(model, "scout", auto=True, check_every=4, **SCOUT)
    with told_of() as told, counted() as count:
        assert torch.equal(run(model, cache, (150, 14)), want)
    assert not told
    # Of 14 steps 4 are checked (0, 4, 8, 12) and the first plain one runs eagerly: nothing is captured twice.
    assert count == {"record": 1, "replay": 9}
    stats = cache.stats().as_dict()
    assert sum(len(layer["checked_errors"]) for layer in stats["layers"]) == 4 * 4
    assert 0 < stats["missed_mass"] < 1


def test_a_step_that_asks_for_hidden_states_keeps_them() -> None:
    model, ids, kept = llama(), prompt(1, 160)[0], []
    cache = graph_cache(model, "scout", **SCOUT)
    run(model, cache, (150, 0))
    with torch.no_grad():
        for i in range(150, 160):
            states = model(ids[:, i : i + 1], past_key_values=cache, output_hidden_states=True).hidden_states
            kept.append((states[-1], states[-1].clone()))
    assert all(torch.equal(now, before) for now, before in kept)


@pytest.mark.parametrize(
    ("name", "value", "dense"),
    [("blocks.digests.STATISTICS_TOKENS", 176, False), ("policies.base.DENSE_BYTES", 90_112, "auto")],
)
def test_steps_are_full_attention_until_a_length(
    name: str, value: int, dense: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until there are digests, or as long as that is quicker: here up to the 176th token, of two rows."""
    monkeypatch.setattr(f"hf_offload.{name}", value)
    model, knobs = llama(), {**SCOUT, "resident": 256, "dense": dense}
    caches = eager_cache(model, "scout", **knobs), graph_cache(model, "scout", **knobs), eager_cache(model, "full")
    want, found, full = (run(model, cache, (165, 20), rows=2) for cache in caches)
    assert torch.equal(found, want)
    apart = (found - full).abs().amax((0, 2))
    assert apart[:10].max() < 1e-4
    assert apart[12:].min() > 1e-2


def test_a_step_with_other_arguments_runs_eagerly_first() -> None:
    """A capture allows no compilation and no new buffers: each kind of step is rehearsed."""
    model, records = llama(), []
    cache = graph_cache(model, "scout", auto=True, **SCOUT)
    with counted() as count:
        run(model, cache, (150, 5))
        for i, keep in enumerate((1, 1, 2, 2)):
            run(model, cache, (155 + i, 1), logits_to_keep=keep)
            records.append(count["record"])
    assert records == [1, 2, 2, 3]
