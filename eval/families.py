"""Is every causal language model type of the installed Transformers, tiny and random, as under eager attention?

    python eval/families.py                          # all types, about a quarter of an hour on two idle cores
    python eval/families.py --types llama,deepseek_v3

Each type gets a random model of four small layers, of all the kinds that the type mixes. Logits of a left-padded
prompt, of a further chunk and of single tokens, and the tokens of greedy and beam search, are compared with those of
the same weights under eager attention and Transformers' own cache. A type runs in a process of its own with a time
limit. Results go to the CSV as they come; a walk that was interrupted goes on where it stopped. `docs/models.md` is
made of them by `eval/figures.py`.
"""

from __future__ import annotations

import inspect
import itertools
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import transformers
import typer
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel

import common
import figures
import hf_offload
from hf_offload.blocks import digests
from hf_offload.cache.layer import HybridLayer
from records import environment, write_csv
from tiny_configs import causal_types, multimodal_types, tiny_config

# Makes a process for each type, forked from one that has imported this script.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["families"])
SECONDS = 300
"""How long a type may take."""
PROMPT, CHUNK, STEPS, ROWS = 41, 13, 6, 3
TOKENS = PROMPT + CHUNK + STEPS
MASK = (torch.arange(TOKENS) >= 9 * torch.arange(ROWS)[:, None]).long()
IDS = MASK * torch.randint(3, 150, (ROWS, TOKENS), generator=torch.Generator().manual_seed(2))
"""Token ids and their mask `[B, TOKENS]`, the later rows padded on the left."""
TOLERANCE = 1e-4
"""Of logits, relative to the largest: fp32, deep random models."""

SMALL: dict[str, Any] = {"block_size": 8, "prefill_tile": 16}
SPLIT = {"tier": "split", "resident": 32}
SCOUT = {"budget": 512, "sinks": 8, "recent": 0, "synchronous_layers": (0,)}
CACHES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "full, split": ("full", SPLIT),
    "scout": ("scout", SCOUT),
    "scout, split": ("scout", SCOUT | SPLIT | {"lookahead": "select"}),
}
SEARCHES: dict[str, dict[str, Any]] = {"greedy": {}, "beam": {"num_beams": 3}}


def build(model_type: str, attention: str) -> PreTrainedModel:
    """A model of a type with random weights, the same ones for each attention."""
    kind = getattr(transformers, (causal_types() | multimodal_types())[model_type])
    config = tiny_config(model_type)
    text = config.get_text_config(decoder=True)
    if not isinstance(config, kind.config_class) and isinstance(text, kind.config_class):
        config = text
    torch.manual_seed(0)
    model: PreTrainedModel = kind._from_config(config, attn_implementation=attention).eval().float()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            parameter.normal_(0, 0.15, generator=generator)
        else:
            spread = 0.2 if "norm" in name or "ln" in name else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=generator) * spread)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def forward(model: PreTrainedModel, cache: Any, start: int, stop: int) -> torch.Tensor:
    """Logits `[B, stop - start, V]` of some of the tokens, with the positions that left padding gives them."""
    given: dict[str, Any] = {"use_cache": False} if cache is None else {"past_key_values": cache, "use_cache": True}
    if "position_ids" in inspect.signature(model.forward).parameters:
        given["position_ids"] = (MASK[:, :stop].cumsum(-1) - 1).clamp(min=0)[:, start:]
    logits: torch.Tensor = model(input_ids=IDS[:, start:stop], attention_mask=MASK[:, :stop], **given).logits
    return logits.float()


def pieces(model: PreTrainedModel, cache: Any) -> torch.Tensor:
    """Logits of prompt, chunk and single tokens that go through a cache, in one tensor."""
    cuts = [0, PROMPT, *range(PROMPT + CHUNK, TOKENS + 1)]
    return torch.cat([forward(model, cache, start, stop) for start, stop in itertools.pairwise(cuts)], 1)


def run(model: PreTrainedModel, make: Callable[[], Cache]) -> dict[str, torch.Tensor]:
    """Logits of all tokens, and the tokens that each search gives for the prompt, with new caches."""
    given = {"input_ids": IDS[:, :PROMPT], "attention_mask": MASK[:, :PROMPT], "max_new_tokens": STEPS}
    return {"logits": pieces(model, make())} | {
        mode: model.generate(**given, past_key_values=make(), do_sample=False, **knobs)
        for mode, knobs in SEARCHES.items()
    }


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference of logits of tokens that are no padding, relative to the largest of them."""
    got, want = got[MASK.bool()], want[MASK.bool()]
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got - want).abs().max() / want.abs().max().clamp(min=1))


def tell(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@torch.no_grad()
def compare(model_type: str) -> dict[str, Any]:
    """Run one model type with all kinds of caches.

    Returns:
        status: "exact", "exact by stock fallback", "refused", "not run", "wrong" or "error";
        message: what the user is told, or why it was not run;
        model: its class; layers: of the cache; held: those whose blocks HybridCache has;
        error: the largest difference of logits, relative to the largest logit; control: with tokens left out;
        oracle: "eager", whose logits it differs from; details: the differences by cache.
    """
    digests.STATISTICS_TOKENS = 16  # or prompts of so few tokens would be attended whole
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    result: dict[str, Any] = {"model_type": model_type, "status": "not run", "message": "", "model": ""}
    result |= {"layers": 0, "held": 0, "error": None, "control": None, "oracle": "", "details": {}}
    try:
        eager = build(model_type, "eager")
    except Exception as error:
        return result | {"message": tell(error)}
    result["model"] = type(eager).__name__
    try:
        try:
            model = build(model_type, "hybrid_sparse")
        except KeyError as error:
            told = f"Transformers cannot load it with attn_implementation='hybrid_sparse': {tell(error)}"
            raise ValueError(told) from error
        hf_offload.fast_linear(model)
        hf_offload.HybridCache(model, "full")  # no oracle is needed to see that a type is refused
        try:
            wanted = run(eager, partial(DynamicCache, config=eager.config))
            wanted["full forward"] = forward(eager, None, 0, TOKENS)
        except Exception as error:
            return result | {"message": f"with Transformers' own cache: {tell(error)}"}
        return result | compare_ours(model, wanted)
    except Exception as error:  # a ValueError is what a user is told of a type that is refused
        return result | {"status": "refused" if isinstance(error, ValueError) else "error", "message": tell(error)}


def compare_ours(model: PreTrainedModel, wanted: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What of the result comes from a model under `hybrid_sparse`."""
    details = {"stock": difference(wanted["logits"], wanted["full forward"])}
    told, tokens_differ = [], []
    for name, (policy, knobs) in CACHES.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = run(model, partial(hf_offload.HybridCache, model, policy, **SMALL, **knobs))
        told += [str(w.message) for w in caught if "HybridCache" in str(w.message)]
        details[name] = difference(got["logits"], wanted["logits"])
        tokens_differ += [f"{mode} ({name})" for mode in SEARCHES if not torch.equal(got[mode], wanted[mode])]
    worst = max(details[name] for name in CACHES)
    # A cache that must give other logits; if it does not, the comparison sees nothing.
    narrow = hf_offload.HybridCache(model, "window", budget=24, sinks=8, **SMALL)
    control = difference(pieces(model, narrow), wanted["logits"])
    held = sum(isinstance(layer, HybridLayer) and layer.past > 0 for layer in narrow.layers)
    status, message = "exact" if held else "exact by stock fallback", " ".join(dict.fromkeys(told))
    if worst > TOLERANCE or tokens_differ:
        status = "wrong"
        message = f"logits differ by {worst:.2g}; tokens differ: {', '.join(tokens_differ) or 'none'}"
    elif held and control < 100 * TOLERANCE:
        status, message = "not run", "the tiny model hardly sees its context"
    found = {"status": status, "message": message, "layers": len(narrow.layers), "held": held}
    return found | {"error": worst, "control": control if held else None, "oracle": "eager", "details": details}


def ask(model_type: str) -> dict[str, Any]:
    """What `compare` gives; of a process that gives nothing, type, status and message alone."""
    with ProcessPoolExecutor(1, FORKS, initializer=signal.alarm, initargs=[SECONDS]) as pool:
        try:
            return pool.submit(compare, model_type).result()
        except BrokenProcessPool:
            return {"model_type": model_type, "status": "error", "message": f"no result within {SECONDS} s, or killed"}


def main(
    types: Annotated[str | None, typer.Option(help="Comma-separated; all by default.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Types that are compared at once.")] = 2,
    out: common.OutOption = common.OUT,
    markdown: Annotated[Path | None, typer.Option(help="Where docs/models.md goes, made of families.csv.")] = None,
) -> None:
    """Compare every model type with eager attention."""
    if markdown and out.name != "families.csv":
        raise typer.BadParameter("--markdown reads families.csv: give an --out of that name")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # or the process that is forked would not find this script
    known = [*causal_types(), *multimodal_types()]
    here, rows = environment(), {}
    if out.exists():  # of an earlier walk
        earlier = pd.read_csv(out, dtype=str, keep_default_na=False).to_dict("records")
        rows = {row["model_type"]: row for row in earlier if row["transformers"] == here["transformers"]}
    done = [name for name, row in rows.items() if row["commit"] == here["commit"]]
    todo = common.listed(types, known, "types") if types else [name for name in known if name not in done]
    with ThreadPoolExecutor(jobs) as threads:
        for asked in tqdm(as_completed([threads.submit(ask, name) for name in todo]), total=len(todo)):
            row = asked.result()
            rows[row["model_type"]] = {**row, **here}
            write_csv(out, [rows[key] for key in sorted(rows)])
    frame = pd.DataFrame(rows.values())
    bad = frame[frame.status.isin(["wrong", "error"])]
    print(frame.status.value_counts().to_string())
    print(bad[["model_type", "status", "message"]].to_string(index=False) if len(bad) else "none is wrong")
    if markdown:
        figures.RESULTS = out.parent
        page = (Path(__file__).parent.parent / "docs" / "models.md").read_text(encoding="utf-8")
        markdown.write_text(figures.write(page), encoding="utf-8")
    raise typer.Exit(1 if len(bad) else 0)


if __name__ == "__main__":
    common.command(main)()
