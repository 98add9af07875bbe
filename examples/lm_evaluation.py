"""Evaluation with lm-eval: its model `hf_offload` generates with a HybridCache.

    pip install '.[eval]'
    python examples/lm_evaluation.py
    python examples/lm_evaluation.py --model Qwen/Qwen3-0.6B --policy quest --budget 512

Run it from the root of the checkout: the task in examples/tasks/capitals.yaml reads a file of eight capitals and needs
no hub. The same from lm-eval's command line, with any of its tasks:

    python -m hf_offload.lm_eval run --model hf_offload --tasks niah_single_2 \
        --model_args pretrained=Qwen/Qwen3-0.6B,policy=scout,budget=1024
"""

from pathlib import Path
from typing import Annotated

import typer
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

import hf_offload
import hf_offload.lm_eval  # registers the model `hf_offload` with lm-eval

TASKS = Path(__file__).parent / "tasks"


def main(
    model: Annotated[str | None, typer.Option(help="Hub name, folder or GGUF file (SmolLM2 if none).")] = None,
    policy: Annotated[str, typer.Option(help="What a step attends; `full` to compare with.")] = "scout",
    budget: Annotated[int, typer.Option(help="Tokens that each KV head attends in a step.")] = 1024,
) -> None:
    lm, tokenizer = hf_offload.load_demo_model(model)
    knobs = {} if policy == "full" else {"budget": budget}
    results = simple_evaluate(
        model="hf_offload",
        model_args={"pretrained": lm, "tokenizer": tokenizer, "policy": policy, "batch_size": 4, **knobs},
        tasks=["capitals"],
        task_manager=TaskManager(include_path=str(TASKS)),
        bootstrap_iters=0,
    )
    for task, scores in results["results"].items():
        print(
            f"{task}: {scores['exact_match,none']:.0%} of {results['n-samples'][task]['effective']} answers are right"
        )
    stats = results["config"]["hf_offload"]["stats"]
    print(f"{policy}: {stats['steps']} decode steps in {stats['caches']} caches")


if __name__ == "__main__":
    typer.run(main)
