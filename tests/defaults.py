"""Other defaults of torch's dtype and device, for a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def default(name: str) -> Iterator[None]:
    """A default dtype, or the default device "meta", within a block."""
    before = torch.get_default_dtype()
    try:
        if name == "meta":
            torch.set_default_device(name)
        else:
            torch.set_default_dtype(getattr(torch, name))
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)
