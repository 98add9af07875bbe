"""Covering arrays: combinations of parameters in which every two values meet, in place of all combinations."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any


def covering(*choices: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows of one value of each parameter; any two values of two parameters stand together in at least one row."""
    values = [list(each) for each in choices]
    every = itertools.product(*(range(len(each)) for each in values))
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in every}
    missing, rows = set[Any]().union(*pairs.values()), []
    while missing:
        best = max(pairs, key=lambda row: len(pairs[row] & missing))
        missing -= pairs[best]
        rows.append(tuple(each[i] for each, i in zip(values, best, strict=True)))
    return rows
