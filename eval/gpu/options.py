"""What the command line says to all parts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import typer

from common import listed, numbers
from gpu.replay import parse

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
STOCK = ("dynamic", "offloading")
ROWS = (*STOCK, *(f"{name}{graph}" for name in (FULL, *FREE, *VARIANTS) for graph in ("", "-graph")))
USUAL = (
    "scout-graph,full-resident-graph,default-graph,scout,dynamic,offloading,chosen-graph,drawn-graph,"
    "scout-no-recall-graph,scout-off-graph,scout-quest-graph"
)


@dataclass(frozen=True)
class Options:
    """Options of the check."""

    device: Annotated[str, typer.Option(help='"cuda", or "cpu" to try the script itself.')] = "cuda"
    quick: Annotated[bool, typer.Option(help="Tiny sizes in this process, to see that everything runs.")] = False
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers of the model.")] = 36
    kv_gib: Annotated[float | None, typer.Option(min=0.0, help="GiB of KV and digests on the device [all].")] = None
    host_gib: Annotated[float | None, typer.Option(help="GiB of host memory that a row may take [4/5].")] = None
    contexts: Annotated[str, typer.Option(help="Tokens, comma-separated; k is 1,024.")] = "32k,64k"
    batches: Annotated[str, typer.Option(help="Rows decoded at once, comma-separated.")] = "1,8,16"
    rows: Annotated[str, typer.Option(help=f"Of {', '.join(ROWS)}.")] = USUAL
    budget: Annotated[int, typer.Option(min=8, help="Tokens that a sparse row attends, and keeps there.")] = 2048
    replay: Annotated[str | None, typer.Option(help='The script of choices, "miss=0.08,drift=0.15[,recall=8]".')] = None
    steps: Annotated[int, typer.Option(min=1, max=48, help="Decode steps that are timed, per row.")] = 32

    def __post_init__(self) -> None:
        listed(self.rows, ROWS, "rows")
        numbers(f"{self.contexts},{self.batches}")
        try:
            parse(self.replay or "miss=0,drift=0")
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    def made_tiny(self) -> Options:
        """The same with tiny sizes, if `quick`."""
        if not self.quick:
            return self
        sizes = {"layers": min(self.layers, 2), "budget": min(self.budget, 64), "steps": min(self.steps, 4)}
        return replace(self, contexts="256", batches="2", **sizes)

    @property
    def on_gpu(self) -> bool:
        """Whether there is a GPU to wait for."""
        return self.device.startswith("cuda")

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and KV."""
        return torch.bfloat16 if self.on_gpu else torch.float32
