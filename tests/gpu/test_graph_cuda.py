"""Decode steps as CUDA graphs on a GPU: late CPU work, default placement, threads. (All policies: `tests/graph`.)"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from graph._graphs import AHEAD, SCOUT, model_of, run

from hf_offload import HybridCache
from hf_offload.gpu.handover import wait_for_flag
from hf_offload.gpu.merge import HostResult, merge
from hf_offload.gpu.streams import CAPTURE, CAPTURE_SIDE, RECALLS, TASKS, TILES, stream_for

pytestmark = pytest.mark.gpu
MEMORY: dict[str, Any] = {"block_size": 16, "resident": 96}


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(
    ("policy", "knobs"),
    [("full", {}), ("scout", {**SCOUT, "lookahead": "off"}), ("scout", AHEAD), ("scout", {**AHEAD, "digest": "quest"})],
    ids=str,
)
def test_hand_overs_that_are_late_change_nothing(policy: str, knobs: dict[str, Any], graph: bool) -> None:
    model, rows = model_of("llama").cuda(), []
    for delay in (0.0, 0.002):
        cache = HybridCache(model, policy, cuda_graph=graph, **MEMORY, **knobs)
        cache.settings.worker.delay = delay
        rows.append(run(model, cache, (150, 70), rows=2))
    assert torch.equal(*rows)


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


@pytest.mark.parametrize(("policy", "rows"), [("scout", 1), ("quest", 3), ("full", 1), ("scout", 3)])
def test_by_default_all_is_resident_and_captured(policy: str, rows: int) -> None:
    """And attended, beyond the budget and the first slots."""
    model = model_of("llama").cuda()
    knobs = {"scout": SCOUT, "quest": {"budget": 96}, "full": {}}[policy]
    want = run(model, HybridCache(model, "full", cuda_graph=False, block_size=16, resident=512), (150, 70), rows=rows)
    cache = HybridCache(model, policy, block_size=16, **knobs)
    torch.testing.assert_close(run(model, cache, (150, 70), rows=rows), want, rtol=1e-5, atol=1e-5)
    told = cache.stats().as_dict()
    assert told["dense_share"] == 1.0
    assert told["placements"] == (4 if policy == "full" else 8)  # 13 slots, then 18
    assert cache.graph is not None
    assert cache.graph._capture is not None


def test_no_other_stream_is_one_of_captures() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    mine = {stream_for(purpose, device).cuda_stream for purpose in (CAPTURE, CAPTURE_SIDE)}
    assert len(mine) == 2
    others = {torch.cuda.Stream().cuda_stream for _ in range(64)}
    assert not mine & (others | {stream_for(purpose, device).cuda_stream for purpose in (RECALLS, TILES, TASKS)})
