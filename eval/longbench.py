"""Do policies score as well on LongBench? lm-eval's prompts and metrics, one reading of a prompt for many rows.

    python eval/longbench.py --tasks scout8 --limit 20
    python eval/longbench.py --tasks qasper,hotpotqa --row full --row scout:budget=1024 --setup dense,sparse
    python eval/longbench.py --tasks all21 --data-dir LongBench/data --model Qwen/Qwen3-8B --min-tokens 8192
    accelerate launch --num_processes 4 eval/longbench.py --tasks fluxion14 --model Qwen/Qwen3-8B

Rows come from the hub, or from LongBench's own files, TASK.jsonl, in a folder; a task without a file there is named in
the results and left out. Prompts that are too long lose their middle, as in LongBench. A row of the comparison is a
policy with knobs; `full` attends everything through a HybridCache, `dynamic` is Transformers' own cache and attention.
The literature mixes two setups, dense and sparse questions; the tables say which is which, and what they are.

With one memory a prompt is read once for all rows but those that learn from its queries (`hgca`, `h2o`, `infinigen`,
`fluxion`) and `dynamic`: a further row costs its answers only. Each answer is kept in OUT.jsonl at once; the same
command goes on where it was stopped, and rows, tasks, setups or a larger --limit can be added to what is there.
"""

from __future__ import annotations

from typing import Any

from datasets import Dataset

import common
from tasks.run import Asking, run
from tasks.samples import Sample, harness_samples, named, read_rows

SETS = {
    "all21": (
        "narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh", "hotpotqa", "2wikimqa", "musique", "dureader",
        "gov_report", "qmsum", "multi_news", "vcsum", "trec", "triviaqa", "samsum", "lsht", "passage_count",
        "passage_retrieval_en", "passage_retrieval_zh", "lcc", "repobench-p",
    ),
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
SCOUT = Asking(tasks="scout8")


def samples_of(task: str, rows: list[dict[str, Any]] | None) -> list[Sample]:
    """The samples of a task, of rows with LongBench's own fields or (None) of those of the hub."""
    if rows == []:
        return []
    # lm-eval's prompts call `input` the question, as its copy on the hub does.
    given = rows and Dataset.from_list([{"question": row["input"], **row} for row in rows])

    def question(row: dict[str, Any], prompt: str) -> str:
        return prompt.rpartition(row["context"])[2]

    name = f"longbench_{task}"
    return harness_samples("longbench", name, "score", question, given, task=task, chat=task not in BARE)


def main(*, asking: Asking = SCOUT, setting: common.Setting) -> None:
    """Score policies on LongBench."""

    def read(task: str, _: Any) -> list[Sample]:
        return samples_of(task, asking.data_dir and read_rows(asking.data_dir, task))

    run("LongBench", named(asking.tasks, SETS), read, asking, setting)


if __name__ == "__main__":
    common.command(main)()
