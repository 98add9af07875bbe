"""Fixtures of the kernel tests: Triton's interpreter on CPU tensors."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from packaging.version import Version

from hf_offload.gpu import backend


@pytest.fixture
def interpreted() -> Iterator[None]:
    """Run the kernels themselves on CPU tensors."""
    triton = pytest.importorskip("triton")
    if Version(triton.__version__) < Version("3.7") and Version(np.__version__) >= Version("2.4"):
        pytest.skip(
            f"Triton {triton.__version__}'s interpreter fails with numpy {np.__version__}: use Triton 3.7 or newer"
        )
    if torch.cuda.is_available():
        pytest.skip("with a CUDA device Triton compiles")
    backend.ON_TRITON.add("cpu")
    yield
    backend.ON_TRITON.discard("cpu")
