"""Tensor parallelism: one model on several ranks, each of which computes some heads and caches their keys and values.

    torchrun --nproc-per-node 3 examples/tensor_parallel.py
    torchrun --nproc-per-node 2 examples/tensor_parallel.py --model Qwen/Qwen3-8B --dtype bfloat16 --file novel.txt

The number of ranks divides query heads and KV heads. SmolLM2, the default, has three KV heads, hence three ranks.
Every rank runs the same calls on the same inputs, on a GPU of its own or, without GPUs, on the CPU over gloo.
"""

import inspect
import os
import tempfile
from pathlib import Path
from typing import Annotated

import torch.distributed as dist
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import hf_offload


def main(
    model: Annotated[str | None, typer.Option(help="Hub name, folder or GGUF file (SmolLM2 if none).")] = None,
    file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="A text to continue.")] = None,
    tokens: Annotated[int, typer.Option(help="Most tokens of the prompt.")] = 2000,
    answer: Annotated[int, typer.Option(help="Tokens to generate.")] = 32,
    dtype: Annotated[str, typer.Option(help="Weights and activations.")] = "float32",
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if model is None or model.endswith(".gguf"):  # weights in a GGUF file cannot be read in shares
            for part in hf_offload.load_demo_model(model, device="cpu"):
                part.save_pretrained(folder)
            model = folder
        tokenizer = AutoTokenizer.from_pretrained(model)
        lm = AutoModelForCausalLM.from_pretrained(
            model,
            attn_implementation="hybrid_sparse",
            dtype=dtype,
            distributed_config=DistributedConfig(tp_size=int(os.environ["WORLD_SIZE"])),
        )
    text = file.read_text(encoding="utf-8") if file else hf_offload.demo_text("prose")
    inputs = tokenizer(text[: 7 * tokens], truncation=True, max_length=tokens, return_tensors="pt").to(lm.device)
    cache = hf_offload.HybridCache(lm, "scout", budget=512)
    name = "cache" if "cache" in inspect.signature(lm.forward).parameters else "past_key_values"  # by version
    out = lm.generate(**inputs, **{name: cache}, max_new_tokens=answer, do_sample=False)
    mebibytes = cache.stats().as_dict()["host_bytes"] / 2**20
    shares: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(shares, mebibytes)
    if dist.get_rank() == 0:
        for rank, share in enumerate(shares):
            print(f"rank {rank} keeps {share:.1f} MiB of keys and values")
        print(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
