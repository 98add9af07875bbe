"""Rows of a comparison from the command line: `scout:budget=1024`."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from common import Row, row_of
from hf_offload.plan import CACHE_KNOBS
from hf_offload.policies.registry import make_policy

REFERENCE = "full"
"""The row that others are compared with: every token attended, through a HybridCache."""
CONTROL = "dynamic"
"""Transformers' own cache and attention."""


def parse_row(text: str) -> Row:
    """A row of its text, which is its name too: a policy and, after a colon, knobs of it and of `HybridCache`.

    Raises:
        typer.BadParameter: an unknown policy, knob or value.
    """
    row = row_of(text)
    policy, options = row.policy, row.options
    if policy == CONTROL and not options:
        return row
    try:
        make_policy(policy, {knob: value for knob, value in options.items() if knob not in CACHE_KNOBS})
    except (ValueError, TypeError, FileNotFoundError) as error:
        raise typer.BadParameter(f"--row {text}: {error}") from None
    return row


def parse_rows(texts: Sequence[str]) -> list[Row]:
    """The rows of their texts.

    Raises:
        typer.BadParameter: one that is wrong, or twice there.
    """
    rows = [parse_row(text) for text in texts]
    if len({row.name for row in rows}) < len(rows):
        raise typer.BadParameter(f"a --row is there twice: {', '.join(row.name for row in rows)}")
    return rows
