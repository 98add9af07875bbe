"""HGCA (Deng et al. 2025): dense attention to a window on the device, per-head sparse attention on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, cast

import torch

from hf_offload.fields import Field, LayerSizes
from hf_offload.knobs import check_choice, check_flag, check_number, check_tokens
from hf_offload.policies.base import EVER, Plan, Policy, Requirements, Selection
from hf_offload.policies.hgca.append import RetentionRule, Rule, average_capacity
from hf_offload.policies.hgca.attend_tokens import attend_on_both_sides, queue_attention
from hf_offload.policies.hgca.token_mass import TokenMass, token_mass_fields

if TYPE_CHECKING:
    from hf_offload.attention.step import Step
    from hf_offload.attention.step_cpu import CpuStep
    from hf_offload.attention.step_split import SplitStep
    from hf_offload.cache.layer import HybridLayer


RESCUE = 128
"""`samples` of the draw with one memory, if `HGCA.rescue` says nothing."""


@dataclass(frozen=True)
class HGCA(Policy):
    """Attend a window of the newest tokens and, for each KV head, older tokens that received much attention.

    Source: HGCA, section 3.2, algorithms 1 and 2. The device attends the window. Each token in it has an average A of
    its attention weights, for each query head; the weights of a step sum to one over the window.

    When a block leaves the window, the CPU keeps those of its tokens with A > beta / (tokens in the window). Kept
    tokens are attended in every step until the next append. An append attends every token. The weights that its queries
    give to host tokens, A_cpu, then choose again: tokens with A_cpu > beta / (tokens on the host) are kept. After a
    prompt, the prompt's own queries choose.

    Args:
        window: tokens of the window, rounded up to blocks. None, and no `gpu_ratio`: the cache's `resident` or
            `device_budget`.
        gpu_ratio: in place of `window`: its share of the cached tokens, 0 to 1. It is computed when decoding starts
            after a prompt or append, and constant until the next one.
        beta: threshold of the selection, at least 0; 0 keeps every token.
        alpha: how fast A forgets, for each step, in (0, 1]; None: 1 / (tokens of the window).
        steps: how a decode step's weight enters A. `"max"`: A ← max((1 − alpha)·A, weight/3). A token's first 64
            queries (at most a quarter of the window) do not count, in prompts and appends neither: new tokens get much
            weight for being new.
            `"mean"` (the paper's): A ← (1 − alpha)·A + alpha·weight; a plain mean over the first 1/alpha queries.
        group: how the query heads of a KV head decide: `"any"`: one of them is enough; `"mean"`: their mean A.
        append: what A_cpu is: `"max"`: the largest weight that one of the append's queries gives; `"mean"`: their mean.
        append_queries: how many of an append's last queries count for A_cpu; None: all.
        append_run: how many tokens after a strongly attended one are kept with it: their A_cpu is at least 1/64 of its
            A_cpu. The reason: a question attends the place where its answer begins. 0 (the paper's): none.
        prompt_queries: A of a prompt's tokens is the mean over this number of its last queries; None: 1/alpha.
        reevaluate: False: an append changes nothing about the host's tokens (a control).
        sinks: first tokens of a row that are always kept.
        rescue: attend also pairs of keys drawn, as by `samples` of `Scout`, from the tokens that are neither in the
            window nor kept, so that a query finds what it asks for. 0 (the paper's): these tokens
            are not attended before the next append. None: 128 with one memory, 0 with two.

    Raises:
        ValueError: a knob has a value that is not allowed, or both `window` and `gpu_ratio` are given.
    """

    name = "hgca"
    window: int | None = None
    gpu_ratio: float | None = None
    beta: float = 1.0
    alpha: float | None = None
    group: Rule = "any"
    steps: str = "max"
    append: str = "max"
    append_queries: int | None = 512
    append_run: int = 16
    prompt_queries: int | None = 128
    reevaluate: bool = True
    sinks: int = 0
    rescue: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("append_queries", 1), ("prompt_queries", 1), ("rescue", 0)):
            if getattr(self, name) is not None:
                check_tokens(name, getattr(self, name), least=least)
        if self.window is not None and self.gpu_ratio is not None:
            raise ValueError(f"window={self.window} and gpu_ratio={self.gpu_ratio} say the same; use one of them")
        if self.gpu_ratio is not None:
            check_number("gpu_ratio", self.gpu_ratio, "a share of the tokens", above=0, most=1)
        check_number("beta", self.beta, "a threshold", least=0, most=1e9)
        if self.alpha is not None:
            check_number("alpha", self.alpha, "a share of a step", least=1e-9, most=1)
        for name, one in (("group", "any"), ("steps", "max"), ("append", "max")):
            check_choice(name, getattr(self, name), (one, "mean"))
        check_flag("reevaluate", self.reevaluate)
        check_tokens("append_run", self.append_run, least=0)
        check_tokens("sinks", self.sinks, least=0)

    def with_defaults(self, *, two_memories: bool) -> HGCA:
        return replace(self, rescue=0 if two_memories else RESCUE) if self.rescue is None else self

    @property
    def rule(self) -> RetentionRule:
        """The knobs by which tokens are retained."""
        return RetentionRule(**{knob.name: getattr(self, knob.name) for knob in fields(RetentionRule)})

    @property
    def requirements(self) -> Requirements:
        return Requirements(
            leaves_out=self.beta > 0,
            digest="submean" if self.rescue else None,
            digest_memory="host",
            chooses_resident=True,
            learns_from_prompts=True,
        )

    def window_tokens(self, length: int) -> int | None:
        if self.gpu_ratio is not None:
            return max(int(self.gpu_ratio * length), 1)
        return self.window

    def state_bytes(self, sizes: LayerSizes, slots: int) -> tuple[int, int]:
        """Averages of resident tokens on the device; on the host averages and marks of all tokens."""
        heads = max(sizes.query_heads)
        tokens = sizes.rows * average_capacity(sizes.tokens, 0, sizes.block_size)
        return 4 * sizes.rows * heads * slots * sizes.block_size, tokens * (4 * heads + sizes.kv_heads)

    def new_state(self, layer: HybridLayer) -> TokenMass:
        layer.settings.worker.ready()
        return TokenMass(layer, self.rule, self.window_tokens)

    def state_fields(self, sizes: LayerSizes) -> dict[str, Field]:
        windows = range(sizes.slots.start - 1, sizes.slots.stop - 1)
        tokens = self.window_tokens(sizes.width * sizes.block_size)
        if not sizes.placed and tokens is not None:
            windows = range(1, -(-tokens // sizes.block_size) + 1)
        return token_mass_fields(sizes, windows)

    def must_be_resident(self, layer: HybridLayer, blocks: int) -> torch.Tensor:
        mass = cast(TokenMass, layer.state)
        return (torch.arange(blocks, device="cpu") >= mass.now.evicted).repeat(layer.batch_size, 1)

    def plan_without_digests(self, step: Step) -> Plan:
        return self.plan(step)

    def plan(self, step: Step) -> Plan:
        """Algorithm 2: the window where it is, the retained tokens on the CPU."""
        mass: TokenMass = step.state
        window = step.blocks_from(mass.now.evicted)
        if step.layer.two_memories:
            return Plan(attend_on_both_sides(cast("SplitStep", step), step.split(window)[0], self.rescue or 0))
        return Plan(queue_attention(cast("CpuStep", step), window, self.rescue or 0), until=EVER)

    def place(self, step: Step, slots: int) -> Selection:
        return step.blocks_from(step.state.now.evicted)
