"""Many questions about one document that is read once: each question continues from what a store has kept of it.

    python examples/many_questions.py
    python examples/many_questions.py --model Qwen/Qwen3-0.6B --file novel.txt --question "Who marries whom?"

What was read lies in the folder kept_documents. A second run of the same command finds it there and skips the document.
"""

import inspect
import time
from pathlib import Path
from typing import Annotated

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
    name = "cache" if "cache" in inspect.signature(lm.forward).parameters else "past_key_values"  # by version
    with hf_offload.PrefixStore("kept_documents", lm, "scout", budget=1024, min_seconds=0) as store:
        for text in question:
            start = time.perf_counter()
            messages = [{"role": "user", "content": f"{document}\n\n{text}"}]
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            ).to(lm.device)
            with store.open(inputs["input_ids"]) as found:
                out = lm.generate(**inputs, **{name: found.cache}, max_new_tokens=48)
            count = inputs["input_ids"].shape[1]
            answer = tokenizer.decode(out[0, count:], skip_special_tokens=True)
            print(f"\n{text}\n{answer.strip()}")
            print(f"[{time.perf_counter() - start:.1f} s; {found.tokens:,} of {count:,} tokens were read before]")


if __name__ == "__main__":
    typer.run(main)
