"""Summaries of several texts in one batch, padded on the left.

    python examples/batch_summaries.py
    python examples/batch_summaries.py --model Qwen/Qwen3-0.6B first.txt second.txt third.txt

Texts may differ in length: the attention mask marks the padding, which no query attends.
Without files the texts are three parts of Python's manual.
"""

import inspect
import time
from pathlib import Path
from typing import Annotated

import typer

import hf_offload


def main(
    files: Annotated[list[Path] | None, typer.Argument(exists=True, dir_okay=False, help="Your texts.")] = None,
    model: Annotated[str | None, typer.Option(help="A chat model: hub name or folder (SmolLM2 if none).")] = None,
    answer: Annotated[int, typer.Option(help="Most tokens of a summary.")] = 60,
) -> None:
    lm, tokenizer = hf_offload.load_demo_model(model, attn_implementation="hybrid_sparse")
    if files:
        texts = {file.name: file.read_text(encoding="utf-8") for file in files}
    else:
        manual = hf_offload.demo_text("documentation")
        parts = {"short": slice(0, 1100), "longer": slice(12_400, 16_900), "long": slice(19_000, 32_000)}
        texts = {name: manual[part] for name, part in parts.items()}

    tokenizer.padding_side = "left"  # every row ends where its summary begins
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    prompts = [
        [{"role": "user", "content": f"{text}\n\nSummarise this text in one sentence."}] for text in texts.values()
    ]
    inputs = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    ).to(lm.device)

    cache = hf_offload.HybridCache(lm, "scout", budget=512)
    name = "cache" if "cache" in inspect.signature(lm.forward).parameters else "past_key_values"  # by version
    start = time.perf_counter()
    out = lm.generate(**inputs, **{name: cache}, max_new_tokens=answer, do_sample=False)
    seconds = time.perf_counter() - start

    lengths = inputs["attention_mask"].sum(dim=1).tolist()
    summaries = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    for name, length, summary in zip(texts, lengths, summaries, strict=True):
        print(f"{name}, {length:,} tokens:\n  {' '.join(summary.split())}\n")
    print(f"{len(texts)} summaries in {seconds:.1f} s; each KV head attended at most 512 tokens of a text in a step")


if __name__ == "__main__":
    typer.run(main)
