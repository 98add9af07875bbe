"""Many questions about one document that is read once: each question continues from a fork of its cache.

    python examples/many_questions.py
    python examples/many_questions.py --model Qwen/Qwen3-0.6B --file novel.txt --question "Who marries whom?"

The cache is saved in the folder saved_caches. A second run of the same command loads it and skips the document.
"""

import hashlib
import inspect
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

import hf_offload

FACTS = ["The baker's number is 7482915.", "The captain's ship is called Argo.", "The pilot's cat is called Mathilda."]
QUESTIONS = ["What is the baker's number?", "What is the captain's ship called?", "What is the pilot's cat called?"]


def main(
    model: Annotated[str | None, typer.Option(help="A chat model: hub name or folder (SmolLM2 if none).")] = None,
    file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Your document.")] = None,
    question: Annotated[list[str], typer.Option(help="Your question; give it several times for more.")] = QUESTIONS,
) -> None:
    lm, tokenizer = hf_offload.load_demo_model(model, attn_implementation="hybrid_sparse")
    if file:
        document = file.read_text(encoding="utf-8")
    else:
        manual, facts = hf_offload.demo_text("documentation"), enumerate(FACTS)
        document = "".join(f"{manual[4000 * i : 4000 * (i + 1)]}\n\n{fact}\n\n" for i, fact in facts)
    messages = [{"role": "user", "content": f"{document}\n\n<question>"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    before, _, after = prompt.rpartition("<question>")
    prefix = tokenizer(before, add_special_tokens=False, return_tensors="pt").to(lm.device)
    name = "cache" if "cache" in inspect.signature(lm.forward).parameters else "past_key_values"  # by version
    start = time.perf_counter()
    folder = Path("saved_caches") / hashlib.sha256(f"{model} {before}".encode()).hexdigest()[:16]
    if not folder.exists():
        cache = hf_offload.HybridCache(lm, "scout", budget=1024, progress=True)
        lm.generate(**prefix, **{name: cache}, max_new_tokens=1)
        cache.save(folder)
    cache = hf_offload.HybridCache.load(folder, lm)
    print(f"{cache.get_seq_length():,} tokens are cached after {time.perf_counter() - start:.1f} s ({folder})")

    for text in question:
        start = time.perf_counter()
        question_ids = tokenizer(text + after, add_special_tokens=False, return_tensors="pt").input_ids.to(lm.device)
        ids = torch.cat([prefix.input_ids, question_ids], dim=1)  # generate() feeds those that the cache does not hold
        out = lm.generate(ids, attention_mask=torch.ones_like(ids), **{name: cache.fork()}, max_new_tokens=48)
        answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        print(f"\n{text}\n{answer.strip()}\n[{time.perf_counter() - start:.1f} s]")


if __name__ == "__main__":
    typer.run(main)
