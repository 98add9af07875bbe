"""What the command line says to all parts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import psutil
import torch
import typer

VARIANTS: dict[str, dict[str, Any]] = {
    "scout": {},
    "scout-no-recall": {"recall": 0},
    "scout-off": {"lookahead": "off"},
    "scout-quest": {"digest": "quest"},
}
"""Rows that choose blocks by a script."""
FREE: dict[str, dict[str, Any]] = {"default": {}, "chosen": {"dense": False}, "drawn": {"samples": 512}}
"""Rows without a script: a cache as it is by default, whose blocks are all on the device where they fit; one that
chooses among them; and keys that are drawn, with few blocks on the device."""
FULL = "full-resident"
STOCK = {"dynamic": {}, "offloading": {"offloading": True}}
ROWS = (*STOCK, *(f"{name}{graph}" for name in (FULL, *FREE, *VARIANTS) for graph in ("", "-graph")))
USUAL = (
    "scout-graph,full-resident-graph,default-graph,scout,dynamic,offloading,chosen-graph,drawn-graph,"
    "scout-no-recall-graph,scout-off-graph,scout-quest-graph"
)
HOST_GIB = 0.8 * psutil.virtual_memory().total / 2**30


@dataclass(frozen=True)
class Options:
    """Options of the check."""

    device: Annotated[str, typer.Option(help='"cuda", or "cpu" to try the script itself.')] = "cuda"
    quick: Annotated[bool, typer.Option(help="Tiny sizes in this process, to see that everything runs.")] = False
    kv_gib: Annotated[float, typer.Option(help="GiB of KV and digests on the device, if so many are free.")] = math.inf
    host_gib: Annotated[float, typer.Option(help="GiB of host memory that a row may take.")] = HOST_GIB
    contexts: Annotated[str, typer.Option(help="Tokens, comma-separated; k is 1,024.")] = "32k,64k"
    batches: Annotated[str, typer.Option(help="Rows decoded at once, comma-separated.")] = "1,8,16"
    rows: Annotated[str, typer.Option(help=f"Of {', '.join(ROWS)}.")] = USUAL
    steps: Annotated[int, typer.Option(min=1, max=48, help="Decode steps that are timed, per row.")] = 32

    @property
    def on_gpu(self) -> bool:
        """Whether there is a GPU to wait for."""
        return self.device.startswith("cuda")

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and KV."""
        return torch.bfloat16 if self.on_gpu else torch.float32
