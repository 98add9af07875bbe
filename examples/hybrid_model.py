"""A model with full attention in a few layers: which layers a cache holds, and what grows with the text.

    python examples/hybrid_model.py
    python examples/hybrid_model.py --model Qwen/Qwen3.5-4B --file novel.txt

The first makes a small model with random weights, which is enough to see the sizes.
"""

import inspect
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3NextConfig

import hf_offload


def random_model() -> PreTrainedModel:
    """A small Qwen3-Next with random weights: three layers of four have linear attention."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "linear_num_value_heads": 4}
    linear = {"linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8}
    config = Qwen3NextConfig(**sizes, **heads, **linear, **experts, shared_expert_intermediate_size=64)
    return AutoModelForCausalLM.from_config(config, attn_implementation="hybrid_sparse").eval()


def main(
    model: Annotated[str | None, typer.Option(help="Hub name, folder, GGUF (a random model if none).")] = None,
    file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Your text, with a model.")] = None,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of the prompt.")] = 4096,
) -> None:
    if model is None:
        lm, ids = random_model(), torch.randint(3, 512, (1, tokens), generator=torch.Generator().manual_seed(0))
    else:
        text = file.read_text(encoding="utf-8") if file else hf_offload.demo_text("documentation")
        lm, tokenizer = hf_offload.load_demo_model(model, attn_implementation="hybrid_sparse")
        ids = tokenizer(text, return_tensors="pt").input_ids[:, :tokens]
    cache = hf_offload.HybridCache(lm, "scout", budget=512, progress=True)
    name = "cache" if "cache" in inspect.signature(lm.forward).parameters else "past_key_values"  # by version
    lm.generate(ids.to(lm.device), **{name: cache}, max_new_tokens=32, do_sample=False)
    stats = cache.stats().as_dict()
    states = sum(
        part.nbytes
        for index in stats["stock_layers"]
        for value in vars(cache.layers[index]).values()
        for part in (value.values() if isinstance(value, dict) else (value,))
        if isinstance(part, torch.Tensor)
    )
    held = [row["layer"] for row in stats["layers"]]
    print(f"{cache.get_seq_length():,} tokens; layers with full attention: {held}, which the cache holds")
    print(f"their keys and values: {stats['host_bytes'] / 2**20:.2f} MiB, which grow with the text")
    print(f"states of the {len(stats['stock_layers'])} other layers: {states / 2**20:.2f} MiB, which do not")


if __name__ == "__main__":
    typer.run(main)
