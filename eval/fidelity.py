"""What does each policy and budget lose against full attention, and what does it cost: which is the best choice where?

    python eval/fidelity.py
    python eval/fidelity.py --rows budgets --kinds prose --windows 1 --prose novel.txt
    python eval/fidelity.py --row full --row scout:budget=1024,block_size=16 --row quest:budget=1024

Full attention reads a window of real text; every row takes that over (`hgca` and others that learn from a prompt read
it themselves) and is fed what follows, token by token, as if it had been generated: KL(full‖row) and how often the most
likely token is the same. Beside that stands what a step costs:

host    MiB that a step reads in host memory: what the CPU attends, what is brought to the device, digests there
device  MiB of keys, values and digests in the device's memory
ms      median of a step
attended  mean number of tokens that a row and KV head attends, of rows with `samples`, which run with one memory alone

Without a GPU all but the time come from two memories on the CPU (`tier="split"`), and the time from one memory, where a
row allows that and `--tier` asks for no other. A row is on the front of a cost if none is nearer to full attention for
less of it. At the end a table says which row is cheapest below each KL. A run that was stopped goes on where it was.

`variants` are the rows of ScoutAttention: choosing and attending a layer ahead, int8, the paper's form; `budgets` some
of each policy.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm
from transformers import PreTrainedModel

import common
from hf_offload import measuring
from plotting import lines, plot

PAPER = {"digest": "quest", "join": "raw", "synchronous_layers": (0,), "correction": False, "smoothing": 0.0}
"""`Scout.paper()`, but for its budget and lookahead."""
VARIANTS: dict[str, dict[str, Any]] = {
    "scout-off": {"lookahead": "off"},
    "scout-off-int8": {"lookahead": "off", "host_dtype": "int8"},
    "scout-select": {"lookahead": "select"},
    "scout-select-sync0": {"lookahead": "select", "synchronous_layers": (0,)},
    "scout-attend": {"lookahead": "attend"},
    "scout-attend-sync0": {"lookahead": "attend", "synchronous_layers": (0,)},
    "scout-attend-uncorrected": {"lookahead": "attend", "correction": False},
    "paper": PAPER | {"lookahead": "attend"},
    "paper-off": PAPER | {"lookahead": "off"},
}
BUDGETS = (
    "full",
    "full:host=fetch",
    *(f"window:budget={budget}" for budget in (512, 1024, 2048)),
    *(f"scout:budget={budget}" for budget in (256, 512, 1024, 2048)),
    *(f"scout:samples={samples}" for samples in (64, 128, 256, 512, 1024)),
    *(f"quest:budget={budget}" for budget in (512, 1024, 2048)),
    *(f"infinigen:alpha={alpha}" for alpha in (2, 4, 6)),
    *(f"h2o:heavy={share},recent={share}" for share in (0.05, 0.1, 0.2)),
    *(f"hgca:gpu_ratio={ratio}" for ratio in (0.05, 0.1, 0.25)),
    *(f"fixed_hybrid:budget={share}" for share in (0.02, 0.05, 0.1, 0.2)),
)
COSTS = {"host": "MiB read of the host, a step", "device": "MiB on the device", "ms": "ms a step"}
LIMITS = (0.1, 0.05, 0.02, 0.01, 0.005, 0.002)


def variants(budget: int) -> dict[str, common.Row]:
    """ScoutAttention's rows at a budget, and a window of it."""
    rows = {"window": common.Row("window", "window", {"budget": budget})}
    for name, knobs in VARIANTS.items():
        two = {} if knobs["lookahead"] == "off" else {"tier": "split"}  # a predicted query needs two memories
        rows[name] = common.Row(name, "scout", {"budget": budget} | knobs | two)
    return rows


def measure(model: PreTrainedModel, row: common.Row, reading: measuring.Reading, tier: str | None) -> dict[str, Any]:
    """What one row loses and costs behind one reading."""
    tiers = [tier] if tier or model.device.type != "cpu" else ["split", "one"]
    tiers = [row.options["tier"]] if "tier" in row.options else tiers
    tiers = ["one"] if "samples" in row.options else tiers
    each = [
        measuring.cost(model, row.policy, {**row.options, **({} if one is None else {"tier": one})}, reading)
        for one in tiers
    ]
    return {
        "kl": float(each[0].kl.mean()),
        "top1": each[0].top1,
        "host": (each[0].host_bytes or 0) / 2**20,
        "device": each[0].device_bytes / 2**20,
        "ms": 1000 * each[-1].seconds,
        "attended": each[0].tokens,
    }


def fronts(found: list[dict[str, Any]]) -> None:
    """Note in each line on which fronts it is: nothing is nearer to full attention at no more of that cost."""
    for line in found:
        line["front"] = " ".join(
            cost
            for cost in COSTS
            if not any(
                other["kl"] <= line["kl"] and other[cost] <= line[cost]
                and (other["kl"], other[cost]) != (line["kl"], line[cost])
                for other in found
            )
        )  # fmt: skip


def best(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cheapest row of those below each KL, for each cost."""
    table = []
    for limit in LIMITS:
        if near := [line for line in found if line["kl"] <= limit]:
            cheapest = {cost: min(near, key=lambda line: line[cost]) for cost in COSTS}
            table.append({"KL at most": limit} | {c: f"{line['row']} ({line[c]:.4g})" for c, line in cheapest.items()})
    return table


def main(
    rows: common.RowsOption = ["variants"],  # noqa: B006
    budget: Annotated[int, typer.Option(help="Tokens that a step of the variants attends.")] = 1024,
    tokens: Annotated[int, typer.Option(help="Context that is read first.")] = 5888,
    steps: common.StepsOption = 512,
    windows: Annotated[int, typer.Option(min=1, max=3, help="Windows of each kind.")] = 3,
    kinds: common.KindsOption = "prose,code",
    tier: common.TierOption = None,
    *,
    setting: common.TextSetting = common.EXACT_TEXT,
) -> None:
    """Compare policies with full attention, teacher-forced, and say what they cost."""
    own = variants(budget)
    chosen = common.rows_of(rows, known=own | {"variants": tuple(own), "budgets": BUDGETS})
    places = [(kind, start) for kind in common.kinds_of(kinds) for start in common.OFFSETS[kind][:windows]]
    size = {"tokens": tokens, "steps": steps, "tier": tier}
    records = setting.records(("row", "kind", "start"), chosen, **size, budget=budget, prose=setting.source)
    model, tokenizer = setting.load()
    model.set_attn_implementation("hybrid_sparse")
    common.check_rows(chosen, model)
    with tqdm(total=len(places) * len(chosen)) as bar:
        for kind, start in places:
            reading: measuring.Reading | None = None
            for row in chosen:
                bar.set_description(f"{kind}, {row.name}")
                key = {"row": row.name, "kind": kind, "start": start}
                if reading is None and records.key(key) not in records.found:
                    ids = setting.window(tokenizer, kind, start, tokens + steps)
                    reading = measuring.read(model, ids.to(model.device), steps)
                records.once(key, lambda row=row, reading=reading: measure(model, row, reading, tier))
                bar.update()
            setting.write([record | size for record in records.found.values()])
    found = []
    for row in chosen:
        mine = [record for record in records.found.values() if record["row"] == row.name]
        found.append({"row": row.name} | {c: statistics.mean(r[c] for r in mine) for c in ("kl", "top1", *COSTS)})
    fronts(found)
    draw(found, setting.beside(".png"))
    common.show("against full attention, means over the windows", found)
    if table := best(found):
        common.show("the cheapest row below each KL", table)
    records.remove()


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """KL against each cost; a line a policy."""
    points = sorted(({**line, "policy": line["row"].partition(":")[0]} for line in found), key=lambda one: one["kl"])
    with plot(path, 1, len(COSTS), figsize=(13, 4.5), sharey=True) as axes:
        for one, (cost, label) in zip(axes, COSTS.items(), strict=True):
            lines(one, points, cost, "kl", by="policy")
            one.set(xscale="symlog" if cost == "host" else "log", yscale="log", xlabel=label)
        axes[0].set(ylabel="KL to full attention")
        axes[0].legend(fontsize="small")


if __name__ == "__main__":
    common.command(main)()
