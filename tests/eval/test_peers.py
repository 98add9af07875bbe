"""`eval/peers.py`: the same tokens for all implementations, complete rows, named failures."""

from __future__ import annotations

import csv
import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from letters import letters
from tiny import tiny_model
from typer.testing import CliRunner

import common
import hf_offload
import peers


class Here:
    """A way in this process."""

    def __init__(self, way: str, settings: peers.Settings) -> None:
        self.way, self.peak = way, 3 * 2**20
        self.serving = peers.WithTransformers(way, settings)
        self.seen: list[int] = []

    def call(self, method: str, *arguments: Any) -> Any:
        if method == "prefill":
            self.seen = arguments[0].tolist()
        else:
            self.seen += arguments[0]
        return getattr(self.serving, method)(*arguments)

    def close(self) -> None:
        PASSED.append(self)


PASSED: list[Here] = []


def test_every_way_reads_the_same_tokens_and_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PASSED.clear()
    monkeypatch.setattr(common, "load", lambda *_: (tiny_model("llama"), letters()))
    monkeypatch.setattr(peers, "tokenizer_of", lambda _: letters())
    monkeypatch.setattr(peers, "Process", Here)
    out, picture = tmp_path / "peers.csv", tmp_path / "peers.svg"
    options = ["--contexts", "40,320", "--budget", "192", "--steps", "2", "--rounds", "2", "--dtype", "float32"]
    options += ["--ways", "hf_offload,DynamicCache,StaticCache", "--out", str(out), "--picture", str(picture)]
    done = CliRunner().invoke(common.command(peers.main), options, catch_exceptions=False)
    assert done.exit_code == 0
    found = list(csv.DictReader(out.open()))
    assert [(row["way"], row["context"]) for row in found] == [
        (way, context) for context in ("40", "320") for way in ("hf_offload", "DynamicCache", "StaticCache")
    ]
    assert all(float(row["peak_mib"]) == 3 and float(row["p50"]) > 0 and float(row["prefill_s"]) > 0 for row in found)
    kl = {(row["way"], row["context"]): float(row["kl"]) for row in found}
    assert kl["DynamicCache", "320"] == 0
    assert abs(kl["StaticCache", "320"]) < 1e-6
    assert abs(kl["hf_offload", "40"]) < 1e-6  # the budget covers it
    assert kl["hf_offload", "320"] > 1e-5  # and here it does not
    assert len({tuple(way.seen) for way in PASSED}) == 1
    assert len(PASSED[0].seen) == 320 + 2 * (peers.WARM_UP + 2)
    assert "<svg" in picture.read_text()


def test_kl_is_that_of_the_definition() -> None:
    full, other = np.log([[0.5, 0.5], [0.9, 0.1]]), np.log([[0.25, 0.75], [0.9, 0.1]])
    want = (0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2
    assert peers.mean_kl(full, other) == pytest.approx(want)


def test_a_way_that_fails_says_which_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "load", lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match="DynamicCache: ZeroDivisionError"):
        peers.begin("DynamicCache", peers.Settings(dtype="float32", threads=1))


def test_a_process_says_what_it_takes_at_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []

    class Greedy:
        def prefill(self, size: int) -> int:
            # Memory of the system itself: what the allocator holds, freed by an earlier test, would add nothing.
            pages = mmap.mmap(-1, size)
            held.append(pages)
            np.frombuffer(pages, np.uint8)[:] = 1
            return size

    monkeypatch.setattr(peers, "_serving", Greedy())
    monkeypatch.setattr(peers, "_before", common.resident_bytes())
    size, peak = peers.serve("prefill", 64 << 20)
    assert size <= peak + (8 << 20)


def test_an_unknown_way_is_refused() -> None:
    done = CliRunner().invoke(common.command(peers.main), ["--ways", "vllm"])
    assert done.exit_code == 2
    assert "vllm" in done.output


@pytest.mark.slow
def test_the_weights_for_llama_are_those_of_transformers(tmp_path: Path) -> None:
    """The file that is written holds the very numbers that Transformers computes with in bfloat16."""
    import gguf
    import torch

    model, _ = hf_offload.load_demo_model(dtype=torch.bfloat16)
    target = tmp_path / "bfloat16.gguf"
    peers.write_bfloat16(peers.find_smollm2(), target)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(target).tensors}
    for name, weight in (
        ("blk.3.ffn_up.weight", model.model.layers[3].mlp.up_proj.weight),
        ("token_embd.weight", model.model.embed_tokens.weight),
    ):
        kept = torch.from_numpy(gguf.dequantize(tensors[name].data, tensors[name].tensor_type).copy())
        assert torch.equal(kept.bfloat16(), weight.data)
