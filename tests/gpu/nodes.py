"""Kernels of a captured step, counted by name on the simulated device: nodes.py [--out nodes.csv] [ROW ...].

Of each row the kernels that a decoder layer with a predicted query adds to a step: of a model in the shape of Qwen 3
with four layers, less those of one with two, over two.
"""

from __future__ import annotations

import collections
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TOKENS = 1100  # behind which blocks have digests
SCOUT: dict[str, Any] = {"budget": 96, "sinks": 16, "recent": 16, "synchronous_layers": (0,)}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "scout, all resident": ("scout", SCOUT),
    "scout, all resident, chosen from": ("scout", {**SCOUT, "dense": False}),
    "scout": ("scout", {**SCOUT, "resident": 144}),
    "scout, selected": ("scout", {**SCOUT, "resident": 144, "attend_resident": "selected"}),
}


def name_of(call: Any) -> str:
    """The kernel or operator of a recorded call."""
    for cell in call.__closure__ or ():
        held = cell.cell_contents
        kernel = getattr(getattr(held, "fn", None), "__name__", None)
        if kernel is not None:
            return str(kernel)
        if type(held).__name__ == "OpOverload":
            return str(held)
    return "copy"


def nodes_of(layers: int, policy: str, knobs: dict[str, Any]) -> collections.Counter[str]:
    """The calls of a captured step by name."""
    import torch
    from tiny import prompt
    from transformers import AutoModelForCausalLM, Qwen3Config

    from hf_offload import HybridCache

    config = Qwen3Config(
        vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(
        config, attn_implementation="hybrid_sparse", dtype=torch.bfloat16
    ).eval()
    model.cuda()
    cache = HybridCache(model, policy, block_size=16, **knobs)
    ids = prompt(1, TOKENS + 4)[0].cuda()
    with torch.no_grad():
        model(ids[:, :TOKENS], past_key_values=cache)
        for i in range(TOKENS, TOKENS + 4):
            model(ids[:, i : i + 1], past_key_values=cache)
    assert cache.graph is not None
    return collections.Counter(map(name_of, cache.graph._recorded._graph.calls))


def main(arguments: list[str]) -> None:
    """Count, and print or write a CSV."""
    os.environ |= {"HF_OFFLOAD_PRETEND": "eager", "HF_OFFLOAD_PRETEND_KERNELS": "all", "TRITON_INTERPRET": "1"}
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "eval"), str(ROOT)]
    import pretended

    pretended.install()
    from records import write_csv

    kept = arguments[:1] == ["--out"]
    rows: list[dict[str, Any]] = []
    for row in arguments[2 if kept else 0 :] or ROWS:
        two, four = (nodes_of(layers, *ROWS[row]) for layers in (2, 4))
        each = {kernel: (count - two[kernel]) / 2 for kernel, count in four.items() if count != two[kernel]}
        ordered = sorted(each.items(), key=lambda one: (-one[1], one[0]))
        rows += [
            {"row": row, "kernel": kernel, "nodes": count} for kernel, count in [("all", sum(each.values())), *ordered]
        ]
        print(row, sum(each.values()), flush=True)
    if kept:
        write_csv(Path(arguments[1]), rows)


if __name__ == "__main__":
    main(sys.argv[1:])
