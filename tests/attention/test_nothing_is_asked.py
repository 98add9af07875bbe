"""Decode steps with two memories: no wait for the device, and no copy to it that the host would wait for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from recording import SYNCHRONISING
from tiny import prompt, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

import hf_offload
from hf_offload.blocks.resident_set import ResidentSet
from hf_offload.policies.fluxion.predictor import ConstantPredictor

OURS = str(Path(hf_offload.__file__).parent)
PROMPT, STEPS = 150, 40
ALLOWED = {
    "sent",  # through pinned memory
    "store_block",  # does so where memory is not pinned, as on a CPU
}
SCOUT: dict[str, Any] = {"budget": 96, "sinks": 16, "recent": 16, "synchronous_layers": (0,)}
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full-fetch": ("full", {"host": "fetch"}),
    "scout-attend": ("scout", {**SCOUT, "lookahead": "attend"}),
    "scout-select": ("scout", {**SCOUT, "lookahead": "select", "recall": 3}),
    "quest": ("quest", {"budget": 96, "sinks": 16}),
    "full": ("full", {}),
    "window": ("window", {"budget": 96, "sinks": 16}),
    "fluxion": ("fluxion", {"predictor": ConstantPredictor(sinks=16, local=32), "resident": None}),
    "fixed-hybrid": ("fixed_hybrid", {"budget": 0.3, "sinks": 16, "local": 32, "resident": None}),
    "hgca": ("hgca", {"window": 64, "resident": None}),
}


def who_asks() -> str | None:
    """The function of ours that called, or None: it is the model's code, or does for CPU tensors what a kernel does."""
    frame = sys._getframe(2)
    while frame is not None:
        code, place = frame.f_code, frame.f_code.co_filename
        if "transformers" in place:
            return None
        if place.startswith(OURS):
            by_torch = ("/gpu/" in place or "/kernels/" in place) and code.co_name.endswith("_by_torch")
            return None if by_torch or code.co_name in ALLOWED else f"{Path(place).name}: {code.co_name}"
        frame = frame.f_back
    return None


class Asking(TorchDispatchMode):
    """Notes who asks tensors for values, in the thread that entered it, or makes tensors of the host's numbers."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.asked, self.watching = set[str](), 0
        for name in ("tensor", "as_tensor", "from_numpy"):
            patch.setattr(torch, name, self._noting(getattr(torch, name), name))
        for name in ("cpu", "tolist"):
            patch.setattr(torch.Tensor, name, self._noting(getattr(torch.Tensor, name), name))

    def __enter__(self) -> Asking:
        self.watching = threading.get_ident()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.watching = 0
        super().__exit__(*error)

    def _note(self, what: str, who: str | None) -> None:
        if who is not None:
            self.asked.add(f"{who}: {what}")

    def _noting(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            passes_on = name == "as_tensor" and isinstance(args[0], torch.Tensor)
            if self.watching == threading.get_ident() and not passes_on:
                self._note(name, who_asks())
            return function(*args, **kwargs)

        return noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        masks = name.startswith("index") and len(args) > 1 and isinstance(args[1], list | tuple)
        if name in SYNCHRONISING or (masks and any(i is not None and i.dtype == torch.bool for i in args[1])):
            self._note(name, who_asks())
        return func(*args, **(kwargs or {}))


def decode(asking: Asking, policy: str, knobs: dict[str, Any]) -> None:
    """Steps of padded rows, during which blocks close; what is resident is decided in the first two."""
    model, (ids, mask) = tiny_model("llama"), prompt(3, PROMPT + STEPS)
    cache = hf_offload.HybridCache(model, policy, **{"tier": "split", "block_size": 16} | knobs)
    with torch.no_grad():
        model(ids[:, :PROMPT], attention_mask=mask[:, :PROMPT], past_key_values=cache)
        for i in range(PROMPT, PROMPT + STEPS):
            seen = mask[:, : i + 1]
            step = {"attention_mask": seen, "position_ids": seen.sum(-1, keepdim=True) - 1}
            with nullcontext() if i < PROMPT + 2 else asking:
                model(ids[:, i : i + 1], **step, past_key_values=cache)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_asks_for_nothing(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recalls come as kernels bring them."""
    monkeypatch.setattr(ResidentSet, "read_by_kernels", True)
    name, knobs = POLICIES[policy]
    asking = Asking(monkeypatch)
    decode(asking, name, {"resident": 96, **knobs})
    assert sorted(asking.asked) == []
