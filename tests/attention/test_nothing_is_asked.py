"""Decode steps with two memories: no wait for the device, and no copy to it that the host would wait for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
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
    "full": ("full", {}),
    "full-fetch": ("full", {"host": "fetch"}),
    "window": ("window", {"budget": 96, "sinks": 16}),
    "scout-off": ("scout", {**SCOUT, "lookahead": "off"}),
    "scout-select": ("scout", {**SCOUT, "lookahead": "select", "recall": 3}),
    "scout-attend": ("scout", {**SCOUT, "lookahead": "attend"}),
    "scout-quest-all": (
        "scout",
        {**SCOUT, "lookahead": "attend", "digest": "quest", "join": "raw", "attend_resident": "all"},
    ),
    "quest": ("quest", {"budget": 96, "sinks": 16}),
    "fixed-hybrid": ("fixed_hybrid", {"budget": 0.3, "sinks": 16, "local": 32, "resident": None}),
    "fluxion": ("fluxion", {"predictor": ConstantPredictor(sinks=16, local=32), "resident": None}),
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
        self.asked: list[str] = []
        self._thread = threading.get_ident()
        self._watching = False
        for owner, name in (
            (torch, "tensor"), (torch, "as_tensor"), (torch, "from_numpy"), (torch.Tensor, "cpu"),
            (torch.Tensor, "tolist"),
        ):  # fmt: skip
            patch.setattr(owner, name, self._noting(getattr(owner, name), name))

    def __enter__(self) -> Asking:
        self._watching = True
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._watching = False
        super().__exit__(*error)

    def _note(self, what: str, who: str | None) -> None:
        if who is not None:
            self.asked.append(f"{who}: {what}")

    def _noting(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            passes_on = name == "as_tensor" and isinstance(args[0], torch.Tensor)
            if self._watching and threading.get_ident() == self._thread and not passes_on:
                self._note(name, who_asks())
            return function(*args, **kwargs)

        return noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        masks = name.startswith("index") and len(args) > 1 and isinstance(args[1], list | tuple)
        if name in SYNCHRONISING or (masks and any(i is not None and i.dtype == torch.bool for i in args[1])):
            self._note(name, who_asks())
        return func(*args, **(kwargs or {}))


QUICK = ("full-fetch", "scout-attend", "quest", "fluxion", "hgca")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("policy", [p if p in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in POLICIES])
def test_a_step_asks_for_nothing(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks close meanwhile, and padded rows are among them. Recalls come as kernels bring them."""
    monkeypatch.setattr(ResidentSet, "read_by_kernels", True)
    model = tiny_model("llama")
    ids, mask = prompt(3, PROMPT + STEPS)
    name, knobs = POLICIES[policy]
    cache = hf_offload.HybridCache(model, name, **{"tier": "split", "block_size": 16, "resident": 96, **knobs})
    asking = Asking(monkeypatch)
    with torch.no_grad():
        model(ids[:, :PROMPT], attention_mask=mask[:, :PROMPT], past_key_values=cache)
        for i in range(PROMPT, PROMPT + STEPS):
            step = {"input_ids": ids[:, i : i + 1], "attention_mask": mask[:, : i + 1]}
            step["position_ids"] = mask[:, : i + 1].sum(-1, keepdim=True) - 1
            if i < PROMPT + 2:  # what is resident is decided
                model(**step, past_key_values=cache)
                continue
            with asking:
                model(**step, past_key_values=cache)
    assert cache.stats().as_dict()["steps"] == STEPS
    assert sorted(set(asking.asked)) == []


def test_what_asks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy whose tokens the host brings one by one has to know which."""
    asking = Asking(monkeypatch)
    model = tiny_model("llama")
    ids, _ = prompt(1, PROMPT + 3)
    cache = hf_offload.HybridCache(model, "infinigen", tier="split", block_size=16)
    with torch.no_grad():
        model(ids[:, :PROMPT], past_key_values=cache)
        model(ids[:, PROMPT : PROMPT + 1], past_key_values=cache)
        with asking:
            model(ids[:, PROMPT + 1 : PROMPT + 2], past_key_values=cache)
    assert "token_fetch.py: __init__: cpu" in asking.asked
