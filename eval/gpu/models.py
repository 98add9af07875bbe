"""What the command line says to all parts: a model of random weights in a real one's shape, and caches that are full
without a prompt having been computed."""

from __future__ import annotations

import functools
import gc
import math
from dataclasses import dataclass
from typing import Annotated, Any

import psutil
import torch
import typer
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel, Qwen3Config

from common import Row, synchronize
from gpu.supervise import Stopped
from hf_offload.blocks.memory import free_device_memory
from hf_offload.blocks.sealing import seal
from hf_offload.tools.plan import MEMORY_KNOBS, Shape, memory_of, shape_of

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
_OURS = (FULL, *FREE, *VARIANTS)
ROWS = (*(f"{name}-graph" for name in _OURS), *STOCK, *_OURS)
HOST_GIB = round(0.8 * psutil.virtual_memory().total / 2**30, 1)


@dataclass(frozen=True)
class Options:
    """Options of the check."""

    device: Annotated[str, typer.Option(help='"cuda", or "cpu" to try the script itself.')] = "cuda"
    quick: Annotated[bool, typer.Option(help="Tiny sizes in this process, to see that everything runs.")] = False
    kv_gib: Annotated[float, typer.Option(help="GiB of KV and digests on the device, if so many are free.")] = math.inf
    host_gib: Annotated[float, typer.Option(help="GiB of host memory that a row may take.")] = HOST_GIB
    contexts: Annotated[str, typer.Option(help="Tokens, comma-separated; k is 1,024.")] = "32k,64k"
    batches: Annotated[str, typer.Option(help="Rows decoded at once, comma-separated.")] = "1,8,16"
    rows: Annotated[str, typer.Option(help=f"Of {', '.join(ROWS)}.")] = ",".join(ROWS)
    steps: Annotated[int, typer.Option(min=1, max=48, help="Decode steps that are timed, per row.")] = 32

    @property
    def on_gpu(self) -> bool:
        """Whether there is a GPU to wait for."""
        return self.device.startswith("cuda")

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and KV."""
        return torch.bfloat16 if self.on_gpu else torch.float32


PROMPT = 16  # tokens that really go through the model: they tell shapes and give `place` its queries
BIG = {
    "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rope_theta": 1e6,
}  # fmt: skip
"""Qwen3-8B's."""
TINY = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 160,
}  # fmt: skip


def config_of(options: Options) -> Qwen3Config:
    """Qwen3-8B's shape; with `quick` a tiny one."""
    sizes: dict[str, Any] = TINY if options.quick else BIG
    return Qwen3Config(max_position_embeddings=1 << 18, tie_word_embeddings=False, **sizes)


@functools.cache
def shape(options: Options) -> Shape:
    """Sizes of the model's KV cache."""
    return shape_of(config_of(options), options.dtype)


@functools.cache
def build(options: Options) -> PreTrainedModel:
    """A model of this shape with random weights, made where it will run; one for a process."""
    torch.manual_seed(0)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(
            config_of(options), dtype=options.dtype, attn_implementation="hybrid_sparse"
        )
    return model.eval()


@functools.lru_cache(maxsize=1)  # filled into cache after cache
def random_kv(options: Options, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[1, Hkv, tokens, D]` of one layer, in host memory.

    Channels have their own mean and size, a few of them large, and neighbouring tokens are alike, as in real keys.
    """
    heads, dim, topic = shape(options).kv_heads, shape(options).head_dim, 96  # tokens
    torch.manual_seed(1)
    with torch.device(options.device):
        width = torch.randn(heads, 1, dim).abs() + 0.2
        width[:, :, :: dim // 4] *= 4
        topics = torch.randn(heads, -(-tokens // topic), dim).repeat_interleave(topic, 1)[:, :tokens]
        k = (torch.randn(heads, 1, dim) + 0.7 * topics + 0.7 * torch.randn(heads, tokens, dim)) * width
        v = torch.randn(heads, tokens, dim)
    return k[None].to("cpu", options.dtype), v[None].to("cpu", options.dtype)


def check_memory(options: Options, row: Row, batch: int, tokens: int) -> None:
    """Refuse what is over the cap of KV on the device, or over the host's memory."""
    sizes, free = shape(options), free_device_memory(torch.device(options.device))
    most = min(options.kv_gib * 2**30, math.inf if free is None else free)
    device = host = batch * tokens * sizes.layers * sizes.token_bytes
    if row.policy != "dynamic":
        knobs = {name: row.options[name] for name in MEMORY_KNOBS if name in row.options}
        room = None if most == math.inf else int(most) + sizes.weights  # from which `resident="auto"` takes its part
        needs = memory_of(sizes, row.policy, knobs, context=tokens, batch=batch, device=room)
        device, host = needs.device, needs.host
    elif row.name == "offloading":
        device = 0  # but for a few layers that come and go
    else:
        host = 0
    for memory, need, limit in ("device", device, most), ("host", host, options.host_gib * 2**30):
        if need > limit:
            reason = f"does not fit: {need / 2**30:.1f} GiB on the {memory}, {limit / 2**30:.1f} GiB allowed"
            raise Stopped("not applicable", reason)


def make_cache(model: PreTrainedModel, row: Row) -> Cache:
    """An empty cache of a row, with the attention that goes with it set."""
    if row.policy != "dynamic":
        return row.make_cache(model)
    row.activate(model)
    return DynamicCache(config=model.config, **row.options)


def fill(
    options: Options, model: PreTrainedModel, row: Row, batch: int, kv: tuple[torch.Tensor, torch.Tensor]
) -> Cache:
    """Make a row's cache and fill it with a prompt and, behind that, with the given K and V in every row and layer."""
    cache: Any = make_cache(model, row)
    prompt = torch.randint(model.config.vocab_size, (batch, PROMPT), device=options.device)
    model(input_ids=prompt, past_key_values=cache, logits_to_keep=1)
    k, v = (part.expand(batch, -1, -1, -1) for part in kv)
    total = PROMPT + k.shape[2]
    if row.policy == "dynamic":
        for index in range(len(cache.layers)):
            cache.update(k.to(options.device), v.to(options.device), index)
    else:
        cache.settings.padding.observe(None, batch, total)  # before blocks are sealed: digests leave out padding
        for layer in cache.layers:
            layer.store.reserve(total + 4 * layer.store.block_size)  # one that is short later grows by a quarter
            layer.store.append(k, v)
            seal(layer.store, 4 * cache.settings.prefill_tile)
    synchronize()
    return cache


def free(options: Options) -> None:
    """Give memory back, on the device and pinned memory too."""
    gc.collect()
    if options.on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
