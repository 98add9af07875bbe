"""CUDA graphs on CPU tensors: operations are recorded, not run, and replayed on the same memory.

A step's Python code runs once. A step that reads a tensor's value, or whose shapes depend on values, fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_offload.blocks import resident_set as resident
from hf_offload.gpu import handover

SYNCHRONISING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "unique", "masked_select")


def tensors_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """Tensors among arguments or results, and in lists of them."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_of(value)
    return found


@functools.cache
def written_by(func: Any) -> list[tuple[int, str]]:
    """Places and names of the arguments that an operation writes into."""
    arguments = enumerate(func._schema.arguments)
    return [(i, each.name) for i, each in arguments if each.alias_info is not None and each.alias_info.is_write]


class CpuRecorder(TorchDispatchMode):
    """Stands for `graph.graph_capture.Recorder`."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Callable[[], None]] = []
        self._made: set[int] = set()
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._alive: list[Any] = []

    def record(self, step: Callable[[], Any]) -> Any:
        """Record the operations of a call; memory that was there before it is as it was."""
        with pytest.MonkeyPatch.context() as patch:
            for module, name in ((resident.kv_copy, "write_token"), (resident.kv_copy, "fetch")):
                patch.setattr(module, name, self._whole(getattr(module, name), writes=1))
            patch.setattr(handover, "wait_for_flag", self._whole(handover.wait_for_flag, writes=0, run=False))
            with self:
                output = step()
        for storage, before in self._before.values():
            storage.copy_(before)
        return output

    def replay(self) -> None:
        """Run what was recorded."""
        for operation in self.operations:
            operation()

    def wait(self) -> None:
        """A replay has ended when it returns."""

    def _keep(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self._made and key not in self._before:
            self._before[key] = storage, storage.clone()

    def _whole(self, operation: Callable[..., Any], writes: int, run: bool = True) -> Callable[..., Any]:
        """Record a call as one operation, whatever it does inside; it writes into its first `writes` arguments."""

        def recorded(*args: Any, **kwargs: Any) -> None:
            with torch.utils._python_dispatch._disable_current_modes():
                for tensor in args[:writes]:
                    self._keep(tensor)
                if run:
                    operation(*args, **kwargs)
            self._alive.append(args)
            self.operations.append(lambda: operation(*args, **kwargs))

        return recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        assert name not in SYNCHRONISING, f"{func} asks the device for a value in a captured step"
        places = written_by(func)
        written = [args[i] if i < len(args) else kwargs[name] for i, name in places if i < len(args) or name in kwargs]
        for tensor in written:
            self._keep(tensor)
        output = func(*args, **kwargs)
        outputs = tensors_of([output])
        inputs = {value.untyped_storage().data_ptr() for value in tensors_of([args, *kwargs.values()])}
        fresh = [value for value in outputs if value.untyped_storage().data_ptr() not in inputs]
        self._alive.append((args, kwargs, output))
        self._made |= {value.untyped_storage().data_ptr() for value in fresh}
        if written:
            self.operations.append(lambda: func(*args, **kwargs))
        elif fresh:

            def again() -> None:
                for old, new in zip(outputs, tensors_of([func(*args, **kwargs)]), strict=True):
                    assert old.shape == new.shape, f"the shape that {func} gives depends on values"
                    old.copy_(new)

            self.operations.append(again)
        return output
