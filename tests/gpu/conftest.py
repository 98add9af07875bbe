"""Fixtures of the kernel tests: Triton's interpreter on CPU tensors."""

import pytest
import torch

from hf_offload.gpu import backend


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels themselves on CPU tensors."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("with a CUDA device Triton compiles")
    monkeypatch.setattr(backend, "FORCED", True)
