"""Fluxion (Yao et al. 2026): a network predicts budget and granularity of host tokens for each head and step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_offload.blocks.digests import DIGESTS
from hf_offload.fields import Field, LayerSizes
from hf_offload.knobs import check_choice, check_flag, check_number, shown
from hf_offload.policies.base import Plan, Policy, Requirements
from hf_offload.policies.fluxion.block_attention import BLOCK
from hf_offload.policies.fluxion.budgets import GRANULARITIES
from hf_offload.policies.fluxion.features import PROMPT_FEATURES, PromptStatistics, prompt_statistics
from hf_offload.policies.fluxion.predictor import (
    ConstantPredictor,
    HeadPredictor,
    LayerPredictor,
    Predictor,
    check_predictor,
)
from hf_offload.policies.fluxion.scheduler import SCHEDULES
from hf_offload.policies.fluxion.selector import SelectorState
from hf_offload.policies.fluxion.step import anchor_of, attend_local, has_host_tokens, join, segments_of, select

if TYPE_CHECKING:
    from hf_offload.attention.step import Step
    from hf_offload.cache.layer import HybridLayer
    from hf_offload.policies.fluxion.kernels.predictor import Network


class FluxionState(SelectorState):
    """State of a layer: the statistics of its prompt, with the predictor that uses them.

    Args:
        layer: the layer.
        network: the predictor's.
    """

    def __init__(self, layer: HybridLayer, network: Network) -> None:
        super().__init__(layer)
        self._network = network
        self.predictor: LayerPredictor | None = None
        """There once there are tokens on the host."""
        self.blocks = 0
        """`step.host_end` when the statistics were made."""

    def learn(self, statistics: PromptStatistics, blocks: int) -> None:
        """Predict by these statistics from here on."""
        self.predictor, self.blocks = LayerPredictor(self._network, statistics), blocks

    def unplaced(self, layer: HybridLayer) -> None:
        self.predictor, self.blocks = None, 0

    def tensors(self) -> dict[str, torch.Tensor]:
        if self.predictor is None:
            return {}
        blocks = torch.tensor(self.blocks, dtype=torch.int64, device="cpu")
        return {**self.predictor.statistics._asdict(), "blocks": blocks}

    def load(self, layer: HybridLayer, tensors: dict[str, torch.Tensor]) -> None:
        self.predictor, self.blocks = None, 0
        if tensors:
            own = {n: x.to(layer.device, copy=True) for n, x in tensors.items() if n != "blocks"}
            self.learn(PromptStatistics(**own), int(tensors["blocks"]))


def _constant(saved: Mapping[str, Any]) -> ConstantPredictor:
    """The constant predictor of a saved cache.

    Raises:
        ValueError: unknown names or bad values.
    """
    unknown = sorted(str(name) for name in saved.keys() - {part.name for part in dataclasses.fields(ConstantPredictor)})
    if unknown:
        raise ValueError(f"predictor={shown(saved)}: a ConstantPredictor has no {', '.join(unknown)}; leave it out")
    return ConstantPredictor(**saved)


@dataclass(frozen=True)
class Fluxion(Policy):
    """Attend sinks and newest tokens and, for each query head, as many host tokens as a small network predicts.

    Source: Fluxion, section 5 and appendix A. The device attends sinks and newest tokens. From that attention and from
    statistics of the prompt, a network predicts for each query head whether it streams (needs nothing else), and
    otherwise which share of the host's tokens it needs at each granularity. The CPU chooses runs of tokens by their
    digests, at the granularity for which it expects to read the fewest bytes. A KV head attends the union of what its
    query heads chose. The statistics are made when decoding starts, and again when the host's tokens have doubled.

    Args:
        predictor: a file written by `hf-offload train-fluxion`, or a predictor such as `ConstantPredictor`.
        tau: deviation of the output that the budgets allow (Eq. 2), 0 to 1; the file must be trained for it.
        granularities: tokens of a run; each KV head takes the cheapest of them.
        skip_streaming: True: heads that are predicted to stream attend no host token; False: they follow their budget.
        schedule: how CPU and device share the tasks of a step, one for each row and KV head. `"none"`: the CPU runs
            all. `"priority"`: by the speed of both, the largest first (section 6). `"uniform"`, `"length"`: fixed
            before the step, by the number of tasks or by the rows' lengths (section 8.3). None: `"priority"` on a
            GPU, otherwise `"none"`. All but `"none"` need two memories, and their rounding depends on timing.
        digest: the digest that the predictor must have; None: any.

    Raises:
        ValueError: no predictor, a damaged file, or one for another model, digest or deviation.
        FileNotFoundError: there is no such file.
    """

    name = "fluxion"
    block_size = BLOCK
    predictor: str | Path | Predictor | None = None
    tau: float = 0.1
    digest: str | None = None
    granularities: tuple[int, ...] = GRANULARITIES[1:]
    skip_streaming: bool = True
    schedule: str | None = None
    ready: Predictor | None = field(default=None, init=False, repr=False, compare=False)
    """The predictor, once its file was read for a model."""
    network: Network | None = field(default=None, init=False, repr=False, compare=False)
    """Its network for compiled code."""

    def __post_init__(self) -> None:
        if self.predictor is None:
            raise ValueError(
                "fluxion needs a predictor: predictor=PATH, a file that `hf-offload train-fluxion` wrote for this model"
            )
        chosen: Any = self.granularities
        if (
            not isinstance(chosen, tuple | list)
            or not chosen
            or not all(isinstance(run, int) and run in GRANULARITIES[1:] for run in chosen)
        ):
            raise ValueError(
                f"granularities={shown(chosen)} are not some of {GRANULARITIES[1:]}; use one or more of these"
            )
        object.__setattr__(self, "granularities", tuple(chosen))  # a saved cache has a list
        check_number("tau", self.tau, "a deviation", above=0, below=1)
        check_choice("digest", self.digest, (None, *DIGESTS))
        check_flag("skip_streaming", self.skip_streaming)
        check_choice("schedule", self.schedule, (*SCHEDULES, None))
        if isinstance(self.predictor, Mapping):  # as a saved cache has it
            object.__setattr__(self, "predictor", _constant(self.predictor))
        if not isinstance(self.predictor, str | Path):
            self._adopt(self.predictor)

    def _adopt(self, predictor: Predictor) -> None:
        check_predictor(predictor)
        if predictor.tau != self.tau:
            raise ValueError(f"tau={self.tau}: the predictor is for tau={predictor.tau}; use that")
        if self.digest not in (None, predictor.digest):
            raise ValueError(f"digest={self.digest!r}: the predictor's budgets are for {predictor.digest!r}; use that")
        object.__setattr__(self, "ready", predictor)
        network = predictor.network()
        if not self.skip_streaming:
            network.threshold.fill(np.inf)
        object.__setattr__(self, "network", network)

    def for_model(self, identity: Callable[[], dict[str, Any]]) -> Fluxion:
        if not isinstance(self.predictor, str | Path):
            return self
        loaded = dataclasses.replace(self)
        loaded._adopt(HeadPredictor.load(self.predictor, identity(), self.tau))
        return loaded

    @property
    def trained(self) -> Predictor:
        """The predictor.

        Raises:
            RuntimeError: its file is read only for a model.
        """
        if self.ready is None:
            raise RuntimeError("the predictor's file has not been read yet; HybridCache(model, ...) reads it")
        return self.ready

    @property
    def requirements(self) -> Requirements:
        trained = self.trained
        return Requirements(
            sinks=trained.sinks, recent=trained.local, digest=trained.digest, digest_memory="host", leaves_out=True,
            query_window=1, learns_from_prompts=True,
        )  # fmt: skip

    def check(self, *, block_size: int, two_memories: bool) -> None:
        """Raise ValueError unless blocks have 16 tokens, or if a schedule shares work that one memory does not have."""
        if block_size != BLOCK:
            raise ValueError(f"block_size={block_size}: fluxion chooses runs of blocks of {BLOCK} tokens; leave it out")
        if self.schedule not in (None, "none") and not two_memories:
            raise ValueError(
                f"schedule={self.schedule!r} shares work with a device, but one memory has none; leave it out "
                'or use "none" (or try two memories on the CPU with tier="split")'
            )

    def new_state(self, layer: HybridLayer) -> FluxionState:
        assert self.network is not None, "a predictor that is trained has a network"
        return FluxionState(layer, self.network)

    def state_fields(self, sizes: LayerSizes) -> dict[str, Field]:
        heads = (sizes.rows, sizes.query_heads)
        return {
            "fixed": Field(torch.float32, (*heads, len(PROMPT_FEATURES))),
            "directions": Field(torch.float32, (*heads, 2, sizes.head_dim)),
            "half_variance": Field(torch.float32, heads),
            "blocks": Field(torch.int64, (), 0, sizes.full_blocks),
        }

    def plan(self, step: Step) -> Plan:
        """The device attends local tokens; the CPU predicts the heads' properties and attends the host's (figure 6)."""
        local, state = attend_local(step), step.state
        if not has_host_tokens(step):
            return join(step, local, None)
        if state.predictor is None or step.host_end >= 2 * state.blocks:
            anchor = local.query if state.predictor is not None else anchor_of(step)
            statistics, _ = prompt_statistics(
                step.layer.index, anchor, *segments_of(step, anchor), taus=(self.tau,), digest=self.trained.digest,
                scale=step.scores.scale,
            )  # fmt: skip
            state.learn(statistics, step.host_end)
        predictor = state.predictor
        step.as_long_as(lambda: state.predictor is predictor)
        return join(step, local, select(step, predictor, self.granularities, local, self.schedule))
