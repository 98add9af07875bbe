"""A process killed before each of a save's system calls: a whole cache is left, the old one or the new one."""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import DEVICE, ONE_MEMORY, prompt, tiny_model
from transformers import PreTrainedModel

from hf_offload import HybridCache
from hf_offload.cache import saving

OLD, NEW = 40, 60
CALLS = ("mkdir", "rename", "fsync", "open", "unlink", "rmdir")
KILLED, DONE = 9, 0

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu" or not hasattr(os, "fork"), reason="forks the process"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),  # of a fork beside threads
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def caches(model: PreTrainedModel) -> tuple[HybridCache, HybridCache]:
    """Two caches, which differ in length."""
    made = []
    for tokens in (OLD, NEW):
        cache = HybridCache(model, "scout", block_size=8, **ONE_MEMORY)
        with torch.no_grad():
            model(prompt(1, tokens)[0], past_key_values=cache)
        made.append(cache)
    return made[0], made[1]


class Counting:
    """Counts system calls; at the n-th, before it happens, `act` is called."""

    def __init__(self, n: int, act: Callable[[], None]) -> None:
        self.n, self.act, self.calls = n, act, list[str]()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in CALLS:
            patch.setattr(os, name, self.counted(name, getattr(os, name)))
        patch.setattr(io, "open", self.counted("open", io.open))
        patch.setattr(saving, "_exchange", self.counted("exchange", saving._exchange))

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            if len(self.calls) == self.n:
                self.act()
            return function(*args, **kwargs)

        return call


def kill(cache: HybridCache, folder: Path, n: int) -> bool:
    """Save in a child that is killed before its n-th call; whether it was."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.MonkeyPatch.context() as patch:
                Counting(n, lambda: os._exit(KILLED)).install(patch)
                cache.save(folder)
            code = DONE
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (KILLED, DONE)
    return code == KILLED


def kills(cache: HybridCache, folder: Path) -> Iterator[int]:
    n = 1
    while kill(cache, folder, n):
        yield n
        n += 1
    assert n > 15


def test_a_killed_save_leaves_a_whole_cache(
    model: PreTrainedModel, caches: tuple[HybridCache, HybridCache], tmp_path: Path
) -> None:
    old, new = caches
    folder, found = tmp_path / "cache", []
    old.save(folder)
    for _ in kills(new, folder):
        found.append(HybridCache.load(folder, model).get_seq_length())
        if found[-1] == NEW:
            old.save(folder)
    assert found == sorted(found)  # the old one up to one point, the new one after it
    assert set(found) == {OLD, NEW} if sys.platform == "linux" else set(found) <= {OLD, NEW}


def test_a_killed_first_save_leaves_nothing_or_all(
    model: PreTrainedModel, caches: tuple[HybridCache, HybridCache], tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "deep" / "cache"
    for _ in kills(caches[1], folder):
        if folder.exists():
            assert HybridCache.load(folder, model).get_seq_length() == NEW
        else:
            with pytest.raises(ValueError, match="no saved cache"):
                HybridCache.load(folder, model)


def test_where_folders_cannot_be_exchanged_load_names_what_is_left(
    model: PreTrainedModel, caches: tuple[HybridCache, HybridCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_exchange", lambda one, other: False)
    old, new = caches
    folder, gone = tmp_path / ("c[a]che" + 200 * "x"), 0
    old.save(folder)
    for _ in kills(new, folder):
        if folder.exists():
            assert HybridCache.load(folder, model).get_seq_length() in (OLD, NEW)
        else:
            gone += 1
            with pytest.raises(ValueError, match="a save was killed when it replaced") as told:
                HybridCache.load(folder, model)
            (left,) = (path for path in tmp_path.iterdir() if path.suffix == ".before")
            assert str(left) in str(told.value)
            assert HybridCache.load(left, model).get_seq_length() == OLD
            left.rename(folder)
        old.save(folder)
        for path in tmp_path.iterdir():
            if path != folder:
                saving.shutil.rmtree(path)
    assert gone > 0
    new.save(folder)
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_all_is_on_the_disk_before_and_after_the_exchange(
    caches: tuple[HybridCache, HybridCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files, then their folder; then the exchange; then the folder above, before the old cache is removed."""
    old, new = caches
    old.save(tmp_path / "cache")
    counting = Counting(0, lambda: None)
    counting.install(monkeypatch)
    new.save(tmp_path / "cache")
    calls = [name for name in counting.calls if name != "open"]
    at = calls.index("exchange")
    assert [name for name in calls[:at] if name != "mkdir"] == ["fsync"] * 5  # four files, and their folder
    assert calls[at + 1] == "fsync"
    assert "rename" not in calls[at + 1 :] or sys.platform != "linux"
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
