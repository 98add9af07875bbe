"""Chat about a long document in the terminal, with streamed answers.

    python examples/chat.py
    python examples/chat.py --model Qwen/Qwen3-0.6B --file novel.txt

The document is read once. Each turn is appended to the same cache, so a question prefills its own tokens only.
Without --file the document is a part of Python's manual in which a number is hidden. An empty line ends the chat.
"""

import inspect
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import TextStreamer

import hf_offload


def main(
    model: Annotated[str | None, typer.Option(help="A chat model: hub name or folder (SmolLM2 if none).")] = None,
    file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Your document.")] = None,
    answer: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 256,
) -> None:
    lm, tokenizer = hf_offload.load_demo_model(model, attn_implementation="hybrid_sparse")
    if file:
        document = file.read_text(encoding="utf-8")
    else:
        manual = hf_offload.demo_text("documentation")
        document = hf_offload.hide_number(manual, tokenizer, tokens=4000, question="").content
        print("Try: What is the secret number of the lighthouse keeper? Answer with the number only.")
    cache = hf_offload.HybridCache(lm, "scout", budget=1024, progress=True)
    name = "cache" if "cache" in inspect.signature(lm.forward).parameters else "past_key_values"  # by version
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    messages = [{"role": "user", "content": f"I have questions about this document:\n\n{document}"}]
    messages += [{"role": "assistant", "content": "I have read it. What is your question?"}]
    ids = tokenizer.apply_chat_template(messages, return_tensors="pt")["input_ids"].to(lm.device)
    print(f"Reading {ids.shape[1]:,} tokens ...")
    with torch.inference_mode():
        lm(ids, **{name: cache}, logits_to_keep=1)
    while question := input("\nYou: ").strip():
        messages.append({"role": "user", "content": question})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt").to(lm.device)
        length = prompt["input_ids"].shape[1]
        # A chat template may change earlier turns: what follows the first token that differs is read again.
        most = min(cache.get_seq_length(), length - 1)
        same = int((ids[0, :most] == prompt["input_ids"][0, :most]).cumprod(0).sum())
        cache.crop(same - cache.get_seq_length())
        start = time.perf_counter()
        ids = lm.generate(**prompt, **{name: cache}, max_new_tokens=answer, streamer=streamer)
        seconds = time.perf_counter() - start
        messages.append({"role": "assistant", "content": tokenizer.decode(ids[0, length:], skip_special_tokens=True)})
        print(f"[{same:,} tokens cached, {length - same} read, {ids.shape[1] - length} written in {seconds:.1f} s]")


if __name__ == "__main__":
    typer.run(main)
