"""A simulated CUDA device: tensors of its own, streams that lag behind, pinned memory, graphs.

With `HF_OFFLOAD_PRETEND` set, `settings.py` installs it before anything else is imported. Tests with
`HF_OFFLOAD_TEST_DEVICE=cuda` then run all GPU code: Triton's kernels in its interpreter, torch's operators on the CPU.
The simulation refuses what a GPU forbids, and takes the worst choice where a GPU is free:

- Operators refuse a mixture of device and CPU tensors, kernels refuse unpinned host memory, captures refuse waits.
- `HF_OFFLOAD_PRETEND` sets when the device runs its work: `late`, when something waits for it; `random`, now and then;
  `eager`, at once. Results are NaN until then, and the work reads and writes pinned memory only when it runs, so that a
  missing wait reads or overwrites data too early.

Not simulated: memory freed while another stream reads it, registers, warps, time.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import dataclasses
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from . import streams
from .host import is_pinned
from .operators import Pretending
from .streams import WAITS, Event, Graph, Stream, capture, current_stream, synchronize, use
from .tensor import OnDevice, bare

__all__ = ["KERNELS", "LAGS", "VARIABLE", "WAITS", "WHEN", "install"]

VARIABLE = "HF_OFFLOAD_PRETEND"
KERNELS = "HF_OFFLOAD_PRETEND_KERNELS"
"""Environment variable: with `all` every kernel is interpreted, else those of the hand-over; torch does the rest."""
WHEN = ("late", "random", "eager")
LAGS = os.environ.get(VARIABLE, "late") == "late"
"""Whether a device has work left when nothing has waited for it; so has a GPU."""


def _launching(run: Callable[..., None]) -> Callable[..., None]:
    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        for tensor in tree_leaves((args, kwargs)):
            if not isinstance(tensor, torch.Tensor) or isinstance(tensor, OnDevice):
                continue
            if tensor.numel() and not is_pinned(tensor):  # Triton lets the null pointer of an empty one pass
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        inner_args, inner_kwargs = tree_map(bare, (args, kwargs))
        current_stream().give(lambda: run(executor, *inner_args, **inner_kwargs))

    return launch


def _threads(run: Callable[..., None]) -> Callable[..., None]:
    def pretending(*args: Any) -> None:
        with Pretending():
            run(*args)

    return pretending


_GUARD = """
#include <c10/core/impl/FakeGuardImpl.h>
static c10::impl::FakeGuardImpl<c10::DeviceType::CUDA> guard;
extern "C" void install() { c10::impl::device_guard_impl_registry[int(c10::DeviceType::CUDA)].store(&guard); }
"""


def _have_guard() -> None:
    """Give torch's C++ what makes a device the current one, which builds for CPUs lack. It takes a compiler."""
    torch_at = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(_GUARD)
        options = ["-shared", "-fPIC", "-std=c++20", f"-I{torch_at / 'include'}", f"-L{torch_at / 'lib'}", "-lc10"]
        subprocess.run(["c++", source, "-o", library, *options], check=True)
        ctypes.CDLL(str(library)).install()


def install() -> None:
    """Have the device for the rest of the process."""
    when = os.environ[VARIABLE]
    if when not in WHEN:
        raise ValueError(f"{VARIABLE}={when!r}; use one of {', '.join(WHEN)}")
    streams.LAG[:] = [when]
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    interpreter.GridExecutor.__call__ = _launching(interpreter.GridExecutor.__call__)
    threading.Thread.run = _threads(threading.Thread.run)
    begin = _thread.start_new_thread
    _thread.start_new_thread = lambda run, args: begin(_threads(run), args)
    there: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "_sleep": lambda cycles: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": lambda device: contextlib.nullcontext(),
        "is_bf16_supported": lambda *args, **kwargs: True,
        "get_device_capability": lambda *args: (7, 5),
        "get_device_name": lambda *args: "a simulated device",
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": capture,
        "stream": use,
        "current_stream": current_stream,
        "synchronize": synchronize,
        "is_current_stream_capturing": lambda: current_stream().graph is not None,
        "mem_get_info": lambda *args: (64 << 30, 80 << 30),
        "memory_reserved": lambda *args: 0,
        "memory_allocated": lambda *args: 0,
        "empty_cache": lambda: None,
    }
    for name, value in there.items():
        setattr(torch.cuda, name, value)
    _have_guard()
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` brings its numbers to the device in sight of the mode
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # a parameter becomes another object
    Pretending().__enter__()
    if os.environ.get(KERNELS) != "all":
        _compute_by_torch()


def _compute_by_torch() -> None:
    """Let torch do what kernels do, in the stream's order: the interpreter is slow."""
    from hf_offload.gpu import block_topk, digest_scores, exchange, kv_copy, merge, paged_attention, seal
    from hf_offload.policies.hgca.kernels import resident_weights

    def reaching(form: Callable[..., Any]) -> Callable[..., Any]:
        def computed(*args: Any) -> Any:
            def reached(leaf: Any) -> Any:
                return OnDevice(leaf) if type(leaf) is torch.Tensor and is_pinned(leaf) else leaf

            host = args[2]
            if host is not None:
                parts = {field.name: reached(getattr(host, field.name)) for field in dataclasses.fields(host)}
                args = (*args[:2], SimpleNamespace(**parts), *args[3:])
            return form(*args)

        return computed

    def whole(form: Callable[..., None]) -> Callable[..., None]:
        def later(*args: Any) -> None:
            if not isinstance(args[0], OnDevice):
                return form(*args)
            inner = tree_map(bare, args)
            current_stream().give(lambda: form(*inner))

        return later

    for module in (block_topk, digest_scores, exchange, kv_copy, merge, paged_attention, seal, resident_weights):
        module.ON_TRITON = frozenset()
    merge._by_torch = reaching(merge._by_torch)
    for name in ("_write_token_by_torch", "_fetch_by_torch", "_store_block_by_torch", "_store_tokens_by_torch"):
        setattr(kv_copy, name, whole(getattr(kv_copy, name)))
