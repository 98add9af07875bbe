"""`convert.narrow`: results rounded to 16 bits as torch rounds them, or copied."""

from __future__ import annotations

import pytest
import torch

from hf_offload.cpu.simd.convert import narrow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    out = torch.randn(6, 48) * 10.0 ** torch.randint(-30, 30, (48,))
    out[0, :5] = torch.tensor([1.00390625, 1.01171875, -0.0, float("-inf"), float("nan")])  # ties, both ways
    target = torch.empty(2, 1, 3, 48, dtype=dtype)
    narrow(out.numpy(), target).run()
    assert torch.equal(target.view(6, 48).nan_to_num(7.0), out.to(dtype).nan_to_num(7.0))


def test_what_is_not_covered_is_refused() -> None:
    out = torch.zeros(2, 16)
    with pytest.raises(TypeError, match=r"target has dtype torch\.float16"):
        narrow(out.numpy(), torch.empty(2, 16, dtype=torch.float16))
    with pytest.raises(ValueError, match="pass a contiguous target"):
        narrow(out.numpy(), torch.empty(16, 2).T)
    with pytest.raises(TypeError, match="source has dtype float64"):
        narrow(out.double().numpy(), torch.empty(2, 16))
