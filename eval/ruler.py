"""Do policies score as well on RULER? lm-eval's tasks, built for the model's own tokenizer.

    python eval/ruler.py --tasks niah_single_1,niah_single_2 --lengths 4k --limit 20
    python eval/ruler.py --lengths 4k,8k,16k,32k,64k,128k --model Qwen/Qwen3-8B
    python eval/ruler.py --tasks qa_squad,qa_hotpot --data-dir sources --prose novel.txt

All 13 tasks (needles, variable tracking, common and frequent words, questions) by default, 100 samples of each and
length. Essays, SQuAD and HotpotQA come from the net; where there is none, `--prose` stands for the essays, and
`--data-dir` holds squad.json and hotpotqa.json in these sets' own form; a task whose file is not there is named in the
results and left out. A prose has its sentences found by nltk's Punkt without trained data, so needles lie elsewhere in
it than in the essays. Rows, setups, resuming and processes are those of longbench.py.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import random
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import typer
from nltk.tokenize.punkt import PunktSentenceTokenizer
from transformers import PreTrainedTokenizerBase

import common
from tasks.run import Asking, run
from tasks.samples import Sample, harness_samples, named

# Where lm-eval builds each task, and with what: module, function, and the function in it that takes `num_samples`.
_NEEDLES = ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3", "multivalue", "multiquery")
BUILDERS = {f"niah_{name}": ("niah_utils", f"niah_{name}", "generate_samples") for name in _NEEDLES} | {
    "vt": ("vt_utils", "get_vt_dataset", "sys_vartrack_w_noise_random"),
    "cwe": ("cwe_utils", "get_cw_dataset", "sys_word_pair_random"),
    "fwe": ("fwe_utils", "fwe_download", "sys_kwext"),
    "qa_squad": ("qa_utils", "get_squad", "generate_samples"),
    "qa_hotpot": ("qa_utils", "get_hotpotqa", "generate_samples"),
}
SETS = {"all13": tuple(BUILDERS), "niah": tuple(name for name in BUILDERS if name.startswith("niah_"))}
SOURCES = {"qa_squad": "squad.json", "qa_hotpot": "hotpotqa.json"}
SEED = 42
ALL = Asking(tasks="all13", limit=100)


def samples_of(
    task: str, length: int, tokenizer: PreTrainedTokenizerBase, samples: int, folder: Path | None, prose: Path | None
) -> list[Sample]:
    """Samples of a task of so many tokens, prompt and answer; the same ones with the same tokenizer and sources.

    A folder has squad.json and hotpotqa.json (no samples of a task whose file is not there), `prose` is for the essays;
    without them they are downloaded.
    """
    name, function, builder = BUILDERS[task]
    module = importlib.import_module(f"lm_eval.tasks.ruler.{name}")
    build = getattr(module, builder)

    def fewer(*args: Any, **options: Any) -> Any:
        return build(*args, **options | {"num_samples": min(options.get("num_samples", samples), samples)})

    def question(_: Any, prompt: str) -> str:
        return prompt.rstrip().rpartition("\n")[2]

    changes: dict[str, Any] = {"get_tokenizer": lambda *_, **__: tokenizer, builder: fewer}
    if folder is not None and task in SOURCES:
        source = folder / SOURCES[task]
        if not source.exists():
            return []
        changes["download_json"] = lambda _: json.loads(source.read_text(encoding="utf-8"))
    with contextlib.ExitStack() as stack:
        if prose is not None and name == "niah_utils":
            words, haystack = prose.read_text(encoding="utf-8").split(), module.get_haystack
            changes["get_haystack"] = lambda **kind: words if "essay" in kind.values() else haystack(**kind)
            sentences = functools.cache(PunktSentenceTokenizer().tokenize)
            stack.enter_context(patch("lm_eval.tasks.ruler.prepare_niah.cached_sent_tokenize", sentences))
        stack.enter_context(patch.multiple(module, **changes))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))  # one of them prints every length that it tries
        random.seed(SEED)
        np.random.seed(SEED)
        if task == "cwe":
            module.RNG.seed(SEED)
        rows = getattr(module, function)(max_seq_lengths=[length])["test"]
    harness_name = task if task.startswith("niah") else f"ruler_{task}"
    return harness_samples("ruler", harness_name, str(length), question, rows, task=named_length(task, length))


def named_length(task: str, length: int) -> str:
    """The name of a task at a length, in tables."""
    return f"{task}, {length // 1024}k" if length % 1024 == 0 else f"{task}, {length}"


def main(
    lengths: Annotated[str, typer.Option(help="Tokens of prompt and answer, k is 1,024.")] = "4k",
    *,
    asking: Asking = ALL,
    setting: common.TextSetting,
) -> None:
    """Score policies on RULER."""
    pairs = [(task, length) for length in common.numbers(lengths) for task in named(asking.tasks, SETS)]
    wanted = {named_length(*pair): pair for pair in pairs}

    def read(name: str, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        return samples_of(*wanted[name], tokenizer, asking.limit, asking.data_dir, setting.prose)

    run("RULER", list(wanted), read, asking, setting, prose=setting.source)


if __name__ == "__main__":
    common.command(main)()
