"""Checks of tensors of files, and of what users' states give to them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hf_offload.fields import Field, check_tensors

NAN = torch.tensor([0.0, math.nan])
RANGE = "has values that are not within"


def test_what_a_field_describes_passes() -> None:
    for value, field in (
        (torch.tensor([0.0, 1.0, math.nan]), Field(torch.float32, (3,))),
        (torch.tensor([0.1]), Field(torch.float32, (1,), None, float(torch.tensor(0.1)))),
        (torch.tensor([-1, 5], dtype=torch.int32), Field(torch.int32, (2,), -1, 2**40)),
        (torch.tensor([2**62 + 1]), Field(torch.int64, ("n",), 2**62 + 1)),
        (torch.tensor([[1, 9], [0, 8]]), Field(torch.int64, (2, 2), 0, (1, 9))),
        (torch.empty(0), Field(torch.float32, (0,), 0, 1)),
        (torch.tensor(True), Field(torch.bool, (), 0, 1)),
    ):
        check_tensors("", {"x": value}, {"x": field})


@pytest.mark.parametrize(
    ("tensors", "field", "told"),
    [
        ({"x": NAN}, Field(torch.float32, (2,), 0), f"file.x {RANGE} 0"),
        ({"x": NAN}, Field(torch.float32, (2,), None, 1), f"file.x {RANGE}"),
        ({"x": torch.tensor([math.inf])}, Field(torch.float32, (1,), 0, 3e38), f"file.x {RANGE}"),
        ({"x": torch.tensor([2**62])}, Field(torch.int64, (1,), 2**62 + 1), f"file.x {RANGE}"),
        ({"x": torch.tensor([[1, 9], [2, 8]])}, Field(torch.int64, (2, 2), 0, (1, 9)), f"file.x {RANGE}"),
        ({"x": torch.tensor([1])}, Field(torch.int32, (1,)), "file.x is torch.int64, not torch.int32"),
        ({"x": torch.tensor([1])}, Field(torch.int64, (2,)), r"file.x has shape \[1\]"),
        ({"x": torch.zeros(2, 3)}, Field(torch.float32, ("n", "n")), "file.x has shape"),
        ({"x": 3}, Field(torch.int64), "file.x is a int, not a tensor"),
        ({}, Field(torch.int64), "'x' is missing"),
        ({"x": torch.tensor(1), "y": torch.tensor(1)}, Field(torch.int64), "'y' is unexpected"),
    ],
)
def test_what_it_does_not_describe_is_refused_by_name(tensors: Any, field: Field, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_tensors("file.", tensors, {"x": field})
