"""Do policies score as well on LongBench? lm-eval's prompts and metrics, one reading of a prompt for many rows.

    python eval/longbench.py --tasks scout8 --limit 20
    python eval/longbench.py --tasks qasper,hotpotqa --row full --row scout:budget=1024 --setup dense,sparse
    python eval/longbench.py --tasks all21 --data-dir LongBench/data --model Qwen/Qwen3-8B --min-tokens 8192
    accelerate launch --num_processes 4 eval/longbench.py --tasks fluxion14 --model Qwen/Qwen3-8B

Rows come from the hub, or from LongBench's own files, TASK.jsonl, in a folder; a task without a file there is named in
the results and left out. Prompts that are too long lose their middle, as in LongBench. A row of the comparison is a
policy with knobs; `full` attends everything through a HybridCache, `dynamic` is Transformers' own cache and attention.

The literature mixes two setups. dense: the prompt is attended exactly, question and all, as `generate()` does it.
sparse: the context is attended exactly, and the question is fed token by token, so that the policy must choose for it
as for the answer. The tables say which is which.

With one memory a prompt is read once for all rows but those that learn from its queries (`hgca`, `h2o`, `infinigen`,
`fluxion`) and `dynamic`: a further row costs its answers only. Each answer is kept in OUT.jsonl at once; the same
command goes on where it was stopped, and rows, tasks, setups or a larger --limit can be added to what is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from datasets import Dataset

import common
from tasks.run import Asking, DataOption, run
from tasks.samples import Sample, harness_task, named, read_rows, score_of

TASKS = (
    "narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh", "hotpotqa", "2wikimqa", "musique", "dureader",
    "gov_report", "qmsum", "multi_news", "vcsum", "trec", "triviaqa", "samsum", "lsht", "passage_count",
    "passage_retrieval_en", "passage_retrieval_zh", "lcc", "repobench-p",
)  # fmt: skip
SETS = {
    "all21": TASKS,
    # ScoutAttention, section 4.2
    "scout8": (
        "qasper", "narrativeqa", "2wikimqa", "dureader", "gov_report", "qmsum", "samsum", "passage_retrieval_en",
    ),
    # Fluxion, table 2; section 8.1 counts four Chinese tasks: MultifieldQA and PassageRetrieval are two.
    "fluxion14": (
        "qasper", "multifieldqa_zh", "hotpotqa", "2wikimqa", "multi_news", "triviaqa", "samsum", "passage_count",
        "passage_retrieval_zh", "lcc", "musique", "dureader", "qmsum", "vcsum",
    ),
}  # fmt: skip
# LongBench asks for these without a chat template: examples of their kind, or code, come first.
BARE = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
FIELDS = ("input", "context", "answers")
CLASSES = ("trec", "lsht")
"""Tasks whose metric also asks for `all_classes`."""


def samples_of(task: str, rows: list[dict[str, Any]] | None) -> list[Sample]:
    """The samples of a task, of rows with LongBench's own fields or (None) of those of the hub."""
    if rows == []:
        return []

    def dataset(**_: Any) -> dict[str, Dataset]:
        # lm-eval's prompts call `input` the question, as its copy on the hub does.
        return {"test": Dataset.from_list([{"question": row["input"], **row} for row in rows or []])}

    source = harness_task("longbench", f"longbench_{task}", None if rows is None else dataset)
    limits = source.config.generation_kwargs
    found = []
    for number, doc in enumerate(source.test_docs()):
        prompt = source.doc_to_text(doc)
        found.append(Sample(
            task=task, name=str(doc.get("_id", number)), prompt=prompt,
            question=prompt.rpartition(doc["context"])[2] if doc["context"] else prompt,
            new_tokens=limits["max_gen_toks"], score=score_of(source, doc, "score"),
            until=tuple(limits["until"]), chat=task not in BARE,
        ))  # fmt: skip
    return found


def read(task: str, data_dir: Path | None) -> list[Sample]:
    """The samples of a task, from the hub or from LongBench's own files in a folder."""
    if data_dir is None:
        return samples_of(task, None)
    return samples_of(task, read_rows(data_dir, task, (*FIELDS, *(["all_classes"] if task in CLASSES else []))))


def main(
    tasks: Annotated[str, typer.Option(help=f"Tasks, or sets: {', '.join(SETS)}.")] = "scout8",
    data_dir: DataOption = None,
    *,
    asking: Asking,
    setting: common.Setting,
) -> None:
    """Score policies on LongBench."""
    run("LongBench", named(tasks, TASKS, SETS), lambda task, _: read(task, data_dir), asking, setting)


if __name__ == "__main__":
    common.command(main)()
