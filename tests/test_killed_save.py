"""A process killed before each of a save's system calls: a whole cache is left, the old one or the new one."""

from __future__ import annotations

import ctypes
import errno
import functools
import io
import os
import stat
import sys
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
from hf_offload.files import saving

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
    before = [name for name in calls[:at] if name != "mkdir"]
    assert before == ["fsync", "rename"] * 2 + ["fsync"] * 3  # segment, tail, two files, and their folder
    assert calls[at + 1] == "fsync"
    assert "rename" not in calls[at + 1 :] or sys.platform != "linux"
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


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


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES])
@pytest.mark.skipif(sys.platform != "linux", reason="renameat2 is Linux's")
def test_a_file_system_that_exchanges_nothing(
    model: PreTrainedModel, caches: tuple[HybridCache, HybridCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:  # fmt: skip
    """The old cache is renamed first; an error of another kind is told, and the old cache is as it was."""
    old, new = caches
    old.save(tmp_path / "cache")

    class System:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def renameat2(self, *_: Any) -> int:
            ctypes.set_errno(code)
            return -1

    monkeypatch.setattr(saving.ctypes, "CDLL", System)
    if code == errno.EACCES:
        with pytest.raises(OSError, match="was not saved"):
            new.save(tmp_path / "cache")
    else:
        new.save(tmp_path / "cache")
    want = OLD if code == errno.EACCES else NEW
    assert HybridCache.load(tmp_path / "cache", model).get_seq_length() == want
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def fsync_fails(code: int) -> Callable[[int], None]:
    real = os.fsync

    def fsync(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(code, os.strerror(code))
        real(file)

    return fsync


def test_a_folder_that_cannot_be_synced(
    caches: tuple[HybridCache, HybridCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems sync files alone; a disk's fault before the exchange ends the save."""
    old, new = caches
    old.save(tmp_path / "cache")
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(os, "fsync", fsync_fails(errno.EINVAL))
        new.save(tmp_path / "cache")
    monkeypatch.setattr(os, "fsync", fsync_fails(errno.EIO))
    with pytest.raises(OSError, match="was not saved"):
        old.save(tmp_path / "cache")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_an_old_cache_that_cannot_be_removed_is_named(
    caches: tuple[HybridCache, HybridCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = caches
    old.save(tmp_path / "cache")

    def fail(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(saving.shutil, "rmtree", fail)
    with pytest.warns(UserWarning, match="holds the one before it, cannot be removed"):
        new.save(tmp_path / "cache")


def test_a_path_that_cannot_be_is_no_saved_cache(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no saved cache"):
        HybridCache.load(tmp_path / (300 * "x"), model)


def test_what_is_left_of_another_name_is_not_named(
    model: PreTrainedModel, caches: tuple[HybridCache, HybridCache], tmp_path: Path
) -> None:
    caches[0].save(tmp_path / ".cache.b.0123456789abcdef.before")
    with pytest.raises(ValueError, match="no saved cache") as told:
        HybridCache.load(tmp_path / "cache", model)
    assert "killed" not in str(told.value)
    (tmp_path / "link").symlink_to(tmp_path / "cache.b")
    with pytest.raises(ValueError, match="a save was killed"):
        HybridCache.load(tmp_path / "link", model)
