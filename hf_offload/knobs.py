"""Checks of user-supplied knobs; each raises a ValueError that names the knob, its value and the remedy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

MOST = 2**31 - 1
"""The largest count: longer than any context, and within the int32 indices of compiled code."""
_EXACT = 2**53  # float64 holds all integers up to this
_SHOWN = 80  # most characters of a value in a message


class Moved(ValueError):
    """A knob of an earlier version; the message says what has its place."""


def shown(value: Any) -> str:
    """Return a value's `repr` for a message, cut to 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        text = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 20]}…{text[-19:]}"


def check_count(
    name: str, value: Any, *, what: str = "a number of tokens", least: int = 1, most: int = MOST, hint: str = ""
) -> None:
    """Check an integer.

    Args:
        name, value: name and value of the knob.
        what: description of an allowed value, for the message.
        least, most: inclusive bounds.
        hint: end of the message, with its separator.

    Raises:
        ValueError: not an `int`, or out of bounds.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={shown(value)} is not {what}; use an integer of at least {least}{hint}")
    if value > most:
        raise ValueError(f"{name}={shown(value)} is too large for {what}; use an integer of at most {most}{hint}")


def check_tokens(name: str, value: Any, *, least: int = 1) -> None:
    """Check a number of tokens; a number larger than the context, up to 2³¹ - 1, is allowed and means all tokens.

    Raises:
        ValueError: not an `int`, or out of bounds.
    """
    check_count(name, value, least=least)


def check_number(
    name: str,
    value: Any,
    what: str,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> None:
    """Check a real number.

    Args:
        name, value: name and value of the knob.
        what: description of an allowed value, for the message.
        above, least: exclusive and inclusive lower bound.
        most, below: inclusive and exclusive upper bound; infinity is allowed only if `most` is infinity.

    Raises:
        ValueError: not a `float` or an `int` that float64 holds exactly, NaN, infinity, or out of bounds.
    """
    valid = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and not (isinstance(value, float) and math.isinf(value) and most != math.inf)
        and not (isinstance(value, int) and abs(value) > _EXACT)
        and value == value
        and (above is None or value > above)
        and (least is None or value >= least)
        and (most is None or value <= most)
        and (below is None or value < below)
    )
    if valid:
        return
    bounds = (("above", above), ("of at least", least), ("of at most", most), ("below", below))
    allowed = " and ".join(f"{word} {bound:.10g}" for word, bound in bounds if bound not in (None, math.inf))
    raise ValueError(f"{name}={shown(value)} is not {what}; use a number {allowed or 'that is finite'}")


def check_flag(name: str, value: Any) -> None:
    """Check a bool.

    Raises:
        ValueError: neither True nor False.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)} is not True or False; use one of these")


def check_choice(name: str, value: Any, allowed: Sequence[str | None]) -> None:
    """Check a choice from a few words (or None).

    Raises:
        ValueError: the value is not among `allowed`.
    """
    if not any(value is None if choice is None else isinstance(value, str) and value == choice for choice in allowed):
        words = ", ".join(choice for choice in allowed if choice is not None)
        none = ", or None" if None in allowed else ""
        raise ValueError(f"{name}={shown(value)} is not known; use one of {words}{none}")
