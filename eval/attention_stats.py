"""Where attention weight lies, and how scores are distributed, for a model and texts of your own.

    python eval/attention_stats.py
    python eval/attention_stats.py --layers 0,15,29 --layer 15 --head 4 --tokens 4096 --text novel.txt --text other.txt

The weights are exact: a text runs through the model in chunks, and beside Transformers' sdpa the softmax of the
queries that are looked at is taken over all keys, from the model's own q and k. No more rows than these are kept.

- windows (HGCA, Figure 3): the share of the weight that a window of first and one of newest entries hold together, for
  an entry, a middle and an exit layer, averaged over heads and the text's last queries.
- heads (HGCA, Figure 4): the share of entries that hold 0.99 of a head's weight, the heaviest first, for each text,
  averaged over its last queries.
- positions (HGCA, Figure 5): the weights of one layer and head over the positions, at three quarters of the text and at
  its end, and a line above which are the heaviest that hold 0.9 at the end.
- scores (Fluxion, Figure 11): how near to normal the scores of the entries are that lie neither among the first 64 nor
  among the newest 256, for each head of the layers of Figure 3: skewness, excess kurtosis, the correlation of their
  quantiles with those of a normal distribution, and by how much log n + mean + variance / 2, which Fluxion's features
  take for their log-sum-exp, misses it; medians over the text's last queries.

Figures go beside the CSV, which has the windows: OUT_windows.png, OUT_heads.png, OUT_positions.png, OUT_scores.png; so
do the numbers of the others (OUT_heads.csv, OUT_positions.csv, OUT_scores.csv).
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any

import numpy as np
import torch
import typer
from tqdm import tqdm

from common import (
    RESULTS,
    DtypeOption,
    ModelOption,
    ThreadsOption,
    command,
    load,
    numbers,
    show,
    text_of,
    window,
    write_csv,
)
from weights import record

HOLDS = 0.99  # of a head's weight, Figure 4
LINE = 0.9  # of a head's weight, Figure 5
LEAST = 2.0**-149  # float32 above 0
SINKS, LOCAL = 64, 256  # entries that are left out at both ends, Figure 11


def window_sums(weights: list[torch.Tensor], starts: list[int], recents: list[int]) -> np.ndarray:
    """The weight that the first `s` and the newest `r` entries hold together, `[starts, recents]`.

    Args:
        weights: `[Hq, entries]` of some queries; averaged over queries and heads. An entry in both windows counts once.
    """
    sums = np.zeros((len(starts), len(recents)))
    for rows in weights:
        total = rows.shape[1]
        running = np.concatenate([[0.0], rows.double().mean(0).cumsum(0).numpy()])
        for i, start in enumerate(starts):
            for j, recent in enumerate(recents):
                sums[i, j] += running[min(start, total)] + running[-1] - running[max(total - recent, min(start, total))]
    return sums / len(weights)


def needed_share(weights: torch.Tensor, holds: float) -> torch.Tensor:
    """The least share of entries that holds so much of the weight, for each row of `[rows, entries]`."""
    running = weights.double().sort(-1, descending=True).values.cumsum(-1)
    return ((running < holds * running[:, -1:]).sum(-1) + 1) / weights.shape[-1]


def line_at(weights: torch.Tensor, holds: float) -> float:
    """The least weight among the heaviest entries that together hold so much of the weight `[entries]`."""
    count = round(float(needed_share(weights[None], holds)) * len(weights))
    return float(weights.sort(descending=True).values[count - 1])


def shape_of(weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """How near to normal the scores behind softmax weights `[rows, entries]` are; float64 `[rows]` each.

    A score is known from its weight but for a constant, on which none of these depends. A weight that is 0 in float32
    counts as the least that is not.
    """
    scores = weights.double().clamp(min=LEAST).log()
    mean, count = scores.mean(-1, keepdim=True), scores.shape[-1]
    spread = (scores - mean).square().mean(-1, keepdim=True)
    z = (scores - mean) / spread.sqrt()
    normal = quantiles(count)
    moments = math.log(count) + mean[:, 0] + spread[:, 0] / 2
    return {
        "skewness": z.pow(3).mean(-1),
        "excess_kurtosis": z.pow(4).mean(-1) - 3,
        "quantile_correlation": (z.sort(-1).values * normal).mean(-1) / normal.square().mean().sqrt(),
        "lse_gap": moments - scores.logsumexp(-1),
    }


def shapes(found: dict[str, dict[int, list[torch.Tensor]]], layers: list[int], far: slice) -> list[dict[str, Any]]:
    """`shape_of` some entries for each text, layer and head: medians over the queries but the first."""
    lines = []
    for text, weights in found.items():
        for layer in layers:
            each = [shape_of(rows[:, far]) for rows in weights[layer][1:]]
            told = {key: torch.stack([one[key] for one in each]).median(0).values for key in each[0]}
            lines += [
                {"text": text, "layer": layer, "head": head} | {key: float(value[head]) for key, value in told.items()}
                for head in range(len(weights[layer][1]))
            ]
    return lines


def quantiles(count: int) -> torch.Tensor:
    """Those of a standard normal distribution that so many sorted values should have; float64 `[count]`."""
    bell = NormalDist()
    return torch.tensor([bell.inv_cdf((i + 0.5) / count) for i in range(count)], dtype=torch.float64)


def sizes(tokens: int) -> list[int]:
    """Sizes of windows: none, and powers of two up to a text's length."""
    return [0, *(2**power for power in range(tokens.bit_length()) if 2**power < tokens), tokens]


def plot_windows(sums: dict[int, np.ndarray], edges: list[int], path: Path) -> None:
    """Draw Figure 3: a heat map a layer."""
    import matplotlib.pyplot as plt

    size = (4 * len(sums) + 1, 4.2)
    figure, axes = plt.subplots(1, len(sums), figsize=size, layout="constrained", squeeze=False, sharey=True)
    for one, (layer, values) in zip(axes[0], sums.items(), strict=True):
        image = one.imshow(values, origin="lower", vmin=0, vmax=1, cmap="viridis")
        lines = one.contour(values, levels=(0.5, 0.9), colors=("white", "black"), linewidths=1)
        one.clabel(lines, fmt="%g", fontsize=8)
        one.set(title=f"layer {layer}", xlabel="newest entries")
        one.set_xticks(range(len(edges)), edges, rotation=90)
        one.set_yticks(range(len(edges)), edges)
    axes[0, 0].set(ylabel="first entries")
    figure.colorbar(image, ax=axes, label="share of the weight that both hold")
    _save(figure, path)


def plot_heads(shares: dict[str, np.ndarray], layer: int, path: Path) -> None:
    """Draw Figure 4: bars a head, one for each text."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    width = 0.8 / len(shares)
    for number, (name, values) in enumerate(shares.items()):
        shift = (number - (len(shares) - 1) / 2) * width
        axes.bar(np.arange(len(values)) + shift, 100 * values, width, label=name)
    axes.set(
        title=f"layer {layer}: entries that hold {HOLDS:.0%} of a head's weight", xlabel="query head",
        ylabel="% of the entries", xticks=range(len(values)),
    )  # fmt: skip
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend()
    _save(figure, path)


def plot_positions(rows: list[torch.Tensor], layer: int, head: int, path: Path) -> None:
    """Draw Figure 5: the weights of two queries over the positions, and the line of the later one."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 4.5), layout="constrained")
    for weights, color in zip(rows[::-1], ("tab:gray", "tab:orange"), strict=True):
        axes.plot(weights, ".", markersize=2.5, color=color, label=f"as query {len(weights) - 1} sees it")
    above = f"those above hold {LINE:.0%} for query {len(rows[-1]) - 1}"
    axes.axhline(line_at(rows[-1], LINE), color="red", linewidth=1, label=above)
    axes.set(yscale="log", ylim=(1e-8, 2), xlabel="position", ylabel=f"weight, layer {layer}, head {head}")
    axes.margins(x=0.01)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, markerscale=4, frameon=False)
    _save(figure, path)


def plot_scores(rows: dict[int, torch.Tensor], head: int, path: Path) -> None:
    """Draw Figure 11: a histogram and a quantile plot a layer, of one head's weights `[entries]`."""
    import matplotlib.pyplot as plt

    size = (3.6 * len(rows) + 1, 6)
    figure, axes = plt.subplots(2, len(rows), figsize=size, layout="constrained", squeeze=False)
    for (layer, weights), (above, below) in zip(rows.items(), axes.T, strict=True):
        scores = weights.double().clamp(min=LEAST).log()
        z, normal = ((scores - scores.mean()) / scores.std()).sort().values, quantiles(len(scores))
        above.hist(z, bins=60, density=True, color="tab:gray")
        above.plot(normal, (-normal.square() / 2).exp() / math.sqrt(2 * math.pi), color="red")
        above.set(title=f"layer {layer}, head {head}", xlabel="score, standardised", ylabel="density")
        below.plot(normal, z, ".", markersize=2, color="tab:gray")
        below.plot(normal[[0, -1]], normal[[0, -1]], color="red", linewidth=1)
        below.set(xlabel="normal quantiles", ylabel="quantiles of the scores")
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


def read_texts(paths: list[Path]) -> dict[str, str]:
    """Texts by name: the files given, or prose and code from the Python installation."""
    return {p.stem: p.read_text(encoding="utf-8") for p in paths} or {k: text_of(k) for k in ("prose", "code")}


def whole_layers(config: Any) -> list[int]:
    """Layers that attend all tokens: the others' weights end with their windows, or there are none.

    Raises:
        typer.BadParameter: there is none.
    """
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    found = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    if not found:
        raise typer.BadParameter(f"the model's layers are {', '.join(sorted(set(kinds)))}; none attends all tokens")
    return found


def main(
    layers: Annotated[str | None, typer.Option(help="Layers of Figure 3.", show_default="first, middle, last")] = None,
    layer: Annotated[int | None, typer.Option(help="Layer of Figures 4 and 5.", show_default="the middle one")] = None,
    head: Annotated[
        int | None, typer.Option(min=0, help="Query head of Figure 5.", show_default="6, or the last one")
    ] = None,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of each text.")] = 4096,
    queries: Annotated[int, typer.Option(min=1, help="Last queries of a text to average over.")] = 32,
    text: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="A text; give it twice.", show_default="prose and code"),
    ] = None,
    start: Annotated[int, typer.Option(min=0, help="Token of each text to begin with.")] = 2000,
    model: ModelOption = None,
    dtype: DtypeOption = "float32",
    chunk: Annotated[int, typer.Option(min=1, help="Tokens taken in at a time.")] = 512,
    threads: ThreadsOption = 0,
    out: Annotated[Path, typer.Option(help="Where the CSV goes; figures and further numbers go beside it.")] = (
        RESULTS / "attention_stats.csv"
    ),
) -> None:
    """Show where attention weight lies."""
    asked = None if layers is None else numbers(layers)
    language_model, tokenizer = load(model, dtype, threads)
    config = language_model.config.get_text_config(decoder=True)
    last, heads, whole = config.num_hidden_layers - 1, config.num_attention_heads, whole_layers(config)
    centre = whole[len(whole) // 2]
    three, middle = asked or sorted({whole[0], centre, whole[-1]}), centre if layer is None else layer
    if not all(0 <= one <= last for one in (*three, middle)):
        raise typer.BadParameter(f"layers {three} and {middle}: the model has layers 0 to {last}")
    head = min(6, heads - 1) if head is None else head
    if head >= heads:
        raise typer.BadParameter(f"head {head}: the model has heads 0 to {heads - 1}")
    if queries > tokens // 4:
        raise typer.BadParameter(f"{queries} queries of {tokens} tokens: give at most a quarter")
    early = tokens * 3 // 4 - 1
    positions = [early, *range(tokens - queries, tokens)]
    found = {}
    with torch.inference_mode():
        for name, content in tqdm(read_texts(text or []).items(), desc="texts"):
            ids = window(content, tokenizer, start, tokens).to(language_model.device)
            found[name] = record(language_model, ids, positions, sorted({*three, middle}), chunk)
    edges = sizes(tokens)
    first = next(iter(found.values()))
    sums = {one: window_sums(first[one][1:], edges, edges) for one in three}
    shares = {
        name: torch.stack([needed_share(rows, HOLDS) for rows in weights[middle][1:]]).mean(0).numpy()
        for name, weights in found.items()
    }
    pair = [first[middle][0][head], first[middle][-1][head]]
    plot_windows(sums, edges, out.with_name(f"{out.stem}_windows.png"))
    plot_heads(shares, middle, out.with_name(f"{out.stem}_heads.png"))
    plot_positions(pair, middle, head, out.with_name(f"{out.stem}_positions.png"))
    write_csv(
        out,
        [
            {"layer": one, "first": edges[i], "newest": edges[j], "weight": float(values[i, j])}
            for one, values in sums.items()
            for i, j in np.ndindex(values.shape)
        ],
    )
    by_head = [
        {"text": name, "layer": middle, "head": number, "share": float(value), "holds": HOLDS}
        for name, values in shares.items()
        for number, value in enumerate(values)
    ]
    write_csv(out.with_name(f"{out.stem}_heads.csv"), by_head)
    if tokens >= 2 * (SINKS + LOCAL + queries):
        far = slice(SINKS, tokens - queries - LOCAL)
        plot_scores({one: first[one][-1][head, far] for one in three}, head, out.with_name(f"{out.stem}_scores.png"))
        write_csv(out.with_name(f"{out.stem}_scores.csv"), shapes(found, three, far))
    else:
        print(f"{tokens} tokens leave too few between the first {SINKS} and the newest {LOCAL}: no numbers of scores")
    line = line_at(pair[1], LINE)
    write_csv(
        out.with_name(f"{out.stem}_positions.csv"),
        [
            {"layer": middle, "head": head, "position": p, "weight": weight, "above_line": int(weight >= line)}
            | {"weight_before": float(pair[0][p]) if p <= early else None, "hold": LINE}
            for p, weight in enumerate(pair[1].tolist())
        ],
    )
    table = []
    for name, values in shares.items():
        least, most = int(values.argmin()), int(values.argmax())
        table.append(
            {"text": name, "least": f"{values.min():.1%} (head {least})", "most": f"{values.max():.1%} (head {most})"}
            | {"mean": f"{values.mean():.1%}"}
        )
    show(f"entries that hold {HOLDS} of a head's weight, layer {middle}", table)


if __name__ == "__main__":
    command(main)()
