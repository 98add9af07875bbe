"""Where does attention weight lie, and how are scores distributed, for a model and a text of your own?

    python eval/attention_stats.py
    python eval/attention_stats.py --tokens 2048 --kinds prose --prose novel.txt

The weights are the model's own: a text is read with sdpa, in chunks, and the queries that are looked at one by one with
eager attention, which tells its weights. No more rows than these are kept. Layers are an entry, a middle and an exit
layer, of those that attend all tokens.

- windows (HGCA, Figure 3): the share of the weight that a window of first and one of newest entries hold together, for
  each layer, averaged over heads and the first text's last queries.
- heads (HGCA, Figure 4): the share of entries that hold 0.99 of a head's weight, the heaviest first, in the middle
  layer of each text, averaged over its last queries.
- positions (HGCA, Figure 5): the weights of one head of the middle layer over the positions, at three quarters of the
  first text and at its end, and a line above which are the heaviest that hold 0.9 at the end.
- scores (Fluxion, Figure 11): how near to normal the scores of the entries are that lie neither among the first 64 nor
  among the newest 256, for each head of the layers: skewness, excess kurtosis, the correlation of their quantiles with
  those of a normal distribution, and by how much log n + mean + variance / 2, which Fluxion's features take for their
  log-sum-exp, misses it; medians over the text's last queries.

OUT.csv has the windows; the others go beside it: OUT_heads.csv, OUT_positions.csv with a picture, OUT_scores.csv.
"""

from __future__ import annotations

import math
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from scipy import stats
from tqdm.auto import tqdm
from transformers import DynamicCache, PreTrainedModel

import common
from plotting import plot
from records import show

START = 2000  # token of each text to begin with
QUERIES = 32  # the last ones of a text, to average over
HOLDS = 0.99  # of a head's weight, Figure 4
HEAD, LINE = 6, 0.9  # of Figure 5: the head, or the last one if there are fewer; what is held of its weight
LEAST = 2.0**-149  # float32 above 0
SINKS, LOCAL = 64, 256  # entries that are left out at both ends, Figure 11


def record(model: PreTrainedModel, ids: torch.Tensor, positions: list[int], layers: list[int]) -> list[torch.Tensor]:
    """Weights of the queries at some positions of a text `[1, N]`: `[layers, Hq, position + 1]` a query."""
    found, cache, read = [], DynamicCache(config=model.config), 0
    for position in positions:
        if position > read:
            model.set_attn_implementation("sdpa")
            common.prefill(model, cache, ids[:, read:position], chunk=512)
        model.set_attn_implementation("eager")
        query, read = ids[:, position : position + 1], position + 1
        weights = model(query, past_key_values=cache, output_attentions=True).attentions
        found.append(torch.stack([weights[layer][0, :, 0].float().cpu() for layer in layers]))
    return found


def window_sums(weights: list[torch.Tensor], edges: list[int]) -> np.ndarray:
    """The weight that the first `s` and the newest `r` entries hold together, for all pairs of edges `[s, r]`: means of
    some queries' weights `[Hq, entries]` over queries and heads. An entry in both windows counts once.
    """
    sums = np.zeros((len(edges), len(edges)))
    for rows in weights:
        running = np.concatenate([[0.0], rows.double().mean(0).cumsum(0).numpy()])
        first = np.minimum(edges, rows.shape[1])
        newest = np.maximum(rows.shape[1] - np.array(edges), first[:, None])
        sums += running[first][:, None] + running[-1] - running[newest]
    return sums / len(weights)


def needed_share(weights: torch.Tensor, holds: float) -> torch.Tensor:
    """The least share of entries that holds so much of the weight, for each row of `[…, entries]`."""
    running = weights.double().sort(-1, descending=True).values.cumsum(-1)
    return ((running < holds * running[..., -1:]).sum(-1) + 1) / weights.shape[-1]


def shape_of(weights: torch.Tensor) -> dict[str, np.ndarray]:
    """How near to normal the scores behind softmax weights `[…, entries]` are; float64 `[…]` each.

    A score is known from its weight but for a constant, on which none of these depends. A weight that is 0 in float32
    counts as the least that is not.
    """
    scores = weights.double().clamp(min=LEAST).log().numpy()
    count = scores.shape[-1]
    normal = stats.norm.ppf((np.arange(count) + 0.5) / count)
    z = np.sort(stats.zscore(scores, axis=-1), -1)
    moments = math.log(count) + scores.mean(-1) + scores.var(-1) / 2
    return {
        "skewness": stats.skew(scores, axis=-1),
        "excess_kurtosis": stats.kurtosis(scores, axis=-1),
        "quantile_correlation": (z * normal).mean(-1) / np.sqrt(np.square(normal).mean()),
        "lse_gap": moments - np.logaddexp.reduce(scores, -1),
    }


def draw_positions(rows: list[torch.Tensor], line: float, layer: int, head: int, path: Path) -> None:
    """Draw Figure 5: the weights of two queries over the positions, and the line of the later one."""
    with plot(path, figsize=(10, 4.5)) as axes:
        for weights, color in zip(rows[::-1], ("tab:gray", "tab:orange"), strict=True):
            axes.plot(weights, ".", markersize=2.5, color=color, label=f"as query {len(weights) - 1} sees it")
        above = f"those above hold {LINE:.0%} for query {len(rows[-1]) - 1}"
        axes.axhline(line, color="red", linewidth=1, label=above)
        axes.set(yscale="log", ylim=(1e-8, 2), xlabel="position", ylabel=f"weight, layer {layer}, head {head}")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, markerscale=4, frameon=False)


def main(
    tokens: Annotated[int, typer.Option(min=4 * QUERIES, help="Tokens of each text.")] = 4096,
    kinds: common.KindsOption = "prose,code",
    *,
    setting: common.TextSetting = common.EXACT_TEXT,
) -> None:
    """Show where attention weight lies."""
    names = common.kinds_of(kinds)
    model, tokenizer = setting.load()
    config = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    whole = [number for number, kind in enumerate(types) if kind == "full_attention"]  # the others' weights end
    middle, head = whole[len(whole) // 2], min(HEAD, config.num_attention_heads - 1)
    layers = sorted({whole[0], middle, whole[-1]})
    at, positions = layers.index(middle), [tokens * 3 // 4 - 1, *range(tokens - QUERIES, tokens)]
    edges = [0, *(2**power for power in range(tokens.bit_length()) if 2**power < tokens), tokens]
    far = slice(min(SINKS, tokens // 8), tokens - QUERIES - min(LOCAL, tokens // 8))
    windows, by_head, by_position, scores = [], [], [], []
    for name in tqdm(names, desc="texts"):
        ids = setting.window(tokenizer, name, START, tokens).to(model.device)
        with torch.inference_mode():
            early, *last = record(model, ids, positions, layers)
        share = torch.stack([needed_share(rows[at], HOLDS) for rows in last]).mean(0)
        facts = {"text": name, "layer": middle, "holds": HOLDS}
        by_head += [facts | {"head": number, "share": value} for number, value in enumerate(share.tolist())]
        each = [shape_of(rows[..., far]) for rows in last]
        told = {k: np.quantile([shape[k] for shape in each], 0.5, 0, method="lower") for k in each[0]}
        for place in np.ndindex(len(layers), len(share)):
            facts = {"text": name, "layer": layers[place[0]], "head": place[1]}
            scores.append(facts | {k: float(values[place]) for k, values in told.items()})
        if name == names[0]:
            for number, layer in enumerate(layers):
                sums = window_sums([rows[number] for rows in last], edges)
                for (i, j), weight in np.ndenumerate(sums):
                    windows.append({"layer": layer, "first": edges[i], "newest": edges[j], "weight": float(weight)})
            before, late = early[at, head], last[-1][at, head]
            line = float(late.sort(descending=True).values[round(float(needed_share(late, LINE)) * tokens) - 1])
            draw_positions([before, late], line, middle, head, setting.beside("_positions.png"))
            facts = {"layer": middle, "head": head, "hold": LINE}
            for place, (weight, other) in enumerate(zip_longest(late.tolist(), before.tolist())):
                above = int(weight >= line)
                by_position.append(
                    facts | {"position": place, "weight": weight, "above_line": above, "weight_before": other}
                )
    for part, lines in {"": windows, "_heads": by_head, "_positions": by_position, "_scores": scores}.items():
        setting.write(lines, part)
    show(f"entries that hold {HOLDS} of a head's weight", by_head)


if __name__ == "__main__":
    common.command(main)()
