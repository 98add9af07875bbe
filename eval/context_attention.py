"""Where does the time of a decode step go in a long context, what does it read, and how far from full attention is it?

    python eval/context_attention.py
    python eval/context_attention.py --contexts 8k --rows hgca-0.1,scout-1024 --steps 64 --prose novel.txt
    python eval/context_attention.py --contexts 6k --rows fixed-0.05,fluxion-0.1 --predictor predictor.safetensors
    python eval/context_attention.py --contexts 32k --read 6k --rows full,hgca-0.1
    python eval/context_attention.py --contexts 4k+512,4k+4k --rows fluxion-0.1 --predictor predictor.safetensors
    python eval/context_attention.py --contexts 2k --rows full,scout-1024 --tier one --threads 1

All rows hold the keys and values of the same real text: full attention's cache reads it, the others take that over, and
`hgca` and `fluxion`, which learn from a prompt, read it too. Then the rows take turns over the text's next tokens: some
steps of warm-up, then those that count. What they compute is compared with full attention (`dynamic`; KL, top token),
so that rows can be compared at equal fidelity and not at equal budgets; `full`, which attends everything, shows what
rounding alone makes of it.

Times are milliseconds, medians: `step` of the whole forward, `attention` in the attention function and the cache's
`update`, all layers; of it `kernels` in compiled kernels (the rest is Python), `retrieval` where the CPU predicts what
heads of `fixed` and `fluxion` need of the host, chooses blocks and attends them, and `predict` in Fluxion's prediction
alone (`predict_share`: of the step); these three with one memory. `wait` is how long the model's thread waits for the
CPU.

`read` is what the CPU reads of keys, values and digests at each step, by arithmetic: everything for full attention, the
budget and all digests for `scout`, the window and the kept share of the rest for `hgca`; for `fixed` and `fluxion`
sinks, newest tokens, the digests that were looked at, and what the CPU chose. `chosen` is the part of the keys and
values that is not always read: what was kept or chosen.

A context like 4k+512 is a batch of two rows, the shorter one padded on the left. With `--read` longer contexts hold the
keys and values of so many tokens again and again, and queries have the positions that they would have behind the first
of them: every token shares its weight with its copies, so that selections are like those of the shorter text, and
nobody has to read a long one. In both, all rows take the known part over and read the last tokens themselves (`hgca` as
the end of a prompt). Memory: each row holds the context.
"""

from __future__ import annotations

import copy
import gc
import math
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel

import common
import hf_offload
from hf_offload.tools.measuring import divergence
from inside import WATCHES, digest_bytes, stored_tokens, token_bytes, watching
from records import show

WARM_UP = 2
BLOCK_SIZE = 32
TAIL = 128
"""Tokens at the end of batches and repeated contexts that all rows read themselves."""
AS_PROMPT = {"append": "mean", "append_run": 0}
"""With these knobs `hgca` learns from such an append what it learns from the end of a prompt."""


class Context:
    """What every row holds: a text, its beginnings as a batch, or its keys and values again and again.

    Args:
        model: the model.
        ids: the text `[1, N]`, with what follows every row.
        lengths: tokens of each row; the shorter ones are padded on the left.
        read: tokens of the text; longer rows hold them again and again.
    """

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor, lengths: list[int], read: int) -> None:
        self.model, self.ids, self.lengths = model, ids, torch.tensor(lengths, device=ids.device)[:, None]
        self.longest, self.texts = max(lengths), self.lengths.clamp(max=read)
        known, self.tail = int(self.texts.max()), TAIL if len(lengths) > 1 or self.longest > read else 0
        slots = torch.arange(self.longest + ids.shape[1] - known, device=ids.device) - self.longest + self.lengths
        self.mask = slots >= 0
        full = common.FULL.make_cache(model)
        common.prefill(model, full, ids[:, : known - self.tail], chunk=2048)
        # Behind the padding the text, again and again, up to the tail.
        places = slots[:, : self.longest - self.tail].clamp(min=0) % (self.texts - self.tail)
        self.known = DynamicCache(config=model.config)
        for index, layer in enumerate(full.layers):
            self.known.update(*(kept[0][:, places].transpose(0, 1) for kept in (layer.keys, layer.values)), index)

    def mask_to(self, stop: int) -> torch.Tensor | None:
        """The attention mask of the tokens before `stop`, counted from the longest row's end; None without padding."""
        mask = self.mask[:, : self.longest + stop]
        return None if mask.all() else mask.long()

    def make_cache(self, row: common.Row) -> Cache:
        """A row's cache that holds it."""
        cache: Any = row.make_cache(self.model)
        if row is common.FULL:
            cache = copy.deepcopy(self.known)
        elif cache.policy.requirements.learns_from_prompts and not self.tail:
            common.prefill(self.model, cache, self.ids[:, : self.longest], chunk=2048)
        else:
            knobs = AS_PROMPT if self.tail and row.policy == "hgca" else {}
            cache = hf_offload.HybridCache.from_cache(
                self.known, self.model, row.policy, attention_mask=self.mask_to(-self.tail), **row.options, **knobs
            )
        if self.tail:
            self.feed(cache, -self.tail, 0)
        return cache

    def feed(self, cache: Cache, first: int, stop: int) -> torch.Tensor:
        """Let every row take in its tokens first..stop-1, counted from its own end; the last logits `[B, V]`."""
        places = torch.arange(first, stop, device=self.ids.device) + self.texts
        logits: torch.Tensor = self.model(
            self.ids[0, places], past_key_values=cache, position_ids=places, logits_to_keep=1,
            attention_mask=self.mask_to(stop),
        ).logits  # fmt: skip
        return logits[:, -1]

    def decode(
        self, row: common.Row, cache: Cache, first: int, steps: int
    ) -> tuple[list[dict[str, float]], torch.Tensor]:
        """`feed` so many tokens one by one: milliseconds by name of the steps after the warm-up, log-probabilities
        `[N, B, V]`.
        """
        row.activate(self.model)
        times, logits = [], []
        with watching(self.model.config._attn_implementation, cache) as seconds:
            for at in range(first, first + steps):
                seconds.update(dict.fromkeys(WATCHES, 0.0))
                with common.clock() as spent:
                    logits.append(self.feed(cache, at, at + 1))
                times.append({name: 1000 * each for name, each in {"step": spent[0], **seconds}.items()})
        return times[WARM_UP:], torch.stack(logits).float().log_softmax(-1).cpu()


def read_bytes(model: PreTrainedModel, row: common.Row, cache: Cache) -> tuple[float, float | None]:
    """Bytes that a step reads for a row, all layers, and those of them that are chosen."""
    tokens, each = cache.get_seq_length(), token_bytes(model, len(cache.layers))
    if row is common.FULL:
        return float(tokens * each), None
    stats = cache.stats().as_dict()
    if stats["attended_tokens"] is not None:
        return stored_tokens(cache, stats["attended_tokens"]) * each + digest_bytes(cache), None
    if told := stats["retrievals"]:
        near = min(cache.policy.requirements.sinks + cache.policy.requirements.recent, tokens)
        chosen = told["retrieved_share"] * (tokens - near) * each
        digests = chosen * told["scored_bytes"] / max(told["retrieved_bytes"], 1)
        return near * each + chosen + digests, chosen
    if "gpu_ratio" in row.options:
        newest = math.ceil(row.options["gpu_ratio"] * tokens / BLOCK_SIZE) * BLOCK_SIZE
        chosen = stats["kept_share"] * (tokens - newest) * each
        return newest * each + chosen, chosen
    attended = min(tokens, row.options.get("budget", tokens))
    return stored_tokens(cache, attended) * each + digest_bytes(cache), None


def measure(context: Context, rows: list[common.Row], rounds: int, steps: int) -> list[dict[str, Any]]:
    """One line a row, full attention first."""
    every = [common.FULL, *rows]
    caches = {row.name: context.make_cache(row) for row in tqdm(every, desc="contexts", leave=False)}
    times: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    seen: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
    for number, row in common.in_turns(every, rounds):
        at = number * (WARM_UP + steps)
        found, logits = context.decode(row, caches[row.name], at, WARM_UP + steps)
        seen[row.name].append(logits)
        times[row.name] += found
    lines: list[dict[str, Any]] = []
    for row in every:
        cache, frame = caches[row.name], pd.DataFrame(times[row.name])
        line: dict[str, Any] = {"context": "+".join(map(str, context.lengths.flatten().tolist())), "row": row.name}
        line |= {name: value or None for name, value in frame.median().items()}
        first = lines[0] if lines else line
        line |= {f"{name}_ratio": line[name] / first[name] for name in ("step", "attention")}
        if line["predict"]:
            line["predict_share"] = (frame.predict / frame.step).median()
        if row is not common.FULL:
            stats = cache.stats().as_dict()
            line |= {"wait": 1000 * stats["wait_seconds"] / stats["steps"], "kept": stats.get("kept_share")}
        read, chosen = read_bytes(context.model, row, cache)
        line |= {"read_MiB": read / 2**20, "chosen_MiB": None if chosen is None else chosen / 2**20}
        line["read_ratio"] = line["read_MiB"] / first["read_MiB"]
        kl, top1 = divergence(torch.cat(seen[row.name]), torch.cat(seen[common.FULL.name]))
        line |= {"kl": float(kl.mean()), "top1": top1}
        for name in ("attention", "step"):
            line |= {f"{name}_p{percent}": frame[name].quantile(percent / 100) for percent in (20, 80)}
        lines.append(line)
    return lines


def main(
    contexts: Annotated[str, typer.Option(help="Lengths, comma-separated; k is 1,024; a batch has a plus.")] = "6k,32k",
    rows: common.RowsOption = ["full,hgca-0.1,scout-512,scout-1024,scout-2048"],  # noqa: B006
    steps: common.StepsOption = 32,
    rounds: common.RoundsOption = 4,
    read: common.ReadOption = None,
    kind: common.KindOption = "code",
    tier: common.TierOption = None,
    predictor: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Of hf-offload train-fluxion, for fluxion rows.")
    ] = None,
    *,
    setting: common.TextSetting,
) -> None:
    """Measure attention in long contexts."""
    batches = sorted((common.numbers(part.replace("+", ",")) for part in contexts.split(",")), key=sum)
    chosen, (text,) = common.rows_of(rows, tier, predictor), common.kinds_of(kind)
    longest = max(map(max, batches))
    most = longest if read is None else common.numbers(read)[0]
    model, tokenizer = setting.load()
    following = rounds * (WARM_UP + steps)
    ids = setting.window(tokenizer, text, 0, min(longest, most) + following).to(model.device)
    size = {"steps": steps * rounds, "kind": text, "tier": tier, "text_tokens": most}
    records: list[dict[str, Any]] = []
    with torch.inference_mode():
        for lengths in tqdm(batches):
            records += [line | size for line in measure(Context(model, ids, lengths, most), chosen, rounds, steps)]
            setting.write(records)
            gc.collect()
    show("ms a token, MiB that a step reads, and both against full attention", records)


if __name__ == "__main__":
    common.command(main)()
