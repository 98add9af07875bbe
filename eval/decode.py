"""How long does a token take, at which context, and how steadily? Beside Transformers' own caches, in one run.

    python eval/decode.py
    python eval/decode.py --contexts 2k,8k --rows dynamic,scout-2048 --threads 2
    python eval/decode.py --contexts 4000 --rows dynamic,hgca-1024 --steps 48 --rounds 80 --kind prose --threads 1

Each row's cache is filled once per context. Transformers' own caches are filled with random keys and values, on whose
content their speed does not depend; a sparse cache reads a real text, in chunks, so that its choice of blocks is a real
one (beyond the model's trained context the text has lost its order, not its size). Then the rows take turns for some
rounds over the tokens that follow: two steps of warm-up, then the steps that count. With many rounds it is a long
generation: `p99_p50` says how steady a row is (HGCA, Figure 15).
"""

from __future__ import annotations

import gc
from collections import defaultdict
from typing import Annotated, Any

import torch
import typer
from transformers import Cache, PreTrainedModel

import common
import hf_offload
from records import show

WARM_UP = 2
ROW_OFFSET = 997  # tokens from where one row of a batch begins in the text to where the next does


def fill(model: PreTrainedModel, row: common.Row, ids: torch.Tensor, room: int) -> Cache:
    """Make a row's cache and fill it with the contexts `[B, N]`; there is room for so many tokens in all."""
    cache = row.make_cache(model, room)
    if row.policy not in common.STOCK:
        common.prefill(model, cache, ids, chunk=2048)
        return cache
    # One real token first tells the shapes (and lets the layers make their buffers).
    model(ids[:, :1], past_key_values=cache)
    for index, layer in enumerate(cache.layers):
        shape = (ids.shape[0], layer.keys.shape[1], ids.shape[1] - 1, layer.keys.shape[3])
        cache.update(*(torch.randn(shape, dtype=model.dtype, device=model.device) for _ in range(2)), index)
    return cache


def main(
    contexts: common.ContextsOption = "128,2k,8k,32k",
    rows: common.RowsOption = ["dynamic,static,scout-1024"],  # noqa: B006
    batch: Annotated[int, typer.Option(min=1, help="Rows that are decoded at once.")] = 1,
    steps: common.StepsOption = 8,
    rounds: common.RoundsOption = 3,
    kind: common.KindOption = "code",
    tier: common.TierOption = None,
    *,
    setting: common.TextSetting,
) -> None:
    """Measure the time per token."""
    lengths, (text,) = sorted(common.numbers(contexts)), common.kinds_of(kind)
    # This predictor needs no training; what a network takes is in eval/context_attention.py.
    knobs = {"predictor": hf_offload.ConstantPredictor(budget0=0.05)} | ({} if tier is None else {"tier": tier})
    known = {name: common.Row(name, name) for name in common.STOCK}
    known["fluxion"] = common.Row("fluxion", "fluxion", knobs)
    chosen = common.rows_of(rows, tier, known=known)
    model, tokenizer = setting.load()
    turn = WARM_UP + steps
    tokens = max(lengths) + rounds * turn
    ids = torch.cat([setting.window(tokenizer, text, ROW_OFFSET * row, tokens) for row in range(batch)])
    ids = ids.to(model.device)
    records: list[dict[str, Any]] = []
    bare: float | None = None  # a step without context to speak of, which no cache can beat
    with torch.inference_mode():
        for length in lengths:
            caches = {row.name: fill(model, row, ids[:, :length], length + rounds * turn) for row in chosen}
            times = defaultdict(list)
            for number, row in common.in_turns(chosen, rounds):
                row.activate(model)
                part = ids[:, length + number * turn :][:, :turn]
                times[row.name] += common.decode(model, caches[row.name], part)[0][WARM_UP:]
            spreads = {name: common.percentiles(each, (20, 50, 80, 99)) for name, each in times.items()}
            base = spreads["dynamic"]["p50"] if "dynamic" in spreads else None
            bare = base if length == lengths[0] else bare
            for name, p in spreads.items():
                records.append(
                    {"context": length, "row": name, **p, "p99_p50": p["p99"] / p["p50"]}
                    | {"speedup": base and base / p["p50"], "beyond_bare": bare and p["p50"] - bare}
                    | {"batch": batch, "steps": steps * rounds, "kind": text, "tier": tier}
                )
            del caches
            gc.collect()
            setting.write(records)
    title = "ms per token; speedup against DynamicCache; ms beyond DynamicCache at the shortest context"
    show(title, records, ("context", "row", "p20", "p50", "p80", "p99", "p99_p50", "speedup", "beyond_bare"))


if __name__ == "__main__":
    common.command(main)()
