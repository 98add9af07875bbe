"""Several processes, each with the whole model, a cache of its own and its share of the prompts.

    torchrun --nproc-per-node 2 examples/data_parallel.py
    accelerate launch --num_processes 4 examples/data_parallel.py --model Qwen/Qwen3-8B --dtype bfloat16

Processes do not talk while they generate; `cache.reset()` lets one cache serve prompt after prompt.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from accelerate import PartialState
from accelerate.utils import gather_object

import hf_offload
from hf_offload import assets

QUESTIONS = ["Name a colour.", "What is two and two?", "Which animal barks?", "What is the capital of France?"]


def main(
    model: Annotated[str | None, typer.Option(help="hub name or folder; SmolLM2-135M without it")] = None,
    dtype: Annotated[str, typer.Option(help="of the model")] = "float32",
) -> None:
    state = PartialState(cpu=not torch.cuda.is_available())  # left to itself it would not see the others on a CPU
    network, tokenizer = assets.load_demo_model(
        model, attn_implementation="hybrid_sparse", dtype=dtype, device=state.device
    )
    cache = hf_offload.HybridCache(network, "scout", budget=1024)
    answers = []
    with state.split_between_processes(QUESTIONS) as share:
        for question in share:
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
            ).to(state.device)
            cache.reset()
            out = network.generate(**ids, past_key_values=cache, max_new_tokens=16, do_sample=False)
            answer = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
            answers.append(f"process {state.process_index}: {question} {answer}")
    answers = gather_object(answers)
    if state.is_main_process:
        print(*answers, sep="\n")
    state.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
