"""Fixtures of the kernel tests: Triton's interpreter on CPU tensors."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the kernels themselves on CPU tensors.

    The interpreter replaces the functions of `triton.language` at each call of a kernel and of what that calls, which
    takes longer than to run them; here it does so once. Imports are here, since this file may be read before
    `settings.py`.
    """
    import torch

    from hf_offload.gpu import backend

    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("with a CUDA device Triton compiles")
    from triton import language
    from triton.runtime import interpreter

    replaced = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    monkeypatch.setattr(interpreter, "_patch_lang", lambda function: SimpleNamespace(restore=lambda: None))
    backend.ON_TRITON.add("cpu")
    yield
    backend.ON_TRITON.discard("cpu")
    replaced.restore()
