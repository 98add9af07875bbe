"""What a replayed step costs the host: the parts of its way to the launch, and the launch by nodes and forks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from common import percentiles
from gpu import models
from gpu.options import Options
from gpu.supervise import NotApplicable
from hf_offload import HybridCache, Scout
from hf_offload.gpu.streams import CAPTURE_SIDE, stream_for
from hf_offload.graph import cuda_graph
from hf_offload.graph.cuda_graph import StepGraph
from hf_offload.graph.graph_capture import Recorder, undisturbed

MARKS = ("mask", "prepare", "copies", "launch", "returned", "done")
"""Ends of: reading the arguments, the mask among them; preparing the step; copying its inputs; `replay()`; the model's
forward; the step on the device."""
POLICIES: dict[str, Any] = {"full": "full", "scout": Scout(budget=256, recall=1)}
LAYERS, PROMPT, BLOCK = 36, 1024, 32
WARM_UP, STEPS = 4, 24  # within a block
NODES, FORKS = (1000, 3000, 5000), (0, 36)
ROUNDS = 30


class Marks:
    """Times on the host's clock at which parts of a replayed step end.

    Args:
        graph: the step's graph.
    """

    def __init__(self, graph: StepGraph) -> None:
        self._graph, self.at = graph, dict[str, float]()

    def note(self, name: str) -> None:
        """A part has ended now."""
        self.at[name] = time.perf_counter()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Steps of the inside are marked."""
        recorded = type(self._graph._recorded)
        with ExitStack() as stack:
            for owner, function, before, behind in (
                (cuda_graph, "_split_arguments", None, "mask"),
                (StepGraph, "prepare", None, "prepare"),
                (recorded, "replay", "copies", "launch"),
            ):
                marked = self._around(getattr(owner, function), before, behind)
                stack.enter_context(mock.patch.object(owner, function, marked))
            yield

    def _around(self, function: Callable[..., Any], before: str | None, behind: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                self.note(before)
            result = function(*args, **kwargs)
            self.note(behind)
            return result

        return call


def replay(options: Options, policy: str) -> Iterator[dict[str, Any]]:
    """Microseconds from a step's start to each of `MARKS`, medians; a small model with as many layers as a large one.

    What the host does depends on the layers, not on their width.
    """
    if not options.on_gpu:
        raise NotApplicable("a CUDA graph needs a GPU")
    model = small_model(options)
    resident = 2 * PROMPT if policy == "full" else 256
    cache = HybridCache(model, POLICIES[policy], block_size=BLOCK, resident=resident, cuda_graph=True)
    yield {"variant": policy, "layers": LAYERS, **marks_of(options, model, cache)}
    cache.drain()


def small_model(options: Options) -> PreTrainedModel:
    """A narrow model with random weights and the layers of a large one."""
    torch.manual_seed(0)
    with torch.device(options.device):
        config = models.narrow_config(LAYERS)
        model = AutoModelForCausalLM.from_config(config, dtype=options.dtype, attn_implementation="hybrid_sparse")
    return model.eval()


def marks_of(options: Options, model: PreTrainedModel, cache: HybridCache, steps: int = STEPS) -> dict[str, float]:
    """Medians of the marks of replayed steps behind a prompt, microseconds; steps are called as `generate()` does."""
    vocabulary = model.config.vocab_size
    length = PROMPT + 1  # the steps end within a block
    ids = torch.randint(vocabulary, (1, length + WARM_UP + steps), device=options.device)
    mask = torch.ones_like(ids)
    model(input_ids=ids[:, :length], attention_mask=mask[:, :length], past_key_values=cache)
    found: dict[str, list[float]] = {name: [] for name in MARKS}
    for place in range(length, ids.shape[1]):
        step = {"input_ids": ids[:, place : place + 1], "attention_mask": mask[:, : place + 1]}
        if place < length + WARM_UP:
            model(**step, past_key_values=cache)
            continue
        options.synchronize()
        assert cache.graph is not None
        marks = Marks(cache.graph)
        with marks.taken():
            start = time.perf_counter()
            model(**step, past_key_values=cache)
            marks.note("returned")
            options.synchronize()
            marks.note("done")
        for name, times in found.items():
            times.append(1e6 * (marks.at[name] - start))
    return {name: median(times) for name, times in found.items()}


def launch(options: Options, forks: int) -> Iterator[dict[str, Any]]:
    """Microseconds until the launch of a graph of small kernels returns, and until the device is through with them.

    Each fork runs one more kernel on a second stream, which joins at the end.
    """
    for nodes in (100,) if options.quick else NODES:
        replay = add_ones(options, nodes, forks)
        for _ in range(3):
            replay()
        returned, done = [], []
        for _ in range(3 if options.quick else ROUNDS):
            options.synchronize()
            start = time.perf_counter()
            replay()
            returned.append(1e6 * (time.perf_counter() - start))
            options.synchronize()
            done.append(1e6 * (time.perf_counter() - start))
        yield {"nodes": nodes, "forks": forks, **percentiles(returned), "done": median(done)}


def add_ones(options: Options, nodes: int, forks: int) -> Callable[[], Any]:
    """A replay of so many kernels that add one to a number; without a GPU the same as calls."""
    number, other = (torch.zeros(1, device=options.device) for _ in range(2))
    side = stream_for(CAPTURE_SIDE, torch.device("cuda", torch.cuda.current_device())) if options.on_gpu else None

    def step() -> None:
        for count in range(1, nodes + 1):
            number.add_(1)
            if side is not None and count * forks // nodes > (count - 1) * forks // nodes:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    other.add_(1)
        if side is not None and forks:
            torch.cuda.current_stream().wait_stream(side)

    if not options.on_gpu:
        return step
    step()
    recorder = Recorder()
    with undisturbed():
        recorder.record(step)
    return recorder.replay
