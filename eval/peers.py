"""How fast are prefill and decoding beside the alternatives, with the same weights, prompt and threads, in turns?

    python eval/peers.py
    python eval/peers.py --contexts 2k,8k --ways hf_offload,DynamicCache --model Qwen/Qwen3-0.6B --dtype bfloat16

The ways are `hf_offload` (policy scout; on a CPU with `fast_linear` and with stock layers), and with stock layers and
sdpa Transformers' `DynamicCache` and `StaticCache`, on a GPU also `DynamicCache(offloading=True)`; and llama.cpp where
its Python package is installed. This builds it for the instruction set of this machine (some minutes):

    CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36

Each way lives in a process of its own, so that its peak memory is its own; only one of them works at a time. For each
context every way first reads the prompt in one forward, as `generate()` does; then the ways take turns in decoding the
tokens that follow in the text. KL compares each step's logits with DynamicCache's. llama.cpp reads the same weights
from a GGUF file in bfloat16 that is written for it, unless `--gguf` names another.
"""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import typer
from tqdm.auto import tqdm
from transformers import AutoTokenizer, DynamicCache, StaticCache

import common
import hf_offload
from hf_offload.tools.assets import find_smollm2, source_of
from hf_offload.tools.measuring import divergence
from plotting import plot

OURS, STOCK, DYNAMIC, STATIC = "hf_offload", "hf_offload with stock layers", "DynamicCache", "StaticCache"
OFFLOADING, LLAMA = "offloading", "llama.cpp"
WARM_UP = 2
LLAMA_BATCH = 1024
_serving: Any = None
_before = 0
"""In the process of a way: what serves, and the bytes of memory before it was made."""


class WithTransformers:
    """A model of Transformers with one kind of cache."""

    def __init__(self, way: str, setting: common.Setting, gguf: str | None, budget: int | None) -> None:
        self.way, self.knobs = way, {} if budget is None else {"budget": budget}
        self.model, _ = setting.load()
        self.model.set_attn_implementation("hybrid_sparse" if way in (OURS, STOCK) else "sdpa")
        if way == OURS and self.model.device.type == "cpu":
            hf_offload.fast_linear(self.model)
        self.cache: Any = None

    def prefill(self, ids: np.ndarray, room: int) -> float:
        """Read a prompt `[N]` into a new cache with room for more tokens; returns seconds."""
        del self.cache
        gc.collect()
        prompt, config = torch.from_numpy(ids)[None].to(self.model.device), self.model.config
        with torch.inference_mode(), common.clock() as seconds:
            if self.way in (OURS, STOCK):
                self.cache = hf_offload.HybridCache(self.model, "scout", **self.knobs)
            elif self.way == STATIC:
                self.cache = StaticCache(config=config, max_cache_len=len(ids) + room)
            else:
                self.cache = DynamicCache(config=config, offloading=self.way == OFFLOADING)
            self.model(prompt, past_key_values=self.cache, logits_to_keep=1)
        return seconds[0]

    def decode(self, tokens: Sequence[int]) -> tuple[list[float], np.ndarray]:
        """Decode given tokens one by one; returns milliseconds and logits `[N, V]`."""
        with torch.inference_mode():
            ids = torch.tensor([list(tokens)], device=self.model.device)
            times, logits = common.decode(self.model, self.cache, ids)
        return times, logits[:, 0].float().cpu().numpy()


class WithLlama:
    """llama.cpp with flash attention."""

    def __init__(self, way: str, setting: common.Setting, gguf: str | None, budget: int | None) -> None:
        self.file, self.threads = gguf, setting.threads or torch.get_num_threads()
        self.llama: Any = None

    def prefill(self, ids: np.ndarray, room: int) -> float:
        """Read a prompt `[N]` into a new context with room for more tokens; returns seconds."""
        from llama_cpp import Llama

        if self.llama is not None:
            self.llama.close()
        self.llama = Llama(
            self.file, n_ctx=len(ids) + room, n_batch=LLAMA_BATCH, n_ubatch=LLAMA_BATCH, n_threads=self.threads,
            n_threads_batch=self.threads, flash_attn=True, n_gpu_layers=-1 if torch.cuda.is_available() else 0,
            verbose=False,
        )  # fmt: skip
        with common.clock() as seconds:
            self.llama.eval(ids.tolist())
        return seconds[0]

    def decode(self, tokens: Sequence[int]) -> tuple[list[float], np.ndarray]:
        """Decode given tokens one by one; returns milliseconds and logits `[N, V]`."""
        from llama_cpp import llama_get_logits

        seconds: list[float] = []
        logits = []
        for token in tokens:
            with common.clock(seconds):
                self.llama.eval([token])
                found = np.ctypeslib.as_array(llama_get_logits(self.llama.ctx), (self.llama.n_vocab(),))
            logits.append(found.copy())
        return [1000 * each for each in seconds], np.stack(logits)


def begin(way: str, *how: Any) -> None:
    """Make this process that of one way."""
    global _serving, _before
    _before = common.resident_bytes()
    _serving = (WithLlama if way == LLAMA else WithTransformers)(way, *how)


def serve(method: str, *arguments: Any) -> tuple[Any, int]:
    """The result of a method of this process's way, and the bytes of memory at the peak since the last prefill."""
    if method == "prefill":
        common.forget_peak()
    return getattr(_serving, method)(*arguments), common.peak_bytes() - _before


class Process:
    """A way in a process of its own."""

    def __init__(self, way: str, *how: Any) -> None:
        self.way, self.peak = way, 0
        self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self.pool.submit(begin, way, *how).result()

    def call(self, method: str, *arguments: Any) -> Any:
        """Let the way run a method; returns its result."""
        result, self.peak = self.pool.submit(serve, method, *arguments).result()
        return result


def write_bfloat16(source: Path, target: Path) -> None:
    """Write a GGUF file anew with its matrices in bfloat16, the type in which Transformers computes with them."""
    import gguf

    reader = gguf.GGUFReader(source)
    field = reader.fields["general.architecture"]
    writer = gguf.GGUFWriter(target, bytes(field.parts[field.data[0]]).decode())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        item = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, item)
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_BF16))
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = gguf.GGMLQuantizationType.BF16 if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Draw milliseconds a token and seconds to the first token over the context length."""
    plt.rcParams["svg.hashsalt"] = "peers"
    contexts = sorted({record["context"] for record in records})
    styles = {OURS: ("#d1495b", "o", 2.6), STOCK: ("#e8a0a8", "o", 1.4), DYNAMIC: ("#33658a", "s", 1.4)}
    styles |= {STATIC: ("#86bbd8", "^", 1.4), OFFLOADING: ("#758e4f", "v", 1.4), LLAMA: ("#5a5a5a", "D", 1.4)}
    titles = {"p50": "ms a token", "prefill_s": "seconds to the first token"}
    with plot(path, 1, 2, figsize=(9, 3.4)) as panels:
        for axes, (column, title) in zip(panels, titles.items(), strict=True):
            for way in dict.fromkeys(record["way"] for record in records):
                color, marker, width = styles[way]
                mine = [record for record in records if record["way"] == way]
                points = [record["context"] for record in mine], [record[column] for record in mine]
                axes.plot(*points, label=way, marker=marker, color=color, lw=width, ms=5)
            axes.set(xscale="log", yscale="log", xlabel="context, tokens", title=title)
            axes.set_xticks(contexts, [f"{n / 1024:g}k" if n >= 1024 else f"{n:g}" for n in contexts], minor=False)
            axes.set_xticks([], minor=True)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].legend(frameon=False, fontsize=9)


def available(model: str | None, gguf: Path | None) -> list[str]:
    """The ways that this machine and these weights allow."""
    ways = [OURS, OFFLOADING] if torch.cuda.is_available() else [OURS, STOCK]
    ways += [DYNAMIC, STATIC]
    if importlib.util.find_spec("llama_cpp") and (model is None or gguf is not None):
        ways.append(LLAMA)
    return ways


def measure(processes: list[Process], ids: np.ndarray, length: int, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Let every way read the first `length` tokens and then decode what follows, in turns; returns a row a way."""
    each, found = WARM_UP + steps, []
    for process in tqdm(processes, desc=f"prompts of {length:,} tokens", leave=False):
        seconds = process.call("prefill", ids[:length], rounds * each)
        found.append({"way": process.way, "context": length, "prefill_s": seconds})
    times: dict[str, list[float]] = {process.way: [] for process in processes}
    logits: dict[str, list[np.ndarray]] = {process.way: [] for process in processes}
    for turn, process in common.in_turns(processes, rounds):
        part = ids[length + turn * each : length + (turn + 1) * each]
        milliseconds, values = process.call("decode", part.tolist())
        times[process.way] += milliseconds[WARM_UP:]
        logits[process.way].append(values)
    logprobs = {way: torch.from_numpy(np.concatenate(x)).double().log_softmax(-1) for way, x in logits.items()}
    for row, process in zip(found, processes, strict=True):
        kl = divergence(logprobs[process.way], logprobs[DYNAMIC])[0].mean() if DYNAMIC in logprobs else None
        row |= common.percentiles(times[process.way]) | {"peak_mib": process.peak / 2**20}
        row["kl"] = None if kl is None else float(kl)
    return found


def main(
    contexts: common.ContextsOption = "128,2k,8k,32k",
    ways: Annotated[str | None, typer.Option(help="By name, comma-separated [all that are available].")] = None,
    budget: Annotated[int | None, typer.Option(min=1, help="Tokens that scout attends [its own samples].")] = None,
    steps: common.StepsOption = 16,
    rounds: common.RoundsOption = 4,
    gguf: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Weights for llama.cpp.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Where the plot goes [default: none].")] = None,
    *,
    setting: common.Setting,
) -> None:
    """Measure prefill and decoding beside Transformers' own caches and llama.cpp."""
    known = available(setting.model, gguf)
    chosen = known if ways is None else [way.strip() for way in ways.split(",")]
    if not set(chosen) <= set(known):
        raise typer.BadParameter(f"--ways {ways}: this machine and model allow {', '.join(known)}")
    lengths = sorted(common.numbers(contexts))
    policy = "scout" if budget is None else f"scout:budget={budget}"
    with tempfile.TemporaryDirectory() as folder:
        if gguf is None and LLAMA in chosen:
            gguf = Path(folder) / "bfloat16.gguf"
            write_bfloat16(find_smollm2(), gguf)
        tokens = lengths[-1] + rounds * (WARM_UP + steps)
        ids = common.window(hf_offload.demo_text("code"), tokenizer_of(setting.model), 0, tokens)[0].numpy()
        records: list[dict[str, Any]] = []
        processes = [Process(way, setting, gguf and str(gguf), budget) for way in tqdm(chosen, desc="loading")]
        # Kernels are compiled when they first run; a context beyond the budget needs all of them.
        measure(processes, ids, min((budget or 1024) + 512, lengths[-1]), rounds, steps)
        for length in lengths:
            found = measure(processes, ids, length, rounds, steps)
            records += [row | {"policy": policy, "steps": steps * rounds} for row in found]
            setting.write(records)
        for process in processes:
            process.pool.shutdown()
    if picture is not None:
        draw(records, picture)
    columns = ("way", "context", "prefill_s", "p20", "p50", "p80", "peak_mib", "kl")
    common.show("prefill in seconds, decoding in ms a token, KL to DynamicCache", records, columns)


def tokenizer_of(model: str | None) -> Any:
    """The model's tokenizer alone."""
    source, packed = source_of(model)
    return AutoTokenizer.from_pretrained(source, **packed)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    common.command(main)()
