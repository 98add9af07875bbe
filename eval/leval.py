"""Do policies score as well on L-Eval's 13 open-ended tasks?

    python eval/leval.py --tasks financial_qa,gov_report_summ --limit 20 --model Qwen/Qwen3-8B
    python eval/leval.py --data-dir LEval/LEval-data/Open-ended-tasks --min-tokens 3072

A document has several instructions, each of which is a sample: the document, the instruction, and how many words the
reference has, which the score depends on. As L-Eval says of each document, questions are scored by F1 and summaries by
ROUGE-L; documents that are meant for a judge are left out. Rows come from the hub, or from L-Eval's own files,
TASK.jsonl, in a folder. Rows, setups, resuming and processes are those of longbench.py.
"""

from __future__ import annotations

from functools import partial

from datasets import load_dataset
from lm_eval.tasks.longbench.metrics import qa_f1_score
from rouge_score.rouge_scorer import RougeScorer

import common
from tasks.run import Asking, run
from tasks.samples import Sample, named, read_rows

SETS = {
    "open13": (
        "financial_qa", "gov_report_summ", "legal_contract_qa", "meeting_summ", "multidoc_qa", "narrative_qa",
        "natural_question", "news_summ", "paper_assistant", "patent_summ", "review_summ", "scientific_qa",
        "tv_show_summ",
    ),
}  # fmt: skip
ALL = Asking(tasks="open13")
NEW_TOKENS = 512
ROUGE = RougeScorer(["rougeL"], use_stemmer=True)
METRICS = {
    "f1": lambda reference, answer: 100 * qa_f1_score(answer, reference),
    "rouge": lambda reference, answer: 100 * ROUGE.score(reference, answer)["rougeL"].fmeasure,
}
"""As the rows name them: F1 of words, and ROUGE-L; 0 to 100."""


def samples_of(task: str, asking: Asking) -> list[Sample]:
    """The samples of a task: one for each instruction of each row that an n-gram metric is meant for."""
    rows = read_rows(asking.data_dir, task) if asking.data_dir else load_dataset("L4NLP/LEval", task, split="test")
    found = []
    for number, row in enumerate(rows):
        if row["evaluation"] not in METRICS:
            continue
        for place, (instruction, reference) in enumerate(zip(row["instructions"], row["outputs"], strict=True)):
            question = f"{instruction.strip()}\nAnswer in about {len(reference.split())} words."
            prompt = f"Read this document.\n\n{row['input']}\n\nFollow this instruction about it: {question}"
            score = partial(METRICS[row["evaluation"]], reference)
            found.append(Sample(task, f"{number}.{place}", prompt, question, NEW_TOKENS, score))
    return found


def main(*, asking: Asking = ALL, setting: common.Setting) -> None:
    """Score policies on L-Eval."""
    run("L-Eval", named(asking.tasks, SETS), lambda task, _: samples_of(task, asking), asking, setting)


if __name__ == "__main__":
    common.command(main)()
