"""How fast are prefill and decoding beside the alternatives, with the same weights, prompt and threads, in turns?

    python eval/peers.py
    python eval/peers.py --contexts 2k,8k --ways hf_offload,DynamicCache --model Qwen/Qwen3-0.6B --dtype bfloat16

The ways are `hf_offload` (on a CPU with `fast_linear` and with stock layers), and with stock layers and sdpa
Transformers' `DynamicCache` and `StaticCache`; and llama.cpp where its Python package is installed. This builds it for
the instruction set of this machine (some minutes):

    CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36

Each way lives in a process of its own, so that its peak memory is its own; only one of them works at a time. For each
context every way first reads the prompt in one forward, as `generate()` does; then the ways take turns in decoding the
tokens that follow in the text. KL compares each step's logits with DynamicCache's. llama.cpp reads the same weights
from a GGUF file in bfloat16 that it writes for itself, unless `--gguf` names another.
"""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import tempfile
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import typer
from tqdm.auto import tqdm
from transformers import AutoTokenizer, DynamicCache, StaticCache

import common
import hf_offload
from hf_offload.tools.assets import find_smollm2, source_of
from hf_offload.tools.measuring import divergence
from hf_offload.tools.plan import parse_setting
from plotting import plot
from records import show

OURS, STOCK, DYNAMIC, STATIC = "hf_offload", "hf_offload with stock layers", "DynamicCache", "StaticCache"
LLAMA = "llama.cpp"
STYLES: dict[Any, dict[str, Any]] = {
    OURS: {"color": "#d1495b", "marker": "o", "lw": 2.6},
    STOCK: {"color": "#e8a0a8", "marker": "o"},
    DYNAMIC: {"color": "#33658a", "marker": "s"},
    STATIC: {"color": "#86bbd8", "marker": "^"},
    LLAMA: {"color": "#5a5a5a", "marker": "D"},
}
WARM_UP = 2
COMPILED = 1536  # tokens of a context that needs all kernels
LLAMA_BATCH = 1024


class Way:
    """One way, in a process of its own.

    Each kind loads weights (`load`), makes a cache with room for so many tokens (`make_cache`), and computes tokens
    `[N]` (`run`), which returns the last one's logits `[V]`.
    """

    def __init__(self, *how: Any) -> None:
        self.before = common.resident_bytes()
        self.load(*how)

    def prefill(self, ids: np.ndarray, room: int) -> float:
        """Read a prompt `[N]` into a new cache with room for more tokens; returns seconds."""
        common.forget_peak()
        self.make_cache(len(ids) + room)
        with common.clock() as seconds:
            self.run(ids)
        return seconds[0]

    def decode(self, ids: np.ndarray) -> tuple[list[float], np.ndarray, int]:
        """Decode tokens `[N]` one by one: milliseconds, logits `[N, V]`, and the peak of bytes since the prefill."""
        seconds: list[float] = []
        logits = []
        for token in ids:
            with common.clock(seconds):
                found = self.run(token[None])
            logits.append(found.float().cpu().numpy().copy())
        return [1000 * each for each in seconds], np.stack(logits), common.peak_bytes() - self.before


class WithTransformers(Way):
    """A model of Transformers with one kind of cache."""

    def load(self, way: str, setting: common.Setting, gguf: str | None, policy: str) -> None:
        self.way, self.policy = way, policy
        self.model, _ = setting.load()
        self.model.set_attn_implementation("hybrid_sparse" if way in (OURS, STOCK) else "sdpa")
        if way == OURS and self.model.device.type == "cpu":
            hf_offload.fast_linear(self.model)

    def make_cache(self, length: int) -> None:
        self.cache: Any = None
        gc.collect()
        if self.way in (OURS, STOCK):
            policy, knobs = parse_setting(self.policy)
            self.cache = hf_offload.HybridCache(self.model, policy, **knobs)
        elif self.way == STATIC:
            self.cache = StaticCache(config=self.model.config, max_cache_len=length)
        else:
            self.cache = DynamicCache(config=self.model.config)

    @torch.inference_mode()
    def run(self, ids: np.ndarray) -> torch.Tensor:
        tokens = torch.from_numpy(ids)[None].to(self.model.device)
        return self.model(tokens, past_key_values=self.cache, logits_to_keep=1).logits[0, -1]


class WithLlama(Way):
    """llama.cpp with flash attention."""

    def load(self, way: str, setting: common.Setting, gguf: str | None, policy: str) -> None:
        self.file, self.threads = gguf, setting.threads or torch.get_num_threads()
        self.llama: Any = None

    def make_cache(self, length: int) -> None:
        import llama_cpp

        if self.llama is not None:
            self.llama.close()
        self.llama = llama_cpp.Llama(
            self.file, n_ctx=length, n_batch=LLAMA_BATCH, n_ubatch=LLAMA_BATCH, n_threads=self.threads,
            n_threads_batch=self.threads, flash_attn=True, n_gpu_layers=-1 if torch.cuda.is_available() else 0,
            verbose=False,
        )  # fmt: skip
        self.logits_of = llama_cpp.llama_get_logits

    def run(self, ids: np.ndarray) -> torch.Tensor:
        self.llama.eval(ids.tolist())
        return torch.from_numpy(np.ctypeslib.as_array(self.logits_of(self.llama.ctx), (self.llama.n_vocab(),)))


def begin(way: str, *how: Any) -> None:
    """Make this process that of one way."""
    global _way
    _way = (WithLlama if way == LLAMA else WithTransformers)(way, *how)


def ask(method: str, *arguments: Any) -> Any:
    """The result of a method of this process's way."""
    return getattr(_way, method)(*arguments)


def write_bfloat16(source: Path, target: Path) -> None:
    """Let llama.cpp write a GGUF file anew with its matrices in bfloat16, in which Transformers computes with them."""
    import llama_cpp

    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype, how.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_BF16, True
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), how):
        raise RuntimeError(f"llama.cpp cannot write {source} in bfloat16")


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Draw milliseconds a token and seconds to the first token over the context length."""
    plt.rcParams["svg.hashsalt"] = "peers"
    frame = pd.DataFrame(records)
    contexts = frame.context.unique()
    titles = {"p50": "ms a token", "prefill_s": "seconds to the first token"}
    with plot(path, 1, 2, figsize=(9, 3.4)) as panels:
        for axes, (column, title) in zip(panels, titles.items(), strict=True):
            for way, mine in frame.groupby("way", sort=False):
                axes.plot(mine.context, mine[column], label=way, ms=5, **{"lw": 1.4} | STYLES[way])
            axes.set(xscale="log", yscale="log", xlabel="context, tokens", title=title)
            axes.set_xticks(contexts, [f"{n / 1024:g}k" if n >= 1024 else f"{n:g}" for n in contexts], minor=False)
            axes.set_xticks([], minor=True)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].legend(frameon=False, fontsize=9)


def measure(
    processes: dict[str, ProcessPoolExecutor], ids: np.ndarray, length: int, rounds: int, steps: int
) -> list[dict[str, Any]]:
    """Let every way read the first `length` tokens and then decode what follows, in turns; returns a row a way."""
    turn, seconds = WARM_UP + steps, {}
    for way in tqdm(processes, desc=f"prompts of {length:,} tokens", leave=False):
        seconds[way] = processes[way].submit(ask, "prefill", ids[:length], rounds * turn).result()
    times, logits, peaks = defaultdict(list), defaultdict(list), {}
    for number, way in common.in_turns(list(processes), rounds):
        part = ids[length + number * turn :][:turn]
        milliseconds, values, peaks[way] = processes[way].submit(ask, "decode", part).result()
        times[way] += milliseconds[WARM_UP:]
        logits[way].append(values)
    logprobs = {way: torch.from_numpy(np.concatenate(x)).double().log_softmax(-1) for way, x in logits.items()}
    records: list[dict[str, Any]] = []
    for way in processes:
        kl = divergence(logprobs[way], logprobs[DYNAMIC])[0].mean().item() if DYNAMIC in processes else None
        told = {"way": way, "context": length, "prefill_s": seconds[way], **common.percentiles(times[way])}
        records.append(told | {"peak_mib": peaks[way] / 2**20, "kl": kl})
    return records


def main(
    contexts: common.ContextsOption = "128,2k,8k,32k",
    ways: Annotated[str | None, typer.Option(help="By name, comma-separated [all that are available].")] = None,
    policy: Annotated[str, typer.Option(help="hf_offload's, with knobs.")] = "scout",
    steps: common.StepsOption = 16,
    rounds: common.RoundsOption = 4,
    gguf: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Weights for llama.cpp.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Where the plot goes [default: none].")] = None,
    *,
    setting: common.Setting,
) -> None:
    """Measure prefill and decoding beside Transformers' own caches and llama.cpp."""
    known = [OURS, DYNAMIC, STATIC] if torch.cuda.is_available() else [OURS, STOCK, DYNAMIC, STATIC]
    if importlib.util.find_spec("llama_cpp") and (setting.model is None or gguf is not None):
        known.append(LLAMA)
    chosen = known if ways is None else [way.strip() for way in ways.split(",")]
    if not set(chosen) <= set(known):
        raise typer.BadParameter(f"--ways {ways}: this machine and model allow {', '.join(known)}")
    lengths = sorted(common.numbers(contexts))
    with tempfile.TemporaryDirectory() as folder:
        if gguf is None and LLAMA in chosen:
            gguf = Path(folder) / "bfloat16.gguf"
            write_bfloat16(find_smollm2(), gguf)
        tokens = lengths[-1] + rounds * (WARM_UP + steps)
        ids = common.window(hf_offload.demo_text("code"), tokenizer_of(setting.model), 0, tokens)[0].numpy()
        how, spawn = (setting, gguf and str(gguf), policy), multiprocessing.get_context("spawn")
        processes = {way: ProcessPoolExecutor(1, spawn, begin, (way, *how)) for way in chosen}
        measure(processes, ids, min(COMPILED, lengths[-1]), rounds, steps)  # kernels are compiled when they first run
        records: list[dict[str, Any]] = []
        for length in lengths:
            found = measure(processes, ids, length, rounds, steps)
            records += [row | {"policy": policy, "steps": steps * rounds} for row in found]
            setting.write(records)
    if picture is not None:
        draw(records, picture)
    columns = ("way", "context", "prefill_s", "p20", "p50", "p80", "peak_mib", "kl")
    show("prefill in seconds, decoding in ms a token, KL to DynamicCache", records, columns)


def tokenizer_of(model: str | None) -> Any:
    """The model's tokenizer alone."""
    source, packed = source_of(model)
    return AutoTokenizer.from_pretrained(source, **packed)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    common.command(main)()
