"""Script of each rank in `test_ranks.py`: loads models from a folder and writes its tokens there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from tiny import prompt
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

from hf_offload import HybridCache
from hf_offload.attention.step_cpu import CpuStep

STEPS = 10
SCOUT: dict[str, Any] = {"sinks": 8, "recent": 16, "block_size": 8, "synchronous_layers": (0,), "budget": 64}
SPLIT: dict[str, Any] = {**SCOUT, "tier": "split", "resident": 64, "recall": 2}
CASES: dict[str, dict[str, Any]] = {
    "full": {"policy": "full", "tier": "split", "resident": 64, "block_size": 8},
    "off": {**SCOUT, "lookahead": "off", "tier": "one"},
    "select": {**SPLIT, "lookahead": "select"},
    "attend": {**SPLIT, "lookahead": "attend"},
    "attend, all": {**SPLIT, "lookahead": "attend", "budget": 512},
}
FAMILIES = {"llama": list(CASES), "qwen3": ["attend"], "olmo2": ["attend", "select"]}
"""Olmo 2 gathers its projections, keys and queries of all heads, on every rank: a prediction exchanges too."""


def generate(model: PreTrainedModel, case: str) -> tuple[torch.Tensor, HybridCache]:
    ids, mask = prompt(2, 75)
    cache = HybridCache(model, **CASES[case])
    return model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=STEPS, do_sample=False), cache


def _load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="hybrid_sparse", distributed_config=DistributedConfig(tp_size=2)
    )


def main(folder: Path) -> None:
    rank, found = int(os.environ["RANK"]), {}
    torch.set_num_threads(1)
    for family, cases in FAMILIES.items():
        model = _load(folder / family)
        wanted = torch.load(folder / family / "tokens.pt")
        for case in cases:
            tokens, cache = generate(model, case)
            found[f"{family} {case}"] = {
                "equal": torch.equal(tokens, wanted[case]),
                "kv_heads": cache.layers[-1].store.num_kv_heads,
                "cosine": cache.stats().as_dict()["query_cosine"],
            }
    try:
        HybridCache(_load(folder / "odd"))
    except ValueError as error:
        found["odd"] = str(error)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    if rank == 1:  # rank 0 waits for it in an exchange meanwhile

        def fail(*_: Any) -> None:
            raise MemoryError("no memory on this rank")

        CpuStep.run = fail  # type: ignore[method-assign]
    generate(model, "off")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
