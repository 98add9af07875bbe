"""What is the perplexity of whole texts, every token of which is decoded through the cache (HGCA, Table 1)?

    python eval/perplexity.py
    python eval/perplexity.py --rows hgca-0.1-1,window-0.1,scout-512 --tokens 2048 --texts prose --prose novel.txt
    python eval/perplexity.py --row scout:budget=1024 --row h2o:heavy=0.1,recent=0.1

Teacher forcing from the first token on: nothing is taken in as a prompt, so that each token but the first is predicted
by a decode step. `hgca` attends a share of the text's length densely, its newest tokens, rounded up to whole blocks
(the paper's GPU ratio), and what has left that window as its filter lets it (β): `hgca-RATIO-BETA`, `grid` 16 of
these. `window-RATIO` attends as many tokens. Full attention (`dynamic`) is computed in one forward,
chunk by chunk. Each token's loss is compared with full attention's for the same token: standard errors take tokens as
independent of each other. `kept_share`, of the host's tokens those that the CPU attends, is that at the end, over all
texts of a run.

All sequences (`--batch` of each text, one after the other) are decoded as one batch in one cache. A full grid is
--tokens × 16 steps, whatever the batch: at 65 ms a step (SmolLM2, bf16, two cores) 4,096 tokens take 75 minutes, and
more sequences cost only their attention. A run that was stopped goes on with the row at which it was.
"""

from __future__ import annotations

import math
import re
import time
from typing import Annotated, Any

import torch
import typer
from scipy.stats import sem
from tqdm import tqdm
from transformers import PreTrainedModel

import common
from records import show

BLOCK_SIZE, CHUNK = 32, 128
GRID = [f"hgca-{ratio}-{beta}" for ratio in (0.1, 0.25, 0.5, 0.75) for beta in (0.25, 0.5, 0.75, 1)]


def shares_of(texts: list[str], tokens: int) -> dict[str, Any]:
    """Of a `--row`'s texts and of the grid the rows that attend shares of so many tokens, by name."""
    rows: dict[str, Any] = {"grid": GRID}
    for name in re.findall(r"hgca-[\d.]+-[\d.]+|window-\d*\.\d+", ",".join([*texts, *GRID])):
        policy, share, *beta = name.split("-")
        newest = math.ceil(float(share) * tokens / BLOCK_SIZE) * BLOCK_SIZE
        knobs = {"window": newest, "beta": float(*beta)} if beta else {"budget": newest}
        rows[name] = common.Row(name, policy, knobs | {"block_size": BLOCK_SIZE})
    return rows


def decode(model: PreTrainedModel, row: common.Row, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Losses `[B, T]` float64 (negative log-likelihood) of a row for tokens 1… of the sequences `[B, T + 1]`, decoded
    one by one, or chunk by chunk with full attention; and what that took.
    """
    cache, losses, chunk = row.make_cache(model), [], CHUNK if row is common.FULL else 1
    start, parts = time.perf_counter(), list(zip(ids[:, :-1].split(chunk, 1), ids[:, 1:].split(chunk, 1), strict=True))
    for part, following in tqdm(parts, desc=row.name, delay=5, leave=False):
        logits = model(part, past_key_values=cache).logits
        losses.append(-logits.float().log_softmax(-1).gather(-1, following[..., None])[..., 0].cpu().double())
    if row is common.FULL:
        return torch.cat(losses, 1), {}
    facts = {"attended": row.options.get("window", row.options.get("budget"))}
    facts["kept_share"] = cache.stats().as_dict().get("kept_share")
    facts["ms_per_step"] = 1000 * (time.perf_counter() - start) / len(losses)
    if share := re.fullmatch(r"hgca-([\d.]+)-([\d.]+)", row.name):
        facts |= {"ratio": float(share[1]), "beta": float(share[2])}
    return torch.cat(losses, 1), facts


def told(nll: torch.Tensor, full: torch.Tensor) -> dict[str, Any]:
    """Perplexity and its difference to full attention's, in nats a token, of losses `[sequences, T]` on one text."""
    less, perplexity = nll - full, float(nll.mean().exp())
    return {
        "perplexity": perplexity,
        "perplexity_se": perplexity * sem(nll, axis=None),
        "perplexity_full": float(full.mean().exp()),
        "nll_more": float(less.mean()),
        "nll_more_se": sem(less, axis=None),
        "tokens": nll.shape[1],
        "sequences": len(nll),
    }


def main(
    texts: common.KindsOption = "prose,code",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a sequence that are predicted.")] = 4096,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of each text.")] = 1,
    rows: common.RowsOption = ["grid"],  # noqa: B006
    tier: common.TierOption = None,
    *,
    setting: common.TextSetting,
) -> None:
    """Measure the perplexity of texts that are decoded token by token."""
    kinds = common.kinds_of(texts)
    chosen = common.rows_of(rows, tier, known=shares_of(rows, tokens))
    model, tokenizer = setting.load()
    common.check_rows(chosen, model)
    starts = [(kind, common.OFFSETS[kind][0] + number * tokens) for kind in kinds for number in range(batch)]
    ids = torch.cat([setting.window(tokenizer, kind, start, tokens + 1) for kind, start in starts]).to(model.device)

    def read(_: dict[str, Any]) -> torch.Tensor:
        return decode(model, common.FULL, ids)[0]

    def measure(full: torch.Tensor, row: common.Row) -> list[dict[str, Any]]:
        nll, facts = (full, {}) if row is common.FULL else decode(model, row, ids)
        each = zip(kinds, nll.split(batch), full.split(batch), strict=True)
        return [{"kind": kind} | told(mine, other) | facts for kind, mine, other in each]

    about = {"texts": kinds, "tokens": tokens, "batch": batch, "tier": tier, "prose": setting.source}
    records = common.over_texts(setting, [common.FULL, *chosen], [{}], read, measure, **about)
    show("nats a token more than full attention", records)


if __name__ == "__main__":
    common.command(main)()
