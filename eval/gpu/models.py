"""A model of random weights in a real one's shape, and caches that are full without a prompt having been computed."""

from __future__ import annotations

import functools
import gc
import os
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel, Qwen3Config

from common import Row
from gpu.options import Options
from gpu.supervise import NotApplicable
from hf_offload import HybridCache, Scout
from hf_offload.blocks.digests import DIGESTS
from hf_offload.blocks.memory import free_device_memory
from hf_offload.blocks.sealing import seal

PROMPT = 16  # tokens that really go through the model: they tell shapes and give `place` its queries
HOST_SHARE = 0.8  # of the machine's memory
BIG = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151936, "rope_theta": 1e6,
}  # fmt: skip
TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 160,
}  # fmt: skip


def config_of(options: Options) -> Qwen3Config:
    """Qwen3-8B's shape; with `quick` a tiny one."""
    more: dict[str, Any] = {"max_position_embeddings": 1 << 18, "tie_word_embeddings": False}
    return Qwen3Config(num_hidden_layers=options.layers, **more, **(TINY if options.quick else BIG))


@functools.cache
def build(options: Options) -> PreTrainedModel:
    """A model of this shape with random weights, made where it will run; one for a process."""
    torch.manual_seed(0)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(
            config_of(options), dtype=options.dtype, attn_implementation="hybrid_sparse"
        )
    return model.eval()


def random_kv(options: Options, heads: int, dim: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[1, Hkv, tokens, D]` of one layer, in host memory.

    Channels have their own mean and size, a few of them large, and neighbouring tokens are alike, as in real keys.
    """
    generator = torch.Generator(options.device).manual_seed(1)
    topic = 96  # tokens

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=options.device)

    width = normal(heads, 1, dim).abs() + 0.2
    width[:, :, :: dim // 4] *= 4
    topics = normal(heads, -(-tokens // topic), dim).repeat_interleave(topic, 1)[:, :tokens]
    k = (normal(heads, 1, dim) + 0.7 * topics + 0.7 * normal(heads, tokens, dim)) * width
    v = normal(heads, tokens, dim)
    return k[None].to(options.dtype).cpu(), v[None].to(options.dtype).cpu()


def head_dim(config: Any) -> int:
    """Channels of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def kv_bytes(config: Any, tokens: int, itemsize: int) -> int:
    """Bytes of the keys and values of so many tokens in all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim(config) * tokens * itemsize


def check_room(options: Options, model: PreTrainedModel, row: Row, batch: int, tokens: int) -> None:
    """Refuse what is over the cap of KV on the device, or over the host's memory."""
    config, itemsize = model.config, options.dtype.itemsize
    everything = kv_bytes(config, batch * tokens, itemsize)
    near, far = everything, 0
    if row.policy == "dynamic" and row.options.get("offloading"):
        near, far = 2 * everything // config.num_hidden_layers, everything
    elif row.policy != "dynamic":
        near, far = kv_bytes(config, batch * row.options.get("resident", tokens), itemsize), everything
        if isinstance(row.policy, Scout):
            near += digest_bytes(config, batch * tokens, digest=row.policy.digest)
    host, cap = HOST_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), float("inf")
    if options.on_gpu:
        cap = free_device_memory(torch.device("cuda", torch.cuda.current_device())) or 0
    host = host if options.host_gib is None else options.host_gib * 2**30
    cap = cap if options.kv_gib is None else options.kv_gib * 2**30
    for what, need, room in (("device", near, cap), ("host", far, host)):
        if need > room:
            raise NotApplicable(f"does not fit: {need / 2**30:.1f} GiB on the {what}, {room / 2**30:.1f} GiB allowed")


def digest_bytes(config: Any, tokens: int, block: int = 32, digest: str = Scout().digest) -> int:
    """Bytes of the digests that Scout keeps of so many tokens in all layers."""
    store = DIGESTS[digest](config.num_key_value_heads, head_dim(config), block, torch.device("cpu"))
    store.reserve(1)
    return store.nbytes * config.num_hidden_layers * -(-tokens // block)


def fill(
    options: Options, model: PreTrainedModel, row: Row, batch: int, kv: tuple[torch.Tensor, torch.Tensor]
) -> Cache:
    """Make a row's cache and fill it with a prompt and, behind that, with the given K and V in every row and layer."""
    row.activate(model)
    stock = row.policy == "dynamic"
    cache: Any = (
        DynamicCache(config=model.config, **row.options) if stock else HybridCache(model, row.policy, **row.options)
    )
    prompt = torch.randint(model.config.vocab_size, (batch, PROMPT), device=options.device)
    model(input_ids=prompt, past_key_values=cache, logits_to_keep=1)
    k, v = (part.expand(batch, -1, -1, -1) for part in kv)
    total = PROMPT + k.shape[2]
    if not stock:
        cache.settings.padding.observe(None, batch, total)  # before blocks are sealed: digests leave out padding
    for index, layer in enumerate(cache.layers):
        if stock:
            cache.update(k.to(options.device), v.to(options.device), index)
        else:
            store, room = layer.store, total + 4 * layer.store.block_size  # for the steps, too
            store.reserve(room)  # a pool that is short of a block later grows by a quarter
            store.append(k, v)
            seal(store, 4 * cache.settings.prefill_tile)
    options.synchronize()
    assert cache.get_seq_length() == total
    return cache


def free(options: Options) -> None:
    """Give memory back, on the device and pinned memory too."""
    gc.collect()
    if options.on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def free_pinned(options: Options) -> None:
    """Give back pinned memory that no cache holds: torch keeps it for tensors of the same size."""
    empty = getattr(torch._C, "_host_emptyCache", None)
    if options.on_gpu and empty is not None:
        empty()
