"""A process killed before each of a save's system calls: a whole cache is left, the old one or the new one."""

from __future__ import annotations

import errno
import functools
import io
import os
import stat
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import in_fork
from tiny import DEVICE, ONE_MEMORY, prompt, tiny_model
from transformers import PreTrainedModel

from hf_offload import HybridCache

OLD, NEW = 40, 60
CALLS = ("mkdir", "rename", "replace", "fsync", "open", "unlink", "rmdir")
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

    def save() -> None:
        with pytest.MonkeyPatch.context() as patch:
            Counting(n, lambda: os._exit(KILLED)).install(patch)
            cache.save(folder)

    code = in_fork(save)
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
    names = set(os.listdir(folder))
    for _ in kills(new, folder):
        found.append(HybridCache.load(folder, model).get_seq_length())
        old.save(folder)
        assert set(os.listdir(folder)) == names  # nothing of the killed save is left
    assert set(found) == {OLD, NEW}
    assert found == sorted(found)  # the old one up to one point, the new one after it
    assert os.listdir(tmp_path) == ["cache"]


def test_a_killed_first_save_leaves_nothing_or_all(
    model: PreTrainedModel, caches: tuple[HybridCache, HybridCache], tmp_path: Path
) -> None:
    folder, whole = tmp_path / "new" / "deep" / "cache", []
    for _ in kills(caches[1], folder):
        whole.append((folder / "cache.safetensors").exists())
        if whole[-1]:
            assert HybridCache.load(folder, model).get_seq_length() == NEW
            break
        with pytest.raises(ValueError, match="no saved cache"):
            HybridCache.load(folder, model)
    assert len(whole) > 10


def test_all_is_on_the_disk_before_and_after_the_cache_has_its_name(
    caches: tuple[HybridCache, HybridCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files, then their folder; then the name; then the folder again, before the old files are removed."""
    old, new = caches
    old.save(tmp_path / "cache")
    counting = Counting(0, lambda: None)
    counting.install(monkeypatch)
    new.save(tmp_path / "cache")
    calls = [name for name in counting.calls if name not in ("open", "mkdir")]
    segments = ["fsync", "replace"] * 2
    assert calls == [*segments, "fsync", "fsync", "replace", "fsync", "unlink"]


def test_folders_that_a_save_makes_are_synced(
    caches: tuple[HybridCache, HybridCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for parent in (tmp_path, tmp_path / "a" / "b"):
        with monkeypatch.context() as patch:
            counting = Counting(0, lambda: None)
            counting.install(patch)
            caches[0].save(parent / "cache")
        counts.append(counting.calls.count("fsync"))
    assert counts[1] == counts[0] + 2


def fsync_fails(code: int) -> Callable[[int], None]:
    real = os.fsync

    def fsync(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(code, os.strerror(code))
        real(file)

    return fsync


def test_a_folder_that_cannot_be_synced(
    model: PreTrainedModel, caches: tuple[HybridCache, HybridCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems sync files alone; a disk's fault before the last step ends the save."""
    old, new = caches
    old.save(tmp_path / "cache")
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(os, "fsync", fsync_fails(errno.EINVAL))
        new.save(tmp_path / "cache")
    monkeypatch.setattr(os, "fsync", fsync_fails(errno.EIO))
    with pytest.raises(OSError, match="was not saved"):
        old.save(tmp_path / "cache")
    assert HybridCache.load(tmp_path / "cache", model).get_seq_length() == NEW
    assert len(os.listdir(tmp_path / "cache")) == 3


def test_an_old_file_that_cannot_be_removed_is_named(
    caches: tuple[HybridCache, HybridCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = caches
    old.save(tmp_path / "cache")

    def fail(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(Path, "unlink", fail)
    with pytest.warns(UserWarning, match=r"segment-\w+.safetensors is of no use and stays"):
        new.save(tmp_path / "cache")


def test_a_path_that_cannot_be_is_no_saved_cache(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no saved cache"):
        HybridCache.load(tmp_path / (300 * "x"), model)
