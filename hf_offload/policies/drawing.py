"""Drawn keys (`samples`) as a choice of policies that otherwise attend the best blocks: the knob and the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_offload.knobs import check_tokens, shown
from hf_offload.policies.base import EVER, Plan

if TYPE_CHECKING:
    from hf_offload.attention.step import Step

BUDGET, SAMPLES = 2048, 512
"""Of policies for which neither `budget` nor `samples` is given: tokens, and `samples`."""
SINKS = 4
"""First tokens that are always attended: a digest says little of keys that attract every query."""


def check_samples(budget: int | None, samples: int | None, digest: str, join: str) -> None:
    """Check the knobs of these names.

    Raises:
        ValueError: a wrong value, both of the first two, or another knob that does not go with samples.
    """
    if samples is None:
        if budget is not None:
            check_tokens("budget", budget)
        return
    check_tokens("samples", samples)
    if budget is not None:
        raise ValueError(
            f"budget={shown(budget)} and samples={samples}: a budget attends the best blocks of so many "
            "tokens, samples draws keys to a precision; give one of them"
        )
    if digest != "submean":
        raise ValueError(f'digest={shown(digest)} has no score for pairs of keys; samples needs digest="submean"')
    if join == "raw":
        raise ValueError('join="raw" is no share of the attention; samples needs join="max" or "mean"')


def draw(step: Step, join: str, samples: int, ahead: Any = None) -> Plan:
    """Attend drawn pairs; with one memory every token where there are no more than `samples`.

    Args:
        step, join, samples: as for `Step.attend_drawn`.
        ahead: what was drawn early, or None.
    """
    blocks = -(-samples // step.block_size)
    if not step.layer.two_memories and step.num_blocks <= blocks:
        return Plan(step.attend(step.all_blocks()), until=blocks + 1)
    return Plan(step.attend_drawn(join, samples, ahead), until=EVER)
