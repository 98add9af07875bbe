"""Checks of tensors of files, and of what users' states give to them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hf_offload.fields import Field, check_tensors


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (torch.tensor([0.0, 1.0, math.nan]), Field(torch.float32, (3,))),
        (torch.tensor([0.0, 1.0, 0.5]), Field(torch.float32, (3,), 0, 1)),
        (torch.tensor([0.1]), Field(torch.float32, (1,), None, float(torch.tensor(0.1)))),
        (torch.tensor([-1, 5], dtype=torch.int32), Field(torch.int32, (2,), -1, 2**40)),
        (torch.tensor([2**62 + 1]), Field(torch.int64, ("n",), 2**62 + 1)),
        (torch.tensor([[1, 9], [0, 8]]), Field(torch.int64, (2, 2), 0, (1, 9))),
        (torch.empty(0), Field(torch.float32, (0,), 0, 1)),
        (torch.tensor(True), Field(torch.bool, (), 0, 1)),
    ],
)
def test_what_a_field_describes_passes(value: torch.Tensor, field: Field) -> None:
    check_tensors("", {"x": value}, {"x": field})


@pytest.mark.parametrize(
    ("value", "field", "told"),
    [
        (torch.tensor([0.0, math.nan]), Field(torch.float32, (2,), 0), "has values that are not within 0"),
        (torch.tensor([0.0, math.nan]), Field(torch.float32, (2,), None, 1), "has values that are not within"),
        (torch.tensor([math.inf]), Field(torch.float32, (1,), 0, 3e38), "has values that are not within"),
        (torch.tensor([2**62]), Field(torch.int64, (1,), 2**62 + 1), "has values that are not within"),
        (torch.tensor([[1, 9], [2, 8]]), Field(torch.int64, (2, 2), 0, (1, 9)), "has values that are not within"),
        (torch.tensor([1]), Field(torch.int32, (1,)), "is torch.int64, not torch.int32"),
        (torch.tensor([1]), Field(torch.int64, (2,)), r"has shape \[1\]"),
        (torch.zeros(2, 3), Field(torch.float32, ("n", "n")), "has shape"),
        (3, Field(torch.int64), "is a int, not a tensor"),
        (None, Field(torch.int64), "is a NoneType, not a tensor"),
    ],
)
def test_what_it_does_not_describe_is_refused_by_name(value: Any, field: Field, told: str) -> None:
    with pytest.raises(ValueError, match=f"file.x {told}"):
        check_tensors("file.", {"x": value}, {"x": field})


def test_names_must_be_the_same() -> None:
    with pytest.raises(ValueError, match="'x' is missing"):
        check_tensors("", {}, {"x": Field(torch.int64)})
    with pytest.raises(ValueError, match="'y' is unexpected"):
        check_tensors("", {"y": torch.tensor(1)}, {})
