"""A chat about a long document is killed in the middle of an answer, and goes on: nothing is read twice.

    python examples/kept_chat.py
    python examples/kept_chat.py --model Qwen/Qwen3-0.6B --file novel.txt --question "Who marries whom?"

What was read lies in the folder kept_chat; `hf-offload store ls --folder kept_chat` lists it. It holds the text: remove
it when you no longer want it.
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from transformers import TextStreamer

import hf_offload


def answer(model: str | None, file: Path | None, question: str) -> None:
    lm, tokenizer = hf_offload.load_demo_model(model, attn_implementation="hybrid_sparse")
    text = file.read_text(encoding="utf-8") if file else hf_offload.demo_text("documentation")[:24_000]
    messages = [{"role": "user", "content": f"{text}\n\n{question}"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    inputs = inputs.to(lm.device)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    start, count = time.perf_counter(), inputs["input_ids"].shape[1]
    store = hf_offload.PrefixStore("kept_chat", lm, "scout", tokenizer=tokenizer, min_seconds=0)
    with store, store.open(inputs["input_ids"]) as found:
        found.read()  # in chunks; a long prompt is saved while it is read
        store.flush()  # the rest of it, before the answer begins; by itself it is saved soon after
        seconds = time.perf_counter() - start
        print(f"[{found.tokens:,} of {count:,} tokens were read before; the answer begins after {seconds:.1f} s]")
        sys.stdout.flush()
        found.keep(lm.generate(**inputs, past_key_values=found.cache, max_new_tokens=100, streamer=streamer))


def main(
    model: Annotated[str | None, typer.Option(help="A chat model: hub name or folder (SmolLM2 if none).")] = None,
    file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Your document.")] = None,
    question: Annotated[str, typer.Option(help="Your question.")] = "What is this text about?",
    child: Annotated[bool, typer.Option("--child", hidden=True)] = False,
) -> None:
    if child:
        return answer(model, file, question)
    for kill in (True, False):
        with subprocess.Popen([sys.executable, *sys.argv, "--child"], stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                print(line, end="", flush=True)
                if kill:
                    process.kill()
                    print("[killed]")


if __name__ == "__main__":
    typer.run(main)
