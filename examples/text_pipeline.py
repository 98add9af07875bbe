"""Transformers' text-generation pipeline with a model whose generations use a fresh cache each, by `enable`.

    python examples/text_pipeline.py
    python examples/text_pipeline.py --model Qwen/Qwen3-0.6B

All code that calls `generate()` works in this way, without changes.
"""

from typing import Annotated

import typer
from transformers import pipeline

import hf_offload


def main(
    model: Annotated[str | None, typer.Option(help="A chat model: hub name or folder (SmolLM2 if none).")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt in which a number is hidden.")] = 4000,
) -> None:
    lm, tokenizer = hf_offload.load_demo_model(model)
    generator = pipeline("text-generation", model=lm, tokenizer=tokenizer)
    needle = hf_offload.hide_number(hf_offload.demo_text("documentation"), tokenizer, tokens=tokens)
    messages = [{"role": "user", "content": needle.content}]

    hf_offload.enable(lm, "scout", budget=1024)
    answer = generator(messages, max_new_tokens=24, do_sample=False)[0]["generated_text"][-1]["content"]
    hf_offload.disable(lm)  # the model is as it was; `with hf_offload.enabled(lm, "scout", budget=1024):` does both

    print(f"hidden in {needle.prompt.shape[1]:,} tokens: {needle.number}")
    print(f"answer: {answer.strip()}")
    print("found" if needle.found_in(answer) else "not found")


if __name__ == "__main__":
    typer.run(main)
