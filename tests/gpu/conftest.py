"""Fixtures of the kernel tests: Triton's interpreter on CPU tensors."""

import pytest

from hf_offload.gpu import backend


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels themselves on CPU tensors."""
    pytest.importorskip("triton")
    monkeypatch.setattr(backend, "FORCED", True)
