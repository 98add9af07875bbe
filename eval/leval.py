"""Do policies score as well on L-Eval's 13 open-ended tasks?

    python eval/leval.py --tasks financial_qa,gov_report_summ --limit 20 --model Qwen/Qwen3-8B
    python eval/leval.py --data-dir LEval/LEval-data/Open-ended-tasks --min-tokens 3072

A document has several instructions, each of which is a sample: the document, the instruction, and how many words the
reference has, which the score depends on. As L-Eval says of each document, questions are scored by F1 and summaries by
ROUGE-L; documents that are meant for a judge are left out. Rows come from the hub, or from L-Eval's own files,
TASK.jsonl, in a folder. Rows, setups, resuming and processes are those of longbench.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from datasets import load_dataset
from lm_eval.tasks.longbench.metrics import qa_f1_score
from rouge_score.rouge_scorer import RougeScorer

import common
from tasks.run import Asking, DataOption, run
from tasks.samples import Sample, named, read_rows

TASKS = (
    "financial_qa", "gov_report_summ", "legal_contract_qa", "meeting_summ", "multidoc_qa", "narrative_qa",
    "natural_question", "news_summ", "paper_assistant", "patent_summ", "review_summ", "scientific_qa", "tv_show_summ",
)  # fmt: skip
SETS = {"open13": TASKS}
NEW_TOKENS = 512
FIELDS = ("input", "instructions", "outputs", "evaluation")
ROUGE = RougeScorer(["rougeL"], use_stemmer=True)
METRICS = {"f1": qa_f1_score, "rouge": lambda answer, reference: ROUGE.score(reference, answer)["rougeL"].fmeasure}
"""As the rows name them: F1 of words, and ROUGE-L; 0 to 1, of an answer and its reference."""


def samples_of(task: str, rows: Iterable[dict[str, Any]]) -> list[Sample]:
    """The samples of a task: one for each instruction of each row that an n-gram metric is meant for."""
    found = []
    for number, row in enumerate(rows):
        if row["evaluation"] not in METRICS:
            continue
        for place, (instruction, reference) in enumerate(zip(row["instructions"], row["outputs"], strict=True)):
            question = f"{instruction.strip()}\nAnswer in about {len(reference.split())} words."

            def score(answer: str, reference: str = reference, metric: str = row["evaluation"]) -> float:
                return 100 * float(METRICS[metric](answer, reference))

            prompt = f"Read this document.\n\n{row['input']}\n\nFollow this instruction about it: {question}"
            found.append(Sample(task, f"{number}.{place}", prompt, question, NEW_TOKENS, score))
    return found


def read(task: str, data_dir: Path | None) -> list[Sample]:
    """The samples of a task, from the hub or from L-Eval's own files in a folder."""
    rows = load_dataset("L4NLP/LEval", task, split="test") if data_dir is None else read_rows(data_dir, task, FIELDS)
    return samples_of(task, rows)


def main(
    tasks: Annotated[str, typer.Option(help=f"Tasks, or sets: {', '.join(SETS)}.")] = "open13",
    data_dir: DataOption = None,
    *,
    asking: Asking,
    setting: common.Setting,
) -> None:
    """Score policies on L-Eval."""
    run("L-Eval", named(tasks, TASKS, SETS), lambda task, _: read(task, data_dir), asking, setting)


if __name__ == "__main__":
    common.command(main)()
