"""One model on several ranks, each with some of its heads, and whether the tokens are those of one rank.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py
    torchrun --nproc-per-node 8 examples/tensor_parallel.py --model Qwen/Qwen3-8B --dtype bfloat16 --file novel.txt

Without `--model` it makes a small random Llama, so that it runs on any machine. Every rank runs the same
script on the same prompt; each has a cache of its own with the KV heads that it holds.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel, set_seed
from transformers.distributed import DistributedConfig

import hf_offload


def random_llama(folder: str) -> None:
    """Save a small random model of eight query heads and four KV heads."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        initializer_range=0.15,
        eos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def generate(model: PreTrainedModel, ids: torch.Tensor, budget: int, new: int) -> tuple[torch.Tensor, float]:
    """Greedy tokens after a prompt, and the MiB of KV and digests that this rank's cache holds."""
    cache = hf_offload.HybridCache(model, "scout", budget=budget)
    ids = ids.to(model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=new, do_sample=False
    )
    held = cache.stats().as_dict()
    return out[0, ids.shape[1] :].cpu(), (held["host_bytes"] + held["resident_bytes"] + held["digest_bytes"]) / 2**20


def main(
    model: Annotated[str | None, typer.Option(help="hub name or folder; a small random Llama without it")] = None,
    file: Annotated[Path | None, typer.Option(help="text of the prompt; random tokens without it")] = None,
    tokens: Annotated[int, typer.Option(help="tokens of the prompt")] = 1500,
    new: Annotated[int, typer.Option(help="tokens to generate")] = 48,
    budget: Annotated[int, typer.Option(help="tokens a KV head attends in a step")] = 512,
    dtype: Annotated[str, typer.Option(help="of the model")] = "float32",
    compare: Annotated[bool, typer.Option(help="run the whole model on every rank too")] = True,
) -> None:
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if ranks == 1:
        raise SystemExit("start it with torchrun: torchrun --nproc-per-node 2 examples/tensor_parallel.py")
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            random_llama(folder)  # every rank makes the same one
        where = model or folder
        settings = {"attn_implementation": "hybrid_sparse", "dtype": dtype}
        shard = AutoModelForCausalLM.from_pretrained(
            where, distributed_config=DistributedConfig(tp_size=ranks), **settings
        )
        whole = AutoModelForCausalLM.from_pretrained(where, **settings) if compare else None
    set_seed(1)
    ids = torch.randint(3, shard.config.vocab_size, (1, tokens))
    if file is not None:
        ids = AutoTokenizer.from_pretrained(where)(file.read_text(), return_tensors="pt").input_ids[:, :tokens]
    mine, held = generate(shard, ids, budget, new)
    lines = [f"rank {rank}: {held:.1f} MiB of KV and digests, {torch.get_num_threads()} threads for torch"]
    if whole is not None:
        want, held = generate(whole.to(shard.device), ids, budget, new)
        lines.append(f"rank {rank}: {held:.1f} MiB with all heads on one rank; tokens equal: {torch.equal(mine, want)}")
    every: list[list[str]] = [[] for _ in range(ranks)]
    dist.all_gather_object(every, lines)
    if rank == 0:
        print(*(line for lines in every for line in lines), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
