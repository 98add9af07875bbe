"""InfiniGen (Lee et al. 2024): tokens chosen one layer ahead by partial keys and fetched to the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_offload.fields import Field, LayerSizes
from hf_offload.knobs import MOST, check_flag, check_number, check_tokens
from hf_offload.policies.base import LayerState, Partial, Plan, Policy, Requirements
from hf_offload.scores import attend_tokens

if TYPE_CHECKING:
    from hf_offload.attention.step import Step
    from hf_offload.cache.layer import HybridLayer

GROW = 256
"""Granularity of the partial keys' capacity, in tokens."""


class InfiniGenState(LayerState):
    """InfiniGen's state of one layer: directions and partial keys."""

    def __init__(self) -> None:
        self.basis: torch.Tensor | None = None
        """fp32 `[B, Hkv, D, r]`, the directions of speculation; None before the first decode step."""
        self.partial: torch.Tensor | None = None
        """fp32 `[B, Hkv, C, r]`, the components of all tokens' keys in these directions."""
        self.count = 0
        """Number of tokens in `partial`."""
        self.coming: Any = None
        """The length of the next step and the fetch of its tokens, chosen one layer ahead; or None."""

    @property
    def nbytes(self) -> int:
        return 0 if self.basis is None or self.partial is None else self.basis.nbytes + self.partial.nbytes

    def cancelled(self) -> None:
        """Drop the directions, too, since they may depend on the cancelled step's query."""
        self.coming, self.basis, self.partial, self.count = None, None, None, 0

    def unplaced(self, layer: HybridLayer) -> None:
        self.cancelled()

    def padding_changed(self, layer: HybridLayer, block: int) -> None:
        self.cancelled()

    def tensors(self) -> dict[str, torch.Tensor]:
        if self.basis is None or self.partial is None:
            return {}
        count = torch.tensor(self.count, dtype=torch.int64, device="cpu")
        return {"basis": self.basis, "partial": self.partial, "count": count}

    def load(self, layer: HybridLayer, tensors: dict[str, torch.Tensor]) -> None:
        self.cancelled()
        if tensors:
            with torch.inference_mode(False):
                self.basis, self.partial = (tensors[n].to(layer.device, copy=True) for n in ("basis", "partial"))
            self.count = int(tensors["count"])


@dataclass(frozen=True)
class InfiniGen(Policy):
    """Fetch, one layer ahead, the tokens that a predicted query scores high, and attend them on the device.

    Source: InfiniGen, sections 4.2 and 4.3. Keys and values lie on the host. The device keeps a part of each key: its
    coordinates in the directions in which queries are largest. The next layer's query is predicted from this layer's
    input. Tokens whose speculated score is within `alpha` of the best one are fetched. The real query attends them.

    Unlike in InfiniGen, the directions come from the prompt's own queries and keys, after rotary positions, where the
    paper skews the weights offline. Each KV head fetches as many tokens as it needs, where the paper takes the mean
    over a layer's heads; its query heads share them. The host's memory is not bounded.

    Args:
        alpha: a token is fetched if its score is above the best one minus `alpha` (the paper: 4 or 5); infinity: only
            `share` bounds their number.
        partial: share of the channels that scores are speculated with (the paper: 0.3).
        share: largest share of the tokens that is fetched (the paper: 0.2).
        lookahead: False: choose with the real query, in the layer itself.
        prompt_queries: how many of a prompt's last queries give the directions.

    Raises:
        ValueError: a knob has a value that is not allowed.
    """

    name = "infinigen"
    alpha: float = 4.0
    partial: float = 0.3
    share: float = 0.2
    lookahead: bool = True
    prompt_queries: int = 512

    def __post_init__(self) -> None:
        check_number("alpha", self.alpha, "a distance of scores", above=0, most=math.inf)
        for knob in ("partial", "share"):
            check_number(knob, getattr(self, knob), "a share", above=0, most=1)
        check_flag("lookahead", self.lookahead)
        check_tokens("prompt_queries", self.prompt_queries)

    @property
    def requirements(self) -> Requirements:
        return Requirements(
            leaves_out=True, attends_blocks=False, query_window=self.prompt_queries, learns_from_prompts=True
        )

    def looks_ahead(self, index: int, *, two_memories: bool, on_device: bool) -> bool:
        return self.lookahead and index > 0

    def state_bytes(self, sizes: LayerSizes, slots: int) -> tuple[int, int]:
        lines = sizes.rows * sizes.kv_heads
        return 4 * lines * self._channels(sizes.head_dim) * (_capacity(sizes.tokens + 1) + sizes.head_dim), 0

    def _channels(self, head_dim: int) -> int:
        return max(math.ceil(self.partial * head_dim), 1)

    def new_state(self, layer: HybridLayer) -> InfiniGenState:
        return InfiniGenState()

    def state_fields(self, sizes: LayerSizes) -> dict[str, Field]:
        count, channels = sizes.tokens, self._channels(sizes.head_dim)
        return {
            "basis": Field(torch.float32, (*sizes.lines, sizes.head_dim, channels)),
            "partial": Field(torch.float32, (*sizes.lines, range(count, MOST), channels)),
            "count": Field(torch.int64, (), count, count),
        }

    def before_layer(self, step: Step) -> None:
        """Choose the next layer's tokens by its predicted query and fetch them while this layer computes."""
        step.state.coming = (step.length, self._speculate(step))

    def plan(self, step: Step) -> Plan:
        """Attend the fetched tokens and this step's."""
        state: InfiniGenState = step.state
        coming, state.coming = state.coming, None
        fetch = coming[1] if coming is not None and coming[0] == step.length else self._speculate(step)
        new_key, new_value = step.newest()
        if state.count < step.length:  # of layers that share keys and values the first adds it
            self._add_partial_keys(state, new_key[:, :, None])
        key, value = fetch.arrive()
        own = step.store.padding.on(step.store.device, step.length)[:, -1, None, None].expand(*key.shape[:2], 1)
        query = torch.as_tensor(step.query, device=key.device)
        out, lse, _ = attend_tokens(
            query, torch.cat((key, new_key[:, :, None]), 2), torch.cat((value, new_value[:, :, None]), 2),
            torch.cat((fetch.valid, own), 2), step.scores,
        )  # fmt: skip
        return Plan((Partial(out, lse),))

    def _speculate(self, step: Step) -> Any:
        """Start to fetch the tokens to which the real or predicted query gives high scores by partial keys."""
        state: InfiniGenState = step.state
        count = step.length - 1
        if state.basis is None:
            self._skew(step, state)
        assert state.basis is not None
        assert state.partial is not None
        shape = (*state.basis.shape[:2], -1, state.basis.shape[2])
        query = torch.as_tensor(step.query, device=state.basis.device).view(shape) @ state.basis
        score = step.scores.of(query @ state.partial[:, :, :count].transpose(2, 3))
        score = score.masked_fill(~step.store.padding.on(step.store.device, count)[:, None, None], -math.inf)
        best = score.amax(-1, keepdim=True)
        distance = (score - best.masked_fill(best == -math.inf, 0.0)).amax(2)  # the group's highest score decides
        chosen = distance.topk(max(math.ceil(self.share * count), 1), -1)
        return step.bring_tokens(
            chosen.indices, ((chosen.values > -float(self.alpha)) & chosen.values.isfinite()).sum(-1)
        )

    def _add_partial_keys(self, state: InfiniGenState, key: torch.Tensor) -> None:
        """Add the partial keys of new tokens, from keys `[B, Hkv, n, D]`."""
        assert state.basis is not None
        assert state.partial is not None
        stop = state.count + key.shape[2]
        if stop > state.partial.shape[2]:
            with torch.inference_mode(False):
                grown = state.partial.new_zeros(*state.partial.shape[:2], _capacity(stop), state.partial.shape[3])
            grown[:, :, : state.count] = state.partial[:, :, : state.count]
            state.partial = grown
        state.partial[:, :, state.count : stop] = key.float() @ state.basis
        state.count = stop

    def _skew(self, step: Step, state: InfiniGenState) -> None:
        """Compute the directions in which a row's queries and keys are largest (section 4.3), and the partial keys."""
        last_queries, store, count = step.layer.last_queries, step.store, step.length - 1
        query = step.query[:, :, None] if last_queries is None else last_queries.values
        seen = (
            step.store.padding.on(step.store.device, count)[:, last_queries.start : last_queries.end]
            if last_queries is not None
            else None
        )
        query = torch.as_tensor(query, dtype=torch.float32, device=store.device)
        if not query.isfinite().all():
            raise ValueError(
                f"the queries of layer {step.layer.index} are not finite (NaN or infinity), so infinigen finds no "
                "directions in them; check the model's input (inputs_embeds) and weights, or load the model in "
                "bfloat16 or float32 where float16 overflows"
            )
        if seen is not None:
            query = query.masked_fill(~seen[:, None, :, None], 0.0)
        query = query.reshape(store.batch, store.num_kv_heads, -1, store.head_dim)
        directions = torch.linalg.eigh(query.transpose(2, 3) @ query).eigenvectors  # the right singular vectors
        weight = (query @ directions).abs().sum(2)
        valid = step.store.padding.on(step.store.device, count)
        for first, key, _ in step.earlier():
            valid_keys = valid[:, None, first : first + key.shape[2], None]
            weight += (key.float().masked_fill(~valid_keys, 0.0) @ directions).abs().sum(2)
        best = weight.topk(self._channels(store.head_dim), -1).indices
        with torch.inference_mode(False):
            basis, partial = (
                torch.zeros(*weight.shape[:2], length, best.shape[-1], dtype=torch.float32, device=store.device)
                for length in (weight.shape[2], _capacity(step.length))
            )
        basis.copy_(directions.gather(3, best[:, :, None].expand(-1, -1, store.head_dim, -1)))
        state.basis, state.partial, state.count = basis, partial, 0
        for first, key, _ in step.earlier():
            valid_keys = valid[:, None, first : first + key.shape[2], None]
            self._add_partial_keys(state, key.masked_fill(~valid_keys, 0.0))


def _capacity(tokens: int) -> int:
    """Return the capacity of partial keys for a number of tokens."""
    return -(-tokens // GROW) * GROW
