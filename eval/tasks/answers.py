"""Answers of many rows to one prompt, which is taken in once for all rows that allow it."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from lm_eval.models.utils import postprocess_generated_text
from lm_eval.models.utils_hf import stop_sequences_criteria
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

import common
import hf_offload
from hf_offload.model.model_support import has_two_memories
from tasks.prompts import Prompt
from tasks.samples import Sample

CONTROL = "dynamic"
"""Transformers' own cache and attention."""
SETUPS = {
    "dense": "The whole prompt is attended exactly; the policy chooses for the tokens of the answer.",
    "sparse": "The question is fed token by token, and the policy chooses for each of its tokens, too; what comes "
    "before it is attended exactly.",
}
"""How the question is attended. `generate()` does it as in dense."""


class Reading:
    """One prompt, taken in by row after row.

    With one memory a cache knows of a prompt no more than its keys and values, but for policies that learn from its
    queries. So one cache of policy `full` reads the prompt, and the others take its tokens over. A row whose policy
    learns, with two memories, and Transformers' own cache read it themselves.

    Args:
        model: of all rows.
        ids: the prompt, `[1, N]` int64 on the model's device.
    """

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor) -> None:
        self.model, self.ids = model, ids
        self._read: tuple[DynamicCache, torch.Tensor] | None = None

    def start(self, row: common.Row, tokens: int) -> tuple[Cache, torch.Tensor]:
        """A row's cache that holds the first tokens of the prompt, and the logits `[1, V]` of the last of them."""
        cache = row.make_cache(self.model)
        two_memories = has_two_memories(self.model, row.options.get("tier"))
        if row.policy == CONTROL or two_memories or cache.policy.requirements.learns_from_prompts:
            return cache, common.prefill(self.model, cache, self.ids[:, :tokens])
        if self._read is None:
            full = hf_offload.HybridCache(self.model, "full")
            logits = common.prefill(self.model, full, self.ids)
            self._read = full.to_dynamic(), logits
        read, logits = self._read
        if tokens < self.ids.shape[1]:
            read = copy.deepcopy(read)
            read.crop(tokens - self.ids.shape[1])
        return hf_offload.HybridCache.from_cache(read, self.model, row.policy, **row.options), logits


@torch.inference_mode()
def answer(
    reading: Reading, row: common.Row, setup: str, prompt: Prompt, sample: Sample, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """A row's greedy answer to a prompt, with what it took.

    Returns:
        answer; score, 0 to 100; new_tokens; answer_seconds; cpu_ratio, kept_share and retrieved_share of the
        cache (None: not a thing of this row).
    """
    model, ids = reading.model, reading.ids
    read = ids.shape[1] - (prompt.asked if setup == "sparse" else 0)
    cache, logits = reading.start(row, read)
    started = time.perf_counter()
    for place in range(read, ids.shape[1]):
        logits = model(ids[:, place, None], past_key_values=cache).logits[:, -1]
    first = logits.argmax(-1, keepdim=True)
    ends = model.generation_config.eos_token_id
    found = torch.cat([ids, first], 1)
    if sample.new_tokens > 1 and int(first) not in (ends if isinstance(ends, list) else [ends]):
        found = model.generate(
            found, attention_mask=torch.ones_like(found), past_key_values=cache, max_new_tokens=sample.new_tokens - 1,
            do_sample=False, stopping_criteria=stop_sequences_criteria(tokenizer, list(sample.until), ids.shape[1], 1),
        )  # fmt: skip
    new = found[0, ids.shape[1] :]
    text = postprocess_generated_text(tokenizer.decode(new, skip_special_tokens=True), list(sample.until), None)
    seconds = time.perf_counter() - started
    stats = {} if row.policy == CONTROL else cache.stats().as_dict()
    return {
        "score": sample.score(text),
        "answer": text,
        "new_tokens": len(new),
        "answer_seconds": seconds,
        "cpu_ratio": stats.get("cpu_ratio"),
        "kept_share": stats.get("kept_share"),
        "retrieved_share": (stats.get("retrievals") or {}).get("retrieved_share"),
    }
