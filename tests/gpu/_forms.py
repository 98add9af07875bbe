"""Forms of a GPU operation for tests: torch, the kernel in Triton's interpreter, the kernel on a GPU."""

from __future__ import annotations

import pytest

every_form = pytest.mark.parametrize("form", ["torch", "interpreted", pytest.param("cuda", marks=pytest.mark.gpu)])


def device_of(form: str, request: pytest.FixtureRequest) -> str:
    """Make operations take this form, and return the device of their tensors."""
    if form == "interpreted":
        request.getfixturevalue("interpreted")
    return "cuda" if form == "cuda" else "cpu"
