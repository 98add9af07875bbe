"""torch's default dtype and device: the package makes no tensor that depends on them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from defaults import default
from test_exactness import BLOCK, FOUR_BLOCKS, POLICIES, assert_equal, decode_logits, knobs_of
from tiny import in_memory, prompt, tiny_model
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, PreTrainedModel

import hf_offload

Reference = tuple[PreTrainedModel, tuple[torch.Tensor, torch.Tensor]]

PACKAGE = Path(hf_offload.__file__).parent
DEFAULTS = ("float16", "bfloat16", "float64", "meta")
"""Default dtypes, and a default device on which no value can be read."""

STEPS = 6
"""Of which the fifth fills a block."""


class Watch(TorchFunctionMode):
    """Records the lines of the package that make a tensor of a dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.lines = dtype, set[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple) else (found,):
            if isinstance(each, torch.Tensor) and each.dtype is self.dtype:
                frame: Any = sys._getframe(1)
                while frame is not None and os.sep + "torch" + os.sep in frame.f_code.co_filename:
                    frame = frame.f_back
                if frame is not None and str(PACKAGE) in frame.f_code.co_filename:
                    self.lines.add(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return found


CASES = [
    (policy, ("one", "split")[number % 2] if policy not in ("scout-select", "scout-all") else "split")
    for number, policy in enumerate(POLICIES)
]


def make(model: PreTrainedModel, policy: str, tier: str) -> hf_offload.HybridCache:
    name, knobs = knobs_of(policy)
    knobs = (FOUR_BLOCKS if tier == "split" else {}) | in_memory(tier, knobs)
    return hf_offload.HybridCache(model, name, tier=tier, block_size=BLOCK, prefill_tile=32, **knobs)


@pytest.fixture(scope="module")
def llama() -> Reference:
    """A model, and full attention's tokens and logits."""
    stock = tiny_model("llama", "sdpa")
    return tiny_model("llama"), decode_logits(stock, DynamicCache(config=stock.config), *prompt(3, 75), 38, STEPS)


@pytest.mark.parametrize(("policy", "tier"), CASES)
def test_no_tensor_of_the_default_dtype(llama: Reference, policy: str, tier: str) -> None:
    """Nothing of a float32 model's cache is float16 because that is the default: quotients of counts, say."""
    model, want = llama
    with default("float16"), Watch(torch.float16) as watch:
        cache = make(model, policy, tier)
        got = decode_logits(model, cache, *prompt(3, 75), 38, STEPS)
        cache.stats()
        cache.crop(-5)
        cache.fork()
    assert not watch.lines
    assert_equal(got, want)


@pytest.mark.parametrize(
    ("name", "policy", "tier"),
    [
        ("bfloat16", "scout-off", "split"),
        ("float64", "h2o", "one"),
        ("meta", "scout-off", "one"),
        ("meta", "h2o", "split"),
    ],
)
def test_other_defaults(llama: Reference, name: str, policy: str, tier: str, tmp_path: Path) -> None:
    model, want = llama
    with default(name):
        cache = make(model, policy, tier)
        assert_equal(decode_logits(model, cache, *prompt(3, 75), 38, STEPS), want)
        cache.save(tmp_path / "cache")
        kept, loaded = cache.to_dynamic(), hf_offload.HybridCache.load(tmp_path / "cache", model).to_dynamic()
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(kept.layers, loaded.layers, strict=True))
