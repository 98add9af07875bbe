"""What a step attends, as two choices of Scout: the best blocks within a budget, or drawn keys (`samples`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_offload.knobs import check_tokens, shown
from hf_offload.policies.base import Plan, Selection

if TYPE_CHECKING:
    from hf_offload.attention.step import Step

BUDGET, SAMPLES = 2048, 512
"""Where neither `budget` nor `samples` is given: tokens, and `samples`."""
SINKS = 4
"""First tokens that are always attended: a digest says little of keys that attract every query."""


@dataclass(frozen=True)
class BestBlocks:
    """The blocks with the highest scores.

    Args:
        tokens: of these blocks and of those that are always attended.
        join: as for `Step.score`.
    """

    tokens: int
    join: str

    def blocks(self, size: int) -> int:
        """How many blocks of a size are selected; rows of no more are attended whole."""
        return self.tokens // size

    def predict(self, step: Step) -> tuple[Any, Selection]:
        """Select by a predicted query; return its scores, too."""
        return step.choose(self.join, self.blocks(step.block_size))

    def select(self, step: Step, predicted: Selection | None, smoothing: float) -> Selection:
        """Select by the real query; its scores are the blocks' worth.

        Args:
            predicted: what `predict` selected for the step, or None.
            smoothing: as for `Step.learn`.
        """
        score, selection = step.choose(self.join, self.blocks(step.block_size))
        step.learn(score, smoothing)
        if predicted is not None:
            step.compare(predicted, selection)
        return selection

    def learn(self, step: Step, plan: Plan, score: Any, smoothing: float) -> None:
        """Learn the blocks' worth from the prediction's scores, after a step that did without scores of its own."""
        if score is not None:
            step.learn(score, smoothing)


@dataclass(frozen=True)
class DrawnPairs:
    """Pairs of keys drawn by their estimated attention, once a step; arguments as for `Step.draw`."""

    tokens: int
    join: str

    def blocks(self, size: int) -> int:
        """Rows of no more blocks are attended whole, with one memory."""
        return -(-self.tokens // size)

    def predict(self, step: Step) -> tuple[Any, Selection]:
        """As `BestBlocks.predict`; a draw has no scores that the device could read."""
        return None, step.draw(self.join, self.tokens)

    def select(self, step: Step, predicted: Selection | None, smoothing: float) -> Selection:
        """The predicted selection, or one by the real query."""
        return predicted or step.draw(self.join, self.tokens)

    def learn(self, step: Step, plan: Plan, score: Any, smoothing: float) -> None:
        """The blocks' shares by the draw are their worth."""
        shares = None if plan.host is None else plan.host.block_shares()
        if shares is not None:
            step.learn(shares, smoothing)


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
            f"budget={shown(budget)} and samples={samples}: a budget is a number of tokens whose blocks are "
            "attended, samples draws keys to a precision; give one of them"
        )
    if digest != "submean":
        raise ValueError(f'digest={shown(digest)} has no score for pairs of keys; samples needs digest="submean"')
    if join == "raw":
        raise ValueError('join="raw" is no share of the attention; samples needs join="max" or "mean"')
