"""HGCA (Deng et al. 2025): dense attention over a window on the device, per-head sparse attention on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_offload.knobs import check_choice, check_flag, check_number, check_tokens
from hf_offload.policies.base import EVER, Plan, Policy, Selection
from hf_offload.policies.salience import Rule, SalienceRule

if TYPE_CHECKING:
    from hf_offload.attention.step import Step


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
        prompt_queries: A of a prompt's tokens is the mean over so many of its last queries; None: 1/alpha.
        reevaluate: False: an append changes nothing about the host's tokens (a control).
        sinks: first tokens of a row that are always kept.

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

    def __post_init__(self) -> None:
        if self.window is not None:
            check_tokens("window", self.window)
        if self.window is not None and self.gpu_ratio is not None:
            raise ValueError(f"window={self.window} and gpu_ratio={self.gpu_ratio} say the same; use one of them")
        if self.gpu_ratio is not None:
            check_number("gpu_ratio", self.gpu_ratio, "a share of the tokens", above=0, most=1)
        check_number("beta", self.beta, "a threshold", least=0, most=1e9)
        if self.alpha is not None:
            check_number("alpha", self.alpha, "a share of a step", least=1e-9, most=1)
        for name, one in (("group", "any"), ("steps", "max"), ("append", "max")):
            check_choice(name, getattr(self, name), (one, "mean"))
        for name in ("append_queries", "prompt_queries"):
            if getattr(self, name) is not None:
                check_tokens(name, getattr(self, name))
        check_flag("reevaluate", self.reevaluate)
        check_tokens("append_run", self.append_run, least=0)
        check_tokens("sinks", self.sinks, least=0)

    @property
    def salience(self) -> SalienceRule:
        return SalienceRule(
            self.alpha, self.beta, self.group, self.steps, self.append, self.append_queries, self.append_run,
            self.prompt_queries, self.reevaluate, self.sinks,
        )  # fmt: skip

    @property
    def leaves_out(self) -> bool:
        return self.beta > 0

    def window_tokens(self, length: int) -> int | None:
        if self.gpu_ratio is not None:
            return max(int(self.gpu_ratio * length), 1)
        return self.window

    def plan(self, step: Step) -> Plan:
        """Algorithm 2: the window where it is, the kept tokens on the CPU."""
        device, host = step.split(step.window())
        return Plan(device=device, host=None if step.layer.has_slots else host, kept=step.kept(), until=EVER)

    def place(self, step: Step, slots: int) -> Selection:
        return step.window()
