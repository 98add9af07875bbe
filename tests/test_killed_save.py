"""A save that ends before any of its system calls: a whole cache is left, the old one or the new one."""

from __future__ import annotations

import errno
import functools
import io
import os
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from forks import in_fork
from tiny import DEVICE, ONE_MEMORY, begin, tiny_model
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
def caches(model: PreTrainedModel) -> list[HybridCache]:
    """Two caches, which differ in length."""
    made = []
    for tokens in (OLD, NEW):
        cache = HybridCache(model, "scout", block_size=8, **ONE_MEMORY)
        begin(model, cache, 1, tokens)
        made.append(cache)
    return made


@contextmanager
def counted_calls(n: int, act: Callable[[], object]) -> Iterator[list[str]]:
    """System calls by name; at the n-th, before it happens, `act` is called."""
    calls: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) == n:
                act()
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, counted(name, getattr(os, name)))
        patch.setattr(io, "open", counted("open", io.open))
        yield calls


def killed(cache: HybridCache, folder: Path, n: int) -> bool:
    """Save in a child that is killed before its n-th call; whether it was."""

    def save() -> None:
        with counted_calls(n, lambda: os._exit(KILLED)):
            cache.save(folder)

    code = in_fork(save)
    assert code in (KILLED, DONE)
    return code == KILLED


def refused(cache: HybridCache, folder: Path, n: int) -> bool:
    """Save on a disk that has no room at the n-th call; whether there was such a call."""

    def refuse() -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    told = ""
    with counted_calls(n, refuse) as calls, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an old segment that cannot be removed
        try:
            cache.save(folder)
        except OSError as error:
            told = str(error)
    if not told:
        assert HybridCache.load(folder, tiny_model("llama")).get_seq_length() == cache.get_seq_length()
    assert "no space left" in told or not told
    return len(calls) >= n


@pytest.mark.parametrize("ends", [killed, refused])
def test_a_save_that_ends_early_leaves_a_whole_cache(
    model: PreTrainedModel, caches: list[HybridCache], tmp_path: Path, ends: Callable[[HybridCache, Path, int], bool]
) -> None:
    old, new = caches
    folder, found = tmp_path / "cache", []
    old.save(folder)
    names = set(os.listdir(folder))
    while ends(new, folder, len(found) + 1):
        found.append(HybridCache.load(folder, model).get_seq_length())
        old.save(folder)
        assert set(os.listdir(folder)) == names  # nothing of the save that ended early is left
    assert set(found) == {OLD, NEW}
    assert found == sorted(found) or ends is refused  # the old one up to one point, the new one after it
    assert len(found) > 15
    assert os.listdir(tmp_path) == ["cache"]


@pytest.mark.parametrize("ends", [killed, refused])
def test_a_first_save_that_ends_early_leaves_nothing_or_all(
    model: PreTrainedModel, caches: list[HybridCache], tmp_path: Path, ends: Callable[[HybridCache, Path, int], bool]
) -> None:
    folder, count = tmp_path / "new" / "deep" / "cache", 1
    while ends(caches[1], folder, count) and not (folder / "cache.safetensors").exists():
        with pytest.raises(ValueError, match="no saved cache"):
            HybridCache.load(folder, model)
        count += 1
    assert HybridCache.load(folder, model).get_seq_length() == NEW
    assert count > 10


def test_an_empty_cache_may_be_saved(model: PreTrainedModel, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()  # an empty folder is taken
    HybridCache(model, "full", **ONE_MEMORY).save(tmp_path / "cache")
    assert HybridCache.load(tmp_path / "cache", model).get_seq_length() == 0
    with pytest.raises(ValueError, match="no saved cache"):
        HybridCache.load(tmp_path / (300 * "x"), model)  # no path can be so long


def test_all_is_on_the_disk_before_and_after_the_cache_has_its_name(caches: list[HybridCache], tmp_path: Path) -> None:
    """The files, then their folder; then the name; then the folder again, before the old files are removed."""
    caches[0].save(tmp_path / "cache")
    with counted_calls(0, list) as made:
        caches[1].save(tmp_path / "cache")
    calls = [name for name in made if name not in ("open", "mkdir")]
    assert calls == [*["fsync", "replace"] * 2, "fsync", "fsync", "replace", "fsync", "unlink"]
    counts = []
    for parent in (tmp_path / "first", tmp_path / "a" / "b"):  # folders that a save makes are synced
        with counted_calls(0, list) as made:
            caches[0].save(parent)
        counts.append(made.count("fsync"))
    assert counts[1] == counts[0] + 1


def test_a_folder_that_cannot_be_synced(
    model: PreTrainedModel, caches: list[HybridCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems sync files alone."""
    real = os.fsync

    def fsync(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "invalid argument")
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        caches[1].save(tmp_path / "cache")
    assert HybridCache.load(tmp_path / "cache", model).get_seq_length() == NEW
