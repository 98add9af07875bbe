"""Errors for wrong knobs, files, folders and memory: each names cause and remedy."""

from __future__ import annotations

import dataclasses
import errno
import inspect
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import in_fork
from safetensors.torch import save_file
from tiny import feed, prefill, prompt
from transformers import PreTrainedModel

from hf_offload import ConstantPredictor, HybridCache
from hf_offload.policies.registry import POLICIES

OF_CACHES = [each for each in inspect.signature(HybridCache).parameters.values() if each.kind is each.KEYWORD_ONLY]
OF_POLICIES = [(name, each) for name, cls in POLICIES.items() for each in dataclasses.fields(cls) if each.init]
DEFAULTS: dict[tuple[str, str], Any] = {("full", each.name): each.default for each in OF_CACHES}
DEFAULTS |= {(name, each.name): each.default for name, each in OF_POLICIES}
"""The knobs of caches and policies."""
NEVER: dict[str, Any] = {
    "nan": math.nan, "-inf": -math.inf, "-1": -1, "2.5": 2.5, "text": "abc", "bytes": b"abc", "list": [1.5],
    "dict": {"a": 1}, "object": object(), "tensor": torch.ones(3), "10**30": 10**30, "10**5000": 10**5000,
    "inf": math.inf,
}  # fmt: skip
"""What no knob may be but those that follow."""
MEANT: dict[tuple[str, str], set[str]] = {
    ("full", "timeout"): {"2.5"},
    ("hgca", "beta"): {"2.5"},
    ("infinigen", "alpha"): {"2.5", "inf"},
    **{(policy, "dense"): {"a switch or none"} for policy in ("scout", "quest", "fixed_hybrid", "window")},
    ("fluxion", "predictor"): {"text"},  # a path
}
LARGEST = 2**31 - 1


def make(model: PreTrainedModel, policy: str, **knobs: Any) -> HybridCache:
    if policy == "fluxion":
        knobs = {"predictor": ConstantPredictor(), **knobs}
    if "device_budget" in knobs:
        knobs = {"tier": "split", **knobs}
    return HybridCache(model, policy, **knobs)


# --- knobs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "knob"), DEFAULTS)
def test_a_wrong_value_is_refused_by_name(llama: PreTrainedModel, policy: str, knob: str) -> None:
    wrong = NEVER | {"a switch or none": 1 if isinstance(DEFAULTS[policy, knob], bool) else True}
    for value in (value for name, value in wrong.items() if name not in MEANT.get((policy, knob), ())):
        with pytest.raises(ValueError, match=rf"{knob}=.*; .+") as caught:
            make(llama, policy, **{knob: value})
        assert len(str(caught.value)) < 500


def test_the_message_says_what_is_allowed(llama: PreTrainedModel) -> None:
    for policy, knobs, message in (
        ("scout", {"budget": 10**30}, "budget=1000000000000000000000000000000 is too large for a number of tokens; use "
         "an integer of at most 2147483647"),
        ("scout", {"recall": 10**30}, r"is too large for a number of steps; .* at most 2147483647 \(0: no recall\)"),
        ("h2o", {"prompt_queries": 10**20}, "prompt_queries=100000000000000000000 is too large"),
        ("full", {"threads": 100_000}, "threads=100000 is too large for a number of threads; .* at most 512"),
        ("full", {"timeout": 0}, "timeout=0 is not a time in seconds; use a number above 0 and of at most 1000000"),
        ("full", {"prefill_tile": 8}, r"prefill_tile=8 is not .* at least 32 \(a block\)"),
        ("full", {"host_dtype": "int4"}, "host_dtype='int4' is not supported; use \"int8\", or None"),
        ("quest", {"join": "sum"}, "join='sum' is not known; use one of max, mean, raw"),
        ("fixed_hybrid", {"sinks": LARGEST}, "more than 1024; lower sinks or recent"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            make(llama, policy, **knobs)


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["one", "split"])
@pytest.mark.parametrize(
    ("policy", "knobs"),
    [
        ("scout", {"budget": LARGEST, "place_queries": LARGEST, "recall": LARGEST}),
        ("full", {"prefill_tile": LARGEST, "timeout": 1e6}),
        ("h2o", {"prompt_queries": LARGEST, "heavy": 1, "recent": 1}),
        ("hgca", {"append_queries": LARGEST, "append_run": LARGEST, "prompt_queries": LARGEST, "sinks": LARGEST}),
        ("infinigen", {"prompt_queries": LARGEST, "alpha": math.inf, "share": 1}),
    ],
)
def test_the_largest_values_serve(llama: PreTrainedModel, policy: str, knobs: dict[str, Any], tier: str) -> None:
    """Who wants everything writes a number that no context reaches."""
    ids, mask = prompt(1, 80)
    want, got = (
        torch.cat(feed(llama, HybridCache(llama, name, tier=tier, **options), ids, mask, (0, *range(70, 81))), 1)
        for name, options in (("full", {}), (policy, {**knobs, "threads": 2}))
    )
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_an_environment_variable_is_named(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("abc", "nan", "-1", "inf", "1e9"):
        monkeypatch.setenv("HF_OFFLOAD_DELAY_MS", text)
        with pytest.raises(ValueError, match=r"HF_OFFLOAD_DELAY_MS=.* is not a .*; use a number of at least 0"):
            HybridCache(llama)


# --- files that are given ---------------------------------------------------------------------------------------------


def test_a_profile_that_is_none(llama: PreTrainedModel, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    for text in (
        '{"intervals": ' + "[" * 100_000 + "]" * 100_000 + "}", "[" * 100_000, '{"intervals": [1, true]}',
        f'{{"intervals": [{10**30}]}}', '{"intervals": ["1"]}', "\0",
    ):  # fmt: skip
        file.write_text(text)
        with pytest.raises(ValueError, match=r"recall=.*profile\.json' is not a profile .*; write it again") as caught:
            HybridCache(llama, "scout", recall=file)
        assert len(str(caught.value)) < 500


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such files")
def test_a_predictor_that_is_none(llama: PreTrainedModel, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello, this is no predictor at all")
    for name, about in (("weights", None), ("nested", "[" * 100_000), ("older", '{"format": 3}')):
        save_file({"x": torch.zeros(1)}, tmp_path / name, about and {"about": about})
    os.mkfifo(tmp_path / "pipe")  # to open it would wait for a writer
    for wrong, message in (
        *((tmp_path / name, rf"{name} is no predictor.*; .*hf-offload train-fluxion") for name in os.listdir(tmp_path)
          if name != "pipe"),
        (tmp_path, r"is a folder; name the file in it, such as .*predictor\.safetensors"),
        (tmp_path / "pipe", "is a device or a pipe; name a predictor's file"),
        (tmp_path / "text/x", "is no name of a file .*; name a predictor's file"),
        (tmp_path / ("x" * 300), "is no name of a file .*; name a predictor's file"),
        (tmp_path / "x\0", "is no name of a file .*; name a predictor's file"),
        (3, "predictor=.*; "),
        (ConstantPredictor, "predictor=.*; "),
        ({"colour": 1}, "predictor=.*; "),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            HybridCache(llama, "fluxion", predictor=wrong)
    with pytest.raises(FileNotFoundError, match=r"predictor='.*none': there is no such file; write one"):
        HybridCache(llama, "fluxion", predictor=tmp_path / "none")


def test_a_constant_predictor_checks_its_values() -> None:
    for knob in (field.name for field in dataclasses.fields(ConstantPredictor)):
        for name in ("nan", "text", "object", "10**30", "-inf"):
            with pytest.raises(ValueError, match=rf"{knob}=.*; use"):
                ConstantPredictor(**{knob: NEVER[name]})
    for knob in ("sinks", "local"):
        with pytest.raises(ValueError, match=f"{knob}=-16 is not a number of tokens; use an integer of at least 0"):
            ConstantPredictor(**{knob: -16})


# --- inputs -----------------------------------------------------------------------------------------------------------


def test_infinigen_says_that_queries_are_not_finite(llama: PreTrainedModel) -> None:
    ids, _ = prompt(1, 40)
    embeds = llama.get_input_embeddings()(ids).detach().clone()
    embeds[0, 30] = math.nan
    cache = HybridCache(llama, "infinigen")
    with torch.no_grad():
        llama(inputs_embeds=embeds, past_key_values=cache)
        with pytest.raises(ValueError, match=r"queries of layer . are not finite .* check the model's input"):
            llama(ids[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == 40


# --- saved caches -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def filled(llama: PreTrainedModel) -> HybridCache:
    cache = HybridCache(llama, "full", block_size=16)
    prefill(llama, cache, *prompt(2, 900))
    return cache


def test_a_link_is_followed_and_the_longest_name_serves(
    llama: PreTrainedModel, filled: HybridCache, tmp_path: Path
) -> None:
    (tmp_path / "disk" / "cache").mkdir(parents=True)
    for name, target in (("to a folder", tmp_path / "disk" / "cache"), ("x" * 255, tmp_path / "none" / "cache")):
        link = tmp_path / name
        link.symlink_to(target)
        for _ in range(2):
            filled.save(link)
            assert link.readlink() == target
            assert os.listdir(target.parent) == ["cache"]
            assert HybridCache.load(link, llama).get_seq_length() == 900
    assert sorted(os.listdir(tmp_path)) == ["disk", "none", "to a folder", "x" * 255]


def test_a_place_that_cannot_be_is_refused_and_left_alone(
    filled: HybridCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("SHA256SUMS", "letter"):
        (tmp_path / file).write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "letter")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "here").mkdir()
    filled.save(tmp_path / "cache")
    filled.save(tmp_path / "cache")  # a saved cache is replaced
    (tmp_path / "cache" / "notes").write_text("kept")
    monkeypatch.chdir(tmp_path / "here")
    before = sorted(tmp_path.rglob("*"))
    no_name = "has a NUL or bytes that are no UTF-8; name another folder"
    for name, message in (
        ("..", "no saved cache"),  # other files are in it, one of which has the name of a saved cache's checksums
        ("../cache", "no saved cache"),  # one that somebody has put notes into
        (".", "no saved cache"),
        ("../link", r"letter is there and is no saved cache; name a folder of its own"),
        ("../loop", r"loop is a link that leads back to itself.*; name another folder"),
        ("../letter/cache", r"the cache was not saved .*; name a folder that can be written.*letter/cache'"),
        ("a\0b", no_name), ("\udcff", no_name), ("x" * 300, "name a folder that can be written"),
    ):  # fmt: skip
        with pytest.raises((ValueError, OSError), match=message):
            filled.save(name)
        assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "letter").read_text() == (tmp_path / "cache" / "notes").read_text() == "kept"


def test_a_full_disk_is_named(
    llama: PreTrainedModel, filled: HybridCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    HybridCache(llama, "full").save(tmp_path / "cache")

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device\); free space .* is unchanged: '.*/cache'") as caught:
        filled.save(tmp_path / "cache")
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == ["cache"]
    assert HybridCache.load(tmp_path / "cache", llama).get_seq_length() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds the address space of a process")
def test_loading_without_memory(llama: PreTrainedModel, filled: HybridCache, tmp_path: Path) -> None:
    import resource

    filled.save(tmp_path / "cache")
    HybridCache.load(tmp_path / "cache", llama)  # whatever is imported at the first time

    def load() -> None:
        status = Path("/proc/self/status").read_text()
        used = int(status.partition("VmSize:")[2].split()[0]) * 1024
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), limits[1]))  # the file of the blocks is larger
        try:
            with pytest.raises(MemoryError, match=r"no host memory left for a saved cache.*; a shorter context"):
                HybridCache.load(tmp_path / "cache", llama)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        assert HybridCache.load(tmp_path / "cache", llama).get_seq_length() == 900

    assert in_fork(load) == 0  # other threads of this process would have no memory, either
