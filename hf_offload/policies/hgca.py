"""HGCA (Deng et al. 2025): dense attention over a window on the device, per-head sparse attention on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_offload.knobs import check_choice, check_flag, check_number, check_tokens
from hf_offload.policies.base import Plan, Policy, Selection
from hf_offload.policies.salience import Rule, SalienceRule

if TYPE_CHECKING:
    from hf_offload.attention.step import Step


@dataclass(frozen=True)
class HGCA(Policy):
    """Attend the newest tokens densely and, of the older ones, those that were attended much, for each KV head.

    The window lies on the device (with one memory it is a part of the pool). Each of its tokens has an average A of
    attention weights for each query head; the weights of a step sum to one over the window.
    When a block leaves the window the CPU keeps those of its tokens for which A > beta / (tokens in the window); the
    others stay in host memory. What is kept stays so until the next append. An append attends everything, and the
    weights that its queries give to the host's tokens, A_cpu, decide anew: kept is what exceeds beta / (tokens on the
    host). What a prompt leaves on the host is decided by the prompt's own attention, with weights that sum to one over
    all of it. Source: HGCA, section 3.2, algorithms 1 and 2.

    Args:
        window: tokens of the window, a row; rounded up to blocks. With neither `window` nor `gpu_ratio` it is what
            `resident` or `device_budget` of the cache say.
        gpu_ratio: in place of `window`: share of the cached tokens, 0 … 1; reckoned when decoding starts after a prompt
            or append, and constant until the next one.
        beta: how strict the selection is; 0 keeps every token.
        alpha: how fast A forgets, in (0, 1]; None: one over the tokens of the window.
        steps: `"max"`: A ← max((1 − alpha)·A, weight/3), where weights of a token's first 64 steps (a quarter of the
            window, if that is less) do not count, in prompts and appends either: it is attended then for being near.
            What a token is wanted for later shows in single queries, which a mean over the window loses. `"mean"`, the
            paper's form: A ← (1 − alpha)·A + alpha·weight, the mean as long as a token has met less than 1/alpha
            queries.
        group: how the query heads of a KV head decide: `"any"`: one is enough; `"mean"`: by the mean of their averages.
        append: `"max"`: A_cpu is the largest weight that any of an append's queries gives, so that a short question in
            a long turn is not diluted; `"mean"`: their mean.
        append_queries: so many of an append's last queries are weighed for A_cpu; None: all of them. In chunks that are
            shorter what earlier ones said fades.
        append_run: a question points at where an answer begins, and not at what follows: A_cpu of a token is at least a
            64th of that of each of the `append_run` tokens before it. 0: the paper's form.
        prompt_queries: A of a prompt's tokens is the mean over so many of its last queries that are no padding; None:
            1/alpha of them. In chunks that are shorter it is a moving mean.
        reevaluate: False: an append changes nothing about the tokens that are on the host.
        sinks: so many first tokens are kept whatever their weights; 0: they are tokens like others.

    Raises:
        ValueError: a knob is none of what it may be, or both `window` and `gpu_ratio` are given.
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
        return Plan(device=device, host=None if step.layer.has_slots else host, kept=step.kept())

    def place(self, step: Step, slots: int) -> Selection:
        return step.window()
