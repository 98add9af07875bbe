"""Fixtures of the kernel tests: Triton's interpreter on CPU tensors."""

from collections.abc import Iterator

import pytest
import torch

from hf_offload.gpu import backend


@pytest.fixture
def interpreted() -> Iterator[None]:
    """Run the kernels themselves on CPU tensors."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("with a CUDA device Triton compiles")
    backend.ON_TRITON.add("cpu")
    yield
    backend.ON_TRITON.discard("cpu")
