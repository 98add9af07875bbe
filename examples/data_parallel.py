"""Data parallelism: several processes, each with the whole model, its own cache and its share of the questions.

    torchrun --nproc-per-node 2 examples/data_parallel.py
    accelerate launch --num_processes 4 examples/data_parallel.py --model Qwen/Qwen3-8B --dtype bfloat16

The processes exchange nothing while they generate. `cache.reset()` empties the cache before each question.
"""

import inspect
from typing import Annotated

import torch
import typer
from accelerate import PartialState
from accelerate.utils import gather_object

import hf_offload

QUESTIONS = ["Name a colour.", "What is two and two?", "Which animal barks?", "What is the capital of France?"]


def main(
    model: Annotated[str | None, typer.Option(help="A chat model: hub name or folder (SmolLM2 if none).")] = None,
    dtype: Annotated[str, typer.Option(help="Weights and activations.")] = "float32",
) -> None:
    state = PartialState(cpu=not torch.cuda.is_available())
    lm, tokenizer = hf_offload.load_demo_model(
        model, attn_implementation="hybrid_sparse", dtype=dtype, device=state.device
    )
    cache = hf_offload.HybridCache(lm, "scout", budget=1024)
    name = "cache" if "cache" in inspect.signature(lm.forward).parameters else "past_key_values"  # by version
    answers = []
    with state.split_between_processes(QUESTIONS) as share:
        for question in share:
            messages = [{"role": "user", "content": question}]
            inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
            inputs = inputs.to(state.device)
            cache.reset()
            out = lm.generate(**inputs, **{name: cache}, max_new_tokens=16, do_sample=False)
            answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            answers.append(f"process {state.process_index}: {question} {answer}")
    answers = gather_object(answers)
    if state.is_main_process:
        print(*answers, sep="\n")
    state.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
