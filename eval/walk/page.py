"""`docs/models.md`: what became of every model type."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

HEAD = """# Models

What `HybridCache` does with each causal language model type of Transformers {transformers}. This page is made by

```
{command}
```

at commit {commit} (torch {torch}, Python {python}).

A random model of each type, with four small layers of all the kinds that the type mixes, runs in float32 on the CPU. It
is compared with the same weights under `eager` attention and Transformers' `DynamicCache`:

- the logits of a left-padded prompt of 41 tokens in three rows, of a chunk of 13 and of 6 single tokens, up to 1e-4 of
    the largest logit (most differ by 1e-6);
- the tokens of greedy and beam search.

A type is exact if that holds for the policy `full` and for `scout` with a budget that covers the context, each with one
memory and with `tier="split"` and four resident blocks of 8 tokens. A policy that leaves tokens out must give other
logits, or the type counts as not run. Weights are random, so the table does not show what a small budget loses.

| result | causal language models | multimodal models |
|---|---|---|
{counts}

"""

SECTIONS = {
    "exact": (
        "Exact",
        "*Held*: layers whose keys and values lie in `HybridCache`'s blocks, of all layers of the tiny model. The "
        "others (sliding windows, linear attention, shared keys and values) keep Transformers' own.",
    ),
    "exact by stock fallback": (
        "Exact by stock fallback",
        "Keys and values that do not fit into blocks stay in Transformers' own layers inside the cache, and a warning "
        "says so. Tokens are right; nothing is offloaded.",
    ),
    "refused": ("Refused", "With the message that users get, when the cache is made or in the first forward."),
    "not run": (
        "Not run",
        "A tiny model could not be built or run with Transformers' own cache, or without an image; the message says "
        "why. `tests/test_vision.py` runs four vision-language models with an image.",
    ),
    "wrong": ("Wrong", "Other logits or tokens than eager attention: a bug."),
    "error": ("Errors", "Another error than a clear refusal: a bug."),
}


def render(rows: Sequence[Mapping[str, Any]], causal: set[str]) -> str:
    """The page.

    Args:
        rows: outcomes with their environment, sorted by type.
        causal: the types that count as causal language models; the others are multimodal.
    """
    first = rows[0]
    tally = Counter((row["status"], row["model_type"] in causal) for row in rows)
    counts = "\n".join(
        f"| {status} | {tally[status, True]} | {tally[status, False]} |"
        for status in SECTIONS
        if tally[status, True] or tally[status, False] or status == "wrong"
    )
    parts = [HEAD.format(**{**first, "commit": _commits(rows)}, counts=counts)]
    for status, (title, text) in SECTIONS.items():
        mine = [row for row in rows if row["status"] == status]
        if mine:
            parts.append(f"## {title}\n\n{text}\n\n{_table(status, mine)}\n")
    return "\n".join(parts)


def _commits(rows: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(dict.fromkeys(str(row["commit"]) for row in rows))


def _table(status: str, rows: Sequence[Mapping[str, Any]]) -> str:
    if status == "exact":
        head = "| type | model | held | largest difference | warning |\n|---|---|---|---|---|"
        lines = [
            f"| `{r['model_type']}` | {r['model']} | {r['held']} of {r['layers']} | {float(r['error']):.0e} | "
            f"{_cell(r['message'])} |"
            for r in rows
        ]
    else:
        head = "| type | model | message |\n|---|---|---|"
        lines = [f"| `{r['model_type']}` | {r.get('model', '')} | {_cell(r['message'])} |" for r in rows]
    return "\n".join([head, *lines])


def _cell(text: str) -> str:
    """A message inside a table, cut where it gets long."""
    text = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= 420 else text[:420] + " …"
