"""Decode steps as CUDA graphs on a GPU: tokens and logits of eager steps."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from test_exactness import assert_equal
from tiny import SIZES, prompt, spread_weights, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import hf_offload
from hf_offload import HybridCache, WorkerError
from hf_offload.cpu import serving
from hf_offload.gpu.handover import wait_for_flag
from hf_offload.gpu.merge import HostResult, merge
from hf_offload.gpu.streams import CAPTURE, CAPTURE_SIDE, RECALLS, TASKS, TILES, stream_for
from hf_offload.graph.cuda_graph import StepGraph

pytestmark = pytest.mark.gpu

STEPS = 70
MEMORY: dict[str, Any] = {"block_size": 16, "resident": 96}
SCOUT: dict[str, Any] = {"budget": 96, "sinks": 16, "recent": 16}
AHEAD: dict[str, Any] = {**SCOUT, "lookahead": "attend", "synchronous_layers": (0,)}
POLICIES = {
    "full": ("full", {}),
    "window": ("window", {"budget": 96, "sinks": 16}),
    "scout": ("scout", {**SCOUT, "lookahead": "attend"}),
    "scout-off": ("scout", {**SCOUT, "lookahead": "off"}),
    "scout-select": ("scout", {**SCOUT, "lookahead": "select", "synchronous_layers": (0,)}),
    "scout-attend": ("scout", AHEAD),
    "scout-quest": ("scout", {**AHEAD, "digest": "quest", "join": "raw", "recall": 3}),
    "scout-drawn": ("scout", {"samples": 60, "sinks": 16, "recent": 16, "lookahead": "off"}),
    "scout-drawn-select": (
        "scout",
        {"samples": 60, "sinks": 16, "recent": 16, "lookahead": "select", "synchronous_layers": (0,)},
    ),
    "scout-drawn-attend": (
        "scout",
        {"samples": 60, "sinks": 16, "recent": 16, "lookahead": "attend", "synchronous_layers": (0,)},
    ),
    "scout-all-int8": ("scout", {**AHEAD, "attend_resident": "all", "host_dtype": "int8"}),
}


def decode(
    model: PreTrainedModel, cache: HybridCache, batch: int, delay: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens `[B, STEPS]` and their logits behind a prompt of 150 tokens, called as `generate` does."""
    ids, mask = (part.cuda() for part in prompt(batch, 150))
    cache.settings.worker.delay = delay
    tokens, logits = [], []
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        out = model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        for _ in range(STEPS):
            logits.append(out.logits[:, -1])
            tokens.append(logits[-1].argmax(-1, keepdim=True))
            mask = torch.cat([mask, torch.ones_like(tokens[-1])], 1)
            positions = mask.sum(-1, keepdim=True) - 1
            step = {"input_ids": tokens[-1], "attention_mask": mask, "position_ids": positions}
            out = model(**step, past_key_values=cache)
    return torch.cat(tokens, 1), torch.stack(logits, 1)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
@pytest.mark.parametrize("policy", POLICIES)
def test_graphs_give_the_logits_of_eager_steps(policy: str, family: str, batch: int) -> None:
    model = tiny_model(family).cuda()
    name, knobs = POLICIES[policy]
    eager, captured = (HybridCache(model, name, cuda_graph=graph, **MEMORY, **knobs) for graph in (False, True))
    want = decode(model, eager, batch)
    assert_equal(decode(model, captured, batch), want)
    mine, other = captured.stats().as_dict(), eager.stats().as_dict()
    for key in ("steps", "recalls", "recall_blocks"):
        assert mine[key] == other[key]
    assert mine["cpu_ratio"] == pytest.approx(other["cpu_ratio"])


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("policy", ["full", "scout-off", "scout-attend", "scout-quest"])
def test_hand_overs_that_are_late_change_nothing(policy: str, graph: bool) -> None:
    model = tiny_model("llama").cuda()
    name, knobs = POLICIES[policy]
    runs = [
        decode(model, HybridCache(model, name, cuda_graph=graph, **MEMORY, **knobs), 2, delay) for delay in (0.0, 0.002)
    ]
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])


def test_a_replayed_merge_sees_what_the_cpu_wrote_last() -> None:
    """The CPU writes another partial for each replay, for each third one while the replay waits for it."""
    batch, heads, dim, far = 2, 8, 128, 64
    out, lse = torch.zeros(batch, heads, 1, dim, device="cuda"), torch.zeros(batch, heads, 1, device="cuda")
    query = torch.zeros(batch, heads, dim, device="cuda")
    host = HostResult(torch.zeros(batch, heads, dim).pin_memory(), torch.zeros(batch, heads).pin_memory())
    flag, late = (torch.zeros(1, 16, dtype=torch.int32).pin_memory()[:, 0] for _ in range(2))
    epoch = torch.zeros(1, dtype=torch.int32, device="cuda")

    def step() -> torch.Tensor:
        epoch.add_(1)
        wait_for_flag(flag, epoch, late, spins=10_000_000)
        return merge(out, lse, host, query, None, scale=1.0, dtype=torch.float32)[0]

    flag.fill_(1)
    step()  # compiles
    torch.cuda.synchronize()
    epoch.zero_()
    flag.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        merged = step()
    for number in range(1, 201):
        if number % 3 == 0:
            graph.replay()
            time.sleep(0.001)
        host.out.fill_(float(number))
        host.lse.fill_(float(far))  # all of the weight
        flag.fill_(number)
        if number % 3:
            graph.replay()
        torch.cuda.synchronize()
        assert not late.item()
        assert (merged == number).all(), number


@pytest.mark.parametrize("family", ["qwen2", "mistral", "phi3"])
def test_other_families_are_captured(family: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, num_key_value_heads=2, sliding_window=None)
    made = AutoModelForCausalLM.from_config(config, attn_implementation="hybrid_sparse")
    model, (name, knobs) = spread_weights(made).cuda(), POLICIES["scout-attend"]
    eager, captured = (HybridCache(model, name, cuda_graph=graph, **MEMORY, **knobs) for graph in (False, "auto"))
    assert_equal(decode(model, captured, 2), decode(model, eager, 2))
    assert captured.graph is not None
    assert captured.graph._capture is not None


@pytest.mark.parametrize("batch", [1, 3])
def test_layers_with_windows_are_captured(batch: int) -> None:
    model, (name, knobs) = tiny_model("gemma3").cuda(), POLICIES["scout-attend"]
    eager, captured = (HybridCache(model, name, cuda_graph=graph, **MEMORY, **knobs) for graph in (False, True))
    assert_equal(decode(model, captured, batch), decode(model, eager, batch))
    assert captured.graph is not None
    assert captured.graph._capture is not None


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("policy", ["scout", "quest", "full"])
def test_by_default_all_is_resident(policy: str, batch: int) -> None:
    """And attended, beyond the budget and the first slots."""
    model = tiny_model("llama").cuda()
    knobs = {"scout": SCOUT, "quest": {"budget": 96}, "full": {}}[policy]
    want = decode(model, HybridCache(model, "full", cuda_graph=False, block_size=16, resident=512), batch)
    cache = HybridCache(model, policy, block_size=16, **knobs)
    assert_equal(decode(model, cache, batch), want)
    told = cache.stats().as_dict()
    assert told["dense_share"] == 1.0
    assert told["placements"] == (4 if policy == "full" else 8)  # 13 slots, then 18
    assert cache.graph is not None
    assert cache.graph._capture is not None


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_steps_are_captured_by_default(family: str) -> None:
    model, (name, knobs) = tiny_model(family).cuda(), POLICIES["scout-attend"]
    eager, captured = (
        HybridCache(model, name, cuda_graph=False, **MEMORY, **knobs),
        HybridCache(model, name, **MEMORY, **knobs),
    )
    assert_equal(decode(model, captured, 2), decode(model, eager, 2))
    assert captured.graph is not None
    assert captured.graph._capture is not None


def test_generate_replays_turn_after_turn() -> None:
    model = tiny_model("llama").cuda()
    ids = prompt(1, 200)[0].cuda()

    def turns(graph: bool) -> torch.Tensor:
        cache = HybridCache(model, "scout", cuda_graph=graph, **MEMORY, **AHEAD)
        first = model.generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=False)
        more = torch.cat([first, ids[:, :30]], 1)
        return model.generate(more, past_key_values=cache, max_new_tokens=40, do_sample=False)

    assert torch.equal(turns(True), turns(False))


def test_threads_may_capture_at_once() -> None:
    model = tiny_model("llama").cuda()
    name, knobs = POLICIES["scout-attend"]

    def make() -> HybridCache:
        return HybridCache(model, name, cuda_graph=True, threads=2, **MEMORY, **knobs)

    first = make()
    want = decode(model, first, 1)[0]
    with ThreadPoolExecutor(3) as threads:
        for got in threads.map(lambda _: decode(model, make(), 1)[0], range(6)):
            assert torch.equal(got, want)


@pytest.mark.parametrize("enabled", [False, True])
def test_a_part_that_fails_in_the_last_step_is_told_by_generate(monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    """Also where `generate()` makes the cache itself, which is gone at its end."""
    model, ids = tiny_model("llama").cuda(), prompt(1, 150)[0].cuda()
    knobs: dict[str, Any] = {**MEMORY, **AHEAD, "recall": 0, "cuda_graph": True}
    given: dict[str, Any] = {} if enabled else {"past_key_values": HybridCache(model, "scout", **knobs)}
    replay, count = StepGraph._replay, [0]

    def broken(graph: StepGraph) -> None:
        count[0] += 1
        replay(graph)
        if count[0] == 9:
            assert graph._doorbell is not None
            crew: Any = graph._doorbell._crew
            crew._rows[0, [serving.FAILED, serving.FAILED_IN, serving.UNDONE]] = 1, graph._epoch, 1

    monkeypatch.setattr(StepGraph, "_replay", broken)
    with hf_offload.enabled(model, "scout", **knobs) if enabled else nullcontext():
        with pytest.raises(WorkerError, match=r"1 of \d+ tasks were not done.*crop\(-1\)"):
            model.generate(ids, max_new_tokens=12, do_sample=False, **given)
        assert count[0] == 9
    if enabled:
        assert not {"forward", "generate"} & set(model.__dict__)


def test_no_other_stream_is_one_of_captures() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    mine = {stream_for(purpose, device).cuda_stream for purpose in (CAPTURE, CAPTURE_SIDE)}
    assert len(mine) == 2
    others = {torch.cuda.Stream().cuda_stream for _ in range(64)}
    assert not mine & (others | {stream_for(purpose, device).cuda_stream for purpose in (RECALLS, TILES, TASKS)})
