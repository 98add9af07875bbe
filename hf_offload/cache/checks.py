"""Checks of decode steps against full attention (`check_every`): when they are due, and their results."""

from __future__ import annotations

import warnings
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from hf_offload.knobs import check_count

KEEP = 4096
"""Newest checked heads of which a layer keeps the two errors."""
FACTOR, ENOUGH = 3.0, 256
"""A warning tells of errors FACTOR times larger than estimated, in the mean square of ENOUGH heads or more."""
NEGLIGIBLE = 1e-3
"""No warning tells of smaller errors, which are less than bfloat16's rounding: where all pairs are attended, the
estimate is 0 and the error that of float32 sums."""


@dataclass(slots=True)
class Checked:
    """The results of one layer's checks.

    Args:
        heads: checked query heads, of all rows and steps.
        missed_mass: sum over heads of the share of full attention's weights on keys that were not attended.
        output_error: sum over heads of the L2 norm of the output's error, as a share of full attention's output.
        errors: of the newest heads: the estimated relative error of the softmax's sum (NaN: no keys were drawn), and
            the true one.
    """

    heads: int = 0
    missed_mass: float = 0.0
    output_error: float = 0.0
    errors: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=KEEP))

    def add(self, missed: np.ndarray, output: np.ndarray, estimated: np.ndarray | None, true: np.ndarray) -> None:
        """Add a check: a number for each row and query head, float `[n]`."""
        estimates = np.full(true.shape, np.nan) if estimated is None else estimated
        self.heads += true.size
        self.missed_mass += float(missed.sum())
        self.output_error += float(output.sum())
        self.errors.extend(zip(estimates.ravel().tolist(), true.ravel().tolist(), strict=True))


class Checks:
    """When a layer's step is checked: one layer in turn, at a fixed interval of steps.

    Args:
        every: steps.
        layers: indices of the layers.

    Raises:
        ValueError: `every` is no number of steps.
    """

    def __init__(self, every: int, layers: tuple[int, ...]) -> None:
        check_count("check_every", every, what="a number of steps")
        self.every, self._layers = every, layers
        self._squares, self._heads, self._warned = np.zeros(2), 0, False

    def due(self, layer: int, step: int) -> bool:
        """Whether a layer's step is checked; steps count from 0."""
        return step % self.every == 0 and self._layers[step // self.every % len(self._layers)] == layer

    def compare(self, estimated: np.ndarray, true: np.ndarray) -> None:
        """Warn once if the true errors of the softmax's sum are much larger than the estimated ones; `[n]`."""
        self._squares += [float(np.square(error, dtype=np.float64).sum()) for error in (estimated, true)]
        self._heads += true.size
        root = np.sqrt(self._squares / self._heads)
        if not self._warned and self._heads >= ENOUGH and root[1] > max(FACTOR * root[0], NEGLIGIBLE):
            self._warned = True
            warnings.warn(
                f"the drawn keys miss more than they tell: the softmax's sum is off by {root[1]:.1%}, estimated were "
                f"{root[0]:.1%}; the digests do not fit these keys, or predicted queries miss the real ones: use more "
                'samples, lookahead="select" (two memories), or budget= (scout)',
                RuntimeWarning,
                stacklevel=2,
            )
