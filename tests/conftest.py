"""Set up the test run: no network, one thread, and SmolLM2 loaded once."""

import os

import pretended
import torch

if pretended.VARIABLE in os.environ:  # a CUDA device that is not there
    pretended.install()
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported, so before that

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_offload import assets

torch.set_num_threads(1)  # tiny models: more threads only wait for each other


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where no CUDA device is present, and those of one memory with models on one."""
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    one_memory = pytest.mark.skip(reason="one memory is for models on the CPU")
    on_cpu = os.environ.get("HF_OFFLOAD_TEST_DEVICE", "cpu") == "cpu"
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if parameters.get("tier") == "one" and not on_cpu:
            item.add_marker(one_memory)


@pytest.fixture(scope="session")
def smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct in float32 on the CPU, with stock attention, and its tokenizer.

    The model is shared by the whole run: a test that changes it (attention implementation, hooks) puts it back.
    """
    try:
        assets.find_smollm2()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    return assets.load_demo_model(attn_implementation="sdpa", dtype=torch.float32, device="cpu")
