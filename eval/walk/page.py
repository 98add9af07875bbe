"""`docs/models.md`: what became of every model type."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

HEAD = """# Models

What `HybridCache` does with each model type of Transformers {transformers} that generates text. `{command}` makes this
page from `eval/results/families.csv`, which has each type's class, differences and full message (commit {commit}, torch
{torch}, Python {python}).

**How it is tested.** A random model of each type, with four small layers of all the kinds that the type mixes, runs in
float32 on the CPU. It is compared with the same weights under `eager` attention and Transformers' `DynamicCache`:

- the logits of a left-padded prompt of 41 tokens in three rows, of a chunk of 13 tokens and of 6 single tokens must
    agree up to 1e-4 of the largest logit (most differ by 1e-6);
- greedy and beam search must give the same tokens.

A type is exact if both hold for the policy `full` and for `scout` with a budget that covers the context, each with one
memory and with `tier="split"` and four resident blocks of 8 tokens. As a control, a policy that leaves tokens out must
give other logits; if it does not, the type counts as not run. Weights are random, so this says nothing about what a
small budget loses.

| result | causal language models | multimodal models |
|---|---|---|
{counts}
"""

SECTIONS = {
    "exact": (
        "Exact",
        "A layer is held if its keys and values lie in `HybridCache`'s blocks. Other layers (sliding windows, linear "
        "attention, shared keys and values) keep the layers of Transformers' cache.",
    ),
    "exact by stock fallback": (
        "Exact by stock fallback",
        "Keys and values that do not fit into blocks stay in the layers of Transformers' cache, and a warning says so. "
        "The tokens are right, but nothing is offloaded.",
    ),
    "refused": ("Refused", "`HybridCache` raises when it is made or in the first forward. Use `DynamicCache`."),
    "not run": (
        "Not run",
        "The settings of a tiny model do not suit the type, or it wants an image or another package. "
        "`tests/test_vision.py` runs four vision-language models with an image.",
    ),
    "wrong": ("Wrong", "Other logits or tokens than eager attention: a bug."),
    "error": ("Errors", "Another error than a clear refusal: a bug."),
}

FALLBACK = re.compile(r"because (?:it has |its )?(.*?): (?:it is|they are) exact")
"""What the warning gives as the reason why layers keep Transformers' own cache."""


def render(rows: Sequence[Mapping[str, Any]], causal: set[str]) -> str:
    """The page: a table of counts, then for each result its types in lists by reason.

    Args:
        rows: outcomes with their environment, sorted by type.
        causal: the types that count as causal language models; the others are multimodal.
    """
    tally = Counter((row["status"], row["model_type"] in causal) for row in rows)
    counts = "\n".join(
        f"| {status} | {tally[status, True]} | {tally[status, False]} |"
        for status in SECTIONS
        if tally[status, True] or tally[status, False] or status == "wrong"
    )
    commits = ", ".join(dict.fromkeys(str(row["commit"]) for row in rows))
    parts = [HEAD.format(**{**rows[0], "commit": commits}, counts=counts)]
    for status, (title, text) in SECTIONS.items():
        groups: dict[str, list[str]] = {}
        for row in rows:
            if row["status"] == status:
                groups.setdefault(_reason(row), []).append(f"`{row['model_type']}`")
        if groups:
            lists = [
                f"**{reason}** ({len(types)}): {', '.join(types)}.\n"
                for reason, types in sorted(groups.items(), key=lambda group: -len(group[1]))
            ]
            parts.append("\n".join([f"## {title}\n", f"{text}\n", *lists]))
    return "\n".join(parts)


def _reason(row: Mapping[str, Any]) -> str:
    """What the types of one list have in common: layers held, or the message without what only this type has."""
    message = " ".join(row["message"].split())
    if row["status"] == "exact":
        return f"{row['held']} of {row['layers']} layers held" + (f"; {message}" if message else "")
    if found := FALLBACK.search(message):
        return found[1]
    if row["status"] == "not run":
        if not row.get("model"):
            return "a tiny model could not be built"
        return "a tiny model does not run with Transformers' own cache" if "own cache" in message else message
    message = re.sub(r"^\w+Error: |; use DynamicCache.*", "", message).replace("<", "&lt;")
    return re.sub(r"list of \d+", "list of", message.replace(row["model"], "the model"))
