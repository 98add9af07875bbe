"""The command of a benchmark whose rows lie on the hub, or in a folder: its options are the same for all of them."""

# Without postponed annotations: typer reads them, and one is made here for each benchmark.

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from common import RESULTS, DtypeOption, ModelOption, OutOption, ThreadsOption
from tasks.run import ROWS, ChatOption, ChunkOption, LimitOption, NewOption, Plan, RowOption, SetupOption, run
from tasks.samples import Sample, named

LeastOption = Annotated[int, typer.Option(min=0, help="Leave out shorter prompts.")]
MostOption = Annotated[
    int | None,
    typer.Option(min=16, help="Cut longer prompts in the middle [default: what the model has positions for]."),
]
DataOption = Annotated[
    Path | None, typer.Option(exists=True, file_okay=False, help="Rows from TASK.jsonl in a folder, not from the hub.")
]


def benchmark(
    title: str,
    known: Sequence[str],
    sets: dict[str, tuple[str, ...]],
    usual: str,
    out_name: str,
    read: Callable[[str, Path | None], list[Sample]],
) -> Callable[..., None]:
    """The function behind a benchmark's command line.

    Args:
        title: its name.
        known: its tasks; sets: names for several of them.
        usual: the tasks or sets that are run where none are named.
        out_name: file of the results.
        read: gives the samples of a task, from the hub or from a folder.
    """

    def main(
        tasks: Annotated[str, typer.Option(help=f"Tasks, or sets: {', '.join(sets)}.")] = usual,
        rows: RowOption = ROWS,
        setup: SetupOption = "dense",
        data_dir: DataOption = None,
        limit: LimitOption = None,
        min_tokens: LeastOption = 0,
        max_tokens: MostOption = None,
        new_tokens: NewOption = None,
        chat: ChatOption = True,
        chunk: ChunkOption = None,
        model: ModelOption = None,
        dtype: DtypeOption = "bfloat16",
        threads: ThreadsOption = 0,
        out: OutOption = RESULTS / out_name,
    ) -> None:
        plan = Plan(
            named(tasks, known, sets), rows, setup, limit, min_tokens, max_tokens, new_tokens, chat, chunk, model,
            dtype, threads, out,
        )  # fmt: skip
        run(title, plan, lambda task, tokenizer: read(task, data_dir), {"benchmark": title})

    main.__doc__ = f"Score policies on {title}."
    return main
