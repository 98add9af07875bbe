"""`PrefixStore`: caches of prompts and chats, in memory and on disk, found again by their tokens."""

from __future__ import annotations

import atexit
import contextlib
import errno
import inspect
import os
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_offload.blocks.host_pool import HostPool
from hf_offload.blocks.memory import size_text
from hf_offload.cache.conversion import device_of
from hf_offload.cache.layer import HybridLayer
from hf_offload.cache.memory_budget import parse_bytes
from hf_offload.files import entries
from hf_offload.files.fingerprint import active_adapters, fingerprint
from hf_offload.files.loading import RUNNING, DamagedError
from hf_offload.files.saving import FORMAT
from hf_offload.files.segments import Segment, held_by
from hf_offload.hybrid_cache import HybridCache
from hf_offload.knobs import check_count, check_number
from hf_offload.model.hooks import cache_argument, hybrid_layers
from hf_offload.model.model_support import image_layers
from hf_offload.policies.base import Policy
from hf_offload.policies.registry import describe_policy

IDLE = 5.0
"""Seconds without a prompt or answer after which caches are saved that need not be saved at once."""
MOST_CHECKPOINTS = 8
"""Entries of one chat, for models whose caches cannot be cropped."""
_OF_ALL = 1 / 64
"""A share of an entry on disk for which loading it pays: a token is loaded in a hundredth of the time of reading it."""
_WORDS = 12  # tokens of the text that are shown
_MEDIA = ("image", "video", "audio")
_Key = TypeVar("_Key")


@dataclass(eq=False, slots=True)
class _Entry:
    """A cache in memory. `open` forks it for each prompt.

    Args:
        namespace: the folder of the caches like it.
        ids: its tokens, int32 `[T]`.
        cache: the cache.
        base: the entry from which it was forked, until it is saved itself; what that has on disk stays there.
        segments: where its blocks are on disk, once it is saved.
        seconds: how long it took to compute what is not on disk.
        path: its folder, if it is saved; failed: whether a save has failed; evicted: whether its folder was removed and
            it has not been used since.
        used: number of its last use.
        users: how many forks of it are at work.
    """

    namespace: Path
    ids: np.ndarray
    cache: HybridCache
    base: _Entry | None = None
    segments: list[Segment] = field(default_factory=list)
    seconds: float = 0.0
    path: Path | None = None
    failed: bool = False
    evicted: bool = False
    used: int = 0
    users: int = 0

    def continues(self, other: _Entry) -> bool:
        """Whether it begins with the tokens of another entry of its namespace."""
        return self.namespace == other.namespace and _begins(self.ids, other.ids)

    def saved(self) -> _Entry | None:
        """The entry, or the nearest one that it comes from, that is on disk."""
        entry: _Entry | None = self
        while entry is not None and entry.path is None:
            entry = entry.base
        return entry

    def shared(self) -> list[Segment]:
        """The segments of the saved entry that it comes from; of their blocks those that both hold."""
        if (base := self.saved()) is None:
            return []
        pairs = zip(hybrid_layers(base.cache), hybrid_layers(self.cache), strict=True)
        stores = {
            one.index: one.store for one, other in pairs
            if one.store is not None and other.store is not None and one.store.pool is other.store.pool
        }  # fmt: skip
        return held_by(base.segments, stores)


class Found:
    """What a `PrefixStore` has found for a prompt; `PrefixStore.open` gives it."""

    cache: HybridCache
    """The cache to generate with; it holds the first `tokens` tokens of the prompt."""
    tokens: int
    """Number of tokens that are not read again."""
    source: str | None
    """Where they were: `"ram"`, `"disk"`, or None for no token."""

    def __init__(
        self, store: PrefixStore, namespace: Path, ids: np.ndarray, input_ids: torch.Tensor, entry: _Entry | None,
        tokens: int, source: str,
    ) -> None:  # fmt: skip
        self._store, self._namespace, self._ids, self._input_ids = store, namespace, ids, input_ids
        self._entry = self._base = entry
        self.tokens = self._kept = tokens
        self.source = None if entry is None else source
        self.cache = store.new_cache() if entry is None else entry.cache.fork()
        if entry is not None:
            if tokens < len(entry.ids):
                self.cache.crop(tokens - len(entry.ids))
            entry.users += 1
        self.cache.after_forward = self._after_forward
        self._adapters: dict[str, int] | None = active_adapters(self.cache._attachment.stack)
        self._seconds, self._since, self._ended = 0.0, time.perf_counter(), False

    def read(self, stop: int | None = None, chunk: int = 512) -> None:
        """Read the prompt up to its last two tokens, in chunks, and keep it; `generate` then begins with the answer.

        A process that was killed goes on where its last segment ended. With models whose caches cannot be cropped, a
        later prompt finds what ends at `stop`.

        Args:
            stop: number of tokens to read, for example up to the end of a document or of the last user's message; None:
                all but two, which is the most.
            chunk: tokens of one forward.

        Raises:
            ValueError: not such a number.
            RuntimeError: the block has ended, or the store is closed.
        """
        self._check_open()
        most = max(self._input_ids.shape[1] - 2, 0)
        check_count("stop", most if stop is None else stop, least=0)
        check_count("chunk", chunk, least=2)
        model, stop = self._store._model, most if stop is None else min(stop, most)
        narrow = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        first = self.cache.get_seq_length()
        with torch.no_grad():
            while stop - first >= 2:  # a single token would be a decode step
                count = stop - first if stop - first <= chunk + 1 else chunk
                part = self._input_ids[:, first : first + count]
                model(part, **narrow, **cache_argument(model, self.cache))
                first += count
        self._count()
        if self._kept < first <= most:
            self._keep(first)

    def keep(self, output: Any) -> None:
        """Keep the answer, too; without this, the prompt is kept.

        Args:
            output: what `generate` returned: ids `[1, N]` that begin with the prompt's, or an object with `sequences`.

        Raises:
            ValueError: the ids do not begin with those of the prompt.
            RuntimeError: the block has ended, or the store is closed.
        """
        self._check_open()
        ids = _ids_of(getattr(output, "sequences", output))
        if not np.array_equal(ids[: len(self._ids)], self._ids):
            raise ValueError("keep() takes prompt and answer, as generate() returns them; these ids begin otherwise")
        self._ids = ids
        self._count()
        tokens = self.cache.get_seq_length()
        if tokens > len(ids):
            raise ValueError(
                f"the cache holds {tokens} tokens, keep() got {len(ids)}; give all that generate() returned"
            )
        self._keep(tokens)

    def _check_open(self) -> None:
        if self._ended or self._store._closed:
            raise RuntimeError("call it before the block of open() ends and the store is closed")

    def resume(self) -> None:
        """Do not count the time since the last forward as work: other prompts were read meanwhile."""
        self._count(worked=False)

    def _after_forward(self) -> None:
        """A forward of the cache has ended: keep what a killed process would have to read again, and the prompt."""
        self._count()
        if self._adapters != active_adapters(self.cache._attachment.stack):
            self._adapters = None  # nothing of it is kept
        tokens, drafts = self.cache.get_seq_length(), self.cache.settings.drafts.recording
        if tokens > len(self._ids) or drafts:  # an answer, or tokens that may be dropped again
            self.cache.after_forward = None
            return
        store, ended = self._store, tokens == len(self._ids)
        enough = self._unsaved >= store._min_seconds
        if ended and (enough or not store._crops):
            self._keep(tokens, at_once=enough)
        elif enough and tokens - self._kept >= store._segment_tokens:
            store._try_to_save(self._keep(tokens), segment=True)
            self._count(worked=False)

    def _count(self, *, worked: bool = True) -> None:
        now = time.perf_counter()
        self._seconds, self._since = self._seconds + (now - self._since if worked else 0.0), now

    @property
    def _unsaved(self) -> float:
        """Seconds of work that are not on disk."""
        return self._seconds + (0.0 if self._entry is None else self._entry.seconds)

    def _keep(self, tokens: int, *, at_once: bool = False) -> _Entry | None:
        """Make an entry of the first tokens, if they are of one row without padding, and of the same adapters."""
        padding = self.cache.settings.padding
        plain = self.cache._row_count() == 1 and padding.valid[:, : padding.seen].all()
        if not plain or self._adapters is None or self._store._closed:
            return None
        self._kept = tokens
        cache = self.cache.fork()
        if tokens < cache.get_seq_length():
            cache.crop(tokens - cache.get_seq_length())
        entry = _Entry(self._namespace, self._ids[:tokens], cache, self._base, seconds=self._unsaved)
        with self._store._lock:
            if self._entry is not None:
                self._entry.users -= 1
            self._entry = self._store._insert(entry, at_once=at_once)
            self._entry.users += 1
        if self._entry is entry:  # else it is of another cache
            self._base = entry
        self._seconds = 0.0
        return entry

    def _end(self) -> None:
        """Keep the prompt, as far as the cache holds it, unless prompt and answer are kept."""
        self.cache.after_forward, self._ended = None, True
        if self.cache.transaction.floor is not None and not self._store._crops:
            return  # a forward was interrupted, and some layers cannot undo it
        self.cache.crop(0)
        have = self.cache.get_seq_length()
        tokens = min(have, len(self._ids))
        if tokens > self._kept and (tokens == have or self._store._crops):
            self._count()
            self._keep(tokens)


class PrefixStore:
    """Caches of prompts and chats, found again by their tokens: a prompt reads only what no earlier one has read.

    ```python
    with store.open(input_ids) as found:
        out = model.generate(input_ids, cache=found.cache, max_new_tokens=300)
        found.keep(out)
    ```

    Entries are compared token by token. A prompt continues from the entry with which it has most tokens in common, or,
    where a model's caches cannot be cropped (sliding windows, linear attention), from the longest one that it begins
    with. What it continues from is what the entry's cache would have continued from: from memory and from disk bit for
    bit the same, but for values that `host_dtype="int8"` rounds when they are saved.

    All entries are kept in memory; what took longer than `min_seconds` to compute is saved: after a long
    prompt at once, in a thread; else when nothing has happened for five seconds, on eviction, and in `close`. Entries
    share blocks, in memory and on disk. Several threads and processes may use one folder; one thread uses a `found`.

    `close` frees the memory; a store that is not closed lives as long as its process.

    The files hold keys, values and token ids: readers of the files can read the text. They are readable by their owner
    alone.

    Args:
        folder: the folder; made if missing.
        model: the model.
        policy: as for `HybridCache`.
        max_bytes: most bytes on disk, within one entry.
        max_ram: most bytes of blocks in memory, within one entry.
        tenant: entries of one tenant are not found by another; `open` takes one, too.
        tokenizer: its `decode` says how a text begins, for `hf-offload store ls`; None: nothing is said.
        segment_tokens: new tokens after which a long prompt, read in chunks, is saved.
        min_seconds: what took less to compute is not saved.
        knobs: further arguments of `HybridCache`.

    Attributes:
        saves: how many prompts and answers were saved; parts of long prompts are not counted.
        evictions: how many were removed from disk since all exceeded `max_bytes`.

    Raises:
        ValueError: as `HybridCache`, an amount that is none, a folder that holds something else, or a model that
            attends images in layers of their own or whose keys depend on the prompt's length (rope_type `"dynamic"`
            or `"longrope"`).
        OSError: the folder cannot be made.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: PreTrainedModel,
        policy: str | Policy = "scout",
        *,
        max_bytes: int | str = "20GiB",
        max_ram: int | str = "4GiB",
        tenant: str = "",
        tokenizer: Any = None,
        segment_tokens: int = 4096,
        min_seconds: float = 2.0,
        **knobs: Any,
    ) -> None:
        check_count("segment_tokens", segment_tokens)
        check_number("min_seconds", min_seconds, "a number of seconds", least=0)
        self._max_bytes, self._max_ram = parse_bytes("max_bytes", max_bytes), parse_bytes("max_ram", max_ram)
        self._segment_tokens, self._min_seconds = segment_tokens, min_seconds
        self._model, self._tenant, self._tokenizer = model, tenant, tokenizer
        self._empty = HybridCache(model, policy, **knobs)
        if image_layers(self._empty._config):
            raise ValueError(
                f"{type(model).__name__} attends images in layers of their own; token ids do not tell images apart: "
                "keep a HybridCache for each"
            )
        if moving := _rope_types(self._empty._config) & {"dynamic", "longrope"}:
            raise ValueError(
                f"{type(model).__name__} has rope_type={moving.pop()!r}: keys of a prefix depend on the length of the "
                "whole prompt; keep a HybridCache for each"
            )
        self._crops = all(type(layer) in (HybridLayer, DynamicLayer) for layer in self._empty.layers)
        self._running = {name: value for name, value in self._empty.knobs.items() if name in RUNNING}
        self.folder = Path(folder).expanduser().absolute()
        entries.check_folder(self.folder)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._held: list[_Entry] = []
        self._disk: dict[Path, np.ndarray] = {}
        self.saves = self.evictions = 0
        self._clock = self._open = 0  # uses so far; prompts at work
        self._active = time.monotonic()
        self._urgent: list[_Entry] = []
        self._failed: Exception | None = None
        self._closed, self._process = False, os.getpid()
        self._lock, self._saving = threading.RLock(), threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        with contextlib.suppress(OSError), entries.locked(self.folder) as alone:
            if alone:
                entries.clean(self.folder)
        atexit.register(self.close)

    # --- prompts ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def open(self, input_ids: torch.Tensor | Sequence[int], *, tenant: str | None = None) -> Iterator[Found]:
        """Give a cache that holds as much of a prompt as any entry; at least two tokens are left to read.

        When the block ends, the prompt is kept, as far as it was read, also if it ends by an error. Within the block
        the model's weights and active adapters stay as they are.

        Args:
            input_ids: the ids of the whole prompt, `[1, N]` or `[N]`: one row, no padding.
            tenant: whose prompt it is; None: the store's tenant.

        Raises:
            ValueError: ids of several rows, of no token, or of images.
            RuntimeError: the store is closed, or of the process that this one was forked from.
        """
        ids = _ids_of(input_ids)
        self._check(ids)
        device = getattr(input_ids, "device", None) or device_of(self._empty._attachment.stack)
        if self._process != os.getpid():
            raise RuntimeError("this PrefixStore is of the process that this one was forked from; make another one")
        if self._closed:
            raise RuntimeError("this PrefixStore is closed; make another one")
        with self._lock:
            failed, self._failed = self._failed, None
        if failed is not None:
            message = f"a cache was not saved, and is kept in memory alone: {failed}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        with self._lock:
            self._open += 1
            try:
                namespace = self._namespace(self._tenant if tenant is None else tenant)
                found = self._find(namespace, ids, torch.from_numpy(ids.astype(np.int64))[None].to(device))
            except BaseException:
                self._open -= 1
                raise
        try:
            yield found
        finally:
            try:
                found._end()
            finally:
                with self._lock:
                    if found._entry is not None:
                        found._entry.users -= 1
                    self._open, self._active = self._open - 1, time.monotonic()
                    self._changed.notify_all()

    def new_cache(self) -> HybridCache:
        """Return an empty cache with the store's policy and knobs."""
        return self._empty.fork()

    def _check(self, ids: np.ndarray) -> None:
        if not len(ids):
            raise ValueError("input_ids holds no token; give the ids of the whole prompt")
        config = self._model.config
        for kind in _MEDIA:
            for name in (f"{kind}_token_id", f"{kind}_token_index"):
                token = getattr(config, name, None)
                if isinstance(token, int) and (ids == token).any():
                    raise ValueError(
                        f"input_ids holds {name} {token}; token ids do not tell two of them apart: keep a HybridCache "
                        "for each"
                    )

    def _find(self, namespace: Path, ids: np.ndarray, input_ids: torch.Tensor) -> Found:
        self._list(namespace)
        in_memory = {entry: entry.ids for entry in self._held if entry.namespace == namespace}
        best_held = self._longest(in_memory, ids, of_all=0)
        (held, tokens), source = best_held, "ram"
        while True:
            on_disk = {path: have for path, have in self._disk.items() if path.parent == namespace}
            best = self._longest(on_disk, ids, of_all=_OF_ALL)
            if best[0] is None or best[1] <= tokens:
                break
            if (loaded := self._load(best[0])) is not None:
                held, tokens, source = loaded, best[1], "disk"
        if held is not None:
            self._use(held)
        return Found(self, namespace, ids, input_ids, held, tokens, source)

    def _longest(self, entries: Mapping[_Key, np.ndarray], ids: np.ndarray, of_all: float) -> tuple[_Key | None, int]:
        """The entry from which a prompt may take most tokens, at least a block and this share of it; their number."""
        best: _Key | None = None
        most = 0
        for key, have in entries.items():
            tokens = self._usable(have, ids)
            if tokens > most and tokens >= max(self._empty.settings.block_size, of_all * len(have)):
                best, most = key, tokens
        return best, most

    def _usable(self, have: np.ndarray, ids: np.ndarray) -> int:
        """The number of an entry's tokens that a prompt may use."""
        most = min(len(have), len(ids) - 2)
        if not self._crops and len(have) > most:
            return 0
        other = have[:most] != ids[:most] if most > 0 else np.ones(1, bool)
        common = int(other.argmax()) if other.any() else most
        return common if self._crops or common == len(have) else 0

    def _namespace(self, tenant: str) -> Path:
        """The folder of a tenant's caches that this model, as it is now, may continue from."""
        cache = self._empty
        knobs = {name: cache._knobs[name] for name in ("block_size", "host_dtype")}
        model = fingerprint(cache._config, cache._attachment.stack)
        policy = describe_policy(cache.policy)
        identity = {"format": FORMAT, "model": model, "policy": policy, "knobs": knobs, "tenant": tenant}
        name = getattr(self._model.config, "_name_or_path", "") or type(self._model).__name__
        name = Path(name).name if os.path.exists(name) else name
        return entries.namespace_of(self.folder, identity, {"model": name, "policy": policy, "knobs": knobs})

    def _list(self, namespace: Path) -> None:
        """Read the tokens of entries that have come since the folder was last listed; forget those that are gone."""
        on_disk = set(entries.entries_in(namespace))
        self._forget({path for path in self._disk if path.parent == namespace} - on_disk)
        for path in on_disk - self._disk.keys():
            with contextlib.suppress(OSError):
                if (ids := entries.read_tokens(path)) is None:
                    self._discard(path)
                else:
                    self._disk[path] = ids

    def _forget(self, gone: Collection[Path]) -> None:
        """Entries are no longer on disk; those in memory are saved again when they are used again."""
        self._disk = {path: ids for path, ids in self._disk.items() if path not in gone}
        for entry in self._held:
            if entry.path in gone:
                entry.path, entry.evicted = None, True

    def _load(self, path: Path) -> _Entry | None:
        """Load an entry; None if it is gone or damaged, which removes it."""
        ids = self._disk.pop(path)
        try:
            cache, segments = HybridCache.load_segments(path, self._model, **self._running)
        except DamagedError as error:
            if not isinstance(error.__cause__, OSError) or isinstance(error.__cause__, FileNotFoundError):
                self._discard(path)
            return None
        self._disk[path] = ids
        return self._insert(_Entry(path.parent, ids, cache, segments=segments, path=path))

    def _discard(self, path: Path) -> None:
        """Remove a damaged entry, unless the folder cannot be written or somebody is saving."""
        with contextlib.suppress(OSError), entries.locked(self.folder) as alone:
            if alone:
                entries.remove(path)

    # --- entries in memory --------------------------------------------------------------------------------------------

    def _insert(self, entry: _Entry, *, at_once: bool = False) -> _Entry:
        """Add an entry, to be saved at once or later; return it, or the one that has its tokens already."""
        with self._lock:
            alike = [other for other in self._held if other.namespace == entry.namespace]
            for other in alike:
                if _begins(other.ids, entry.ids) and (self._crops or len(other.ids) == len(entry.ids)):
                    entry = other
                    break
            else:
                before = sorted((other for other in alike if entry.continues(other)), key=lambda other: other.used)
                drop = before if self._crops else before[: max(len(before) + 1 - MOST_CHECKPOINTS, 0)]
                base = entry.base
                if base is not None and base in drop and base.path is None and not self._wants_saving(base):
                    entry.base = base.base  # its blocks will not be on disk
                self._held = [*(other for other in self._held if other not in drop), entry]
            self._use(entry)
            self._evict(entry)
            if at_once and entry.path is None:
                self._save_soon(entry)
            elif self._wants_saving(entry):
                self._start()
            return entry

    def _use(self, entry: _Entry) -> None:
        self._clock += 1
        entry.used = self._clock
        if entry.evicted:
            entry.seconds, entry.evicted = max(self._min_seconds, entry.seconds), False
        if entry.path is not None:
            entries.touch(entry.path)

    def _evict(self, newest: _Entry) -> None:
        """Drop entries while all exceed `max_ram`: what is soon computed again, then what was least recently used."""

        def order(entry: _Entry) -> tuple[bool, int]:
            return entry.path is not None or entry.seconds >= self._min_seconds, entry.used

        for entry in sorted(self._held, key=order):
            if self.ram_bytes <= self._max_ram:
                return
            if not entry.users and (entry is not newest or not order(entry)[0]):
                if self._wants_saving(entry):
                    self._save_soon(entry)
                self._held.remove(entry)

    @property
    def ram_bytes(self) -> int:
        """Bytes of the entries in memory: slabs of blocks, policies' states and Transformers' own layers."""
        pools: dict[int, HostPool] = {}
        other = 0
        with self._lock:
            for entry in self._held:
                for layer in entry.cache.layers:
                    if not isinstance(layer, HybridLayer):
                        other += sum(x.nbytes for x in vars(layer).values() if isinstance(x, torch.Tensor))
                    elif layer.store is not None:
                        pools[id(layer.store.pool)] = layer.store.pool
                        other += layer.state.nbytes
        return other + sum(slab.nbytes for pool in pools.values() for slab in (*pool.slabs, *pool.packed_slabs))

    @property
    def disk_bytes(self) -> int:
        """Bytes of the entries in the folder, of all models and policies, each file counted once."""
        return entries.used_bytes(*entries.namespaces_in(self.folder))

    # --- entries on disk ----------------------------------------------------------------------------------------------

    def _wants_saving(self, entry: _Entry) -> bool:
        done = entry.path is not None or entry.failed or entry.evicted
        return not done and entry.seconds >= self._min_seconds

    def _save_soon(self, entry: _Entry) -> None:
        later = [other for other in self._urgent if not (self._crops and entry.continues(other))]
        self._urgent = [*later, entry]
        self._start()
        self._changed.notify_all()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="PrefixStore", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        """The thread's loop: save what is urgent, and what waits when the store is idle."""
        while (entry := self._next()) is not None:
            self._try_to_save(entry)
            self._leave_line(entry)

    def _try_to_save(self, entry: _Entry | None, *, segment: bool = False) -> None:
        """Save an entry; the next `open` warns of an error, or `flush` raises it."""
        if entry is None:
            return
        try:
            self._save(entry, segment=segment)
        except Exception as error:
            with self._lock:
                entry.failed, self._failed = True, error

    def _next(self) -> _Entry | None:
        """Wait for an entry to save; None when the store is closed."""
        with self._lock:
            while not self._closed:
                if self._urgent:
                    return self._urgent[0]
                waiting = [entry for entry in self._held if self._wants_saving(entry)]
                left = IDLE - (time.monotonic() - self._active)
                if waiting and not self._open and left <= 0:
                    return waiting[0]
                self._changed.wait(max(left, 0.1) if waiting and not self._open else None)
            return None

    def _save(self, entry: _Entry, *, segment: bool = False) -> None:
        with self._saving:
            with self._lock:
                if entry.path is not None:
                    return
                cache, shared = entry.cache.fork(), entry.shared()
            path = entries.entry_path(entry.namespace, entry.ids)
            more = {entries.TOKENS: entries.token_bytes(entry.ids)}
            if self._tokenizer is not None:
                more[entries.WORDS] = self._tokenizer.decode(entry.ids[:_WORDS].tolist()).encode()
            with entries.locked(self.folder, 2.0 if segment else 30.0) as alone:
                if not alone:
                    lock = str(self.folder / entries.LOCK)
                    raise OSError(errno.EBUSY, "another process saves and does not end; see what holds the lock", lock)
                segments: list[Segment] = []
                if entries.read_tokens(path) is None:  # else another process has saved it
                    entries.remove(path)
                    segments = cache.save_segments(path, shared, more)
                with self._lock:
                    entry.path, entry.seconds, entry.segments = path, 0.0, segments
                    entry.base = None if segments else entry.base
                    self._disk[path] = entry.ids
                    at_work = [*self._urgent, *(other for other in self._held if other.users)]
                    in_use = {base.path for other in at_work if (base := other.saved()) is not None and base.path}
                    older = [
                        other for other, ids in self._disk.items()
                        if other.parent == path.parent and other != path and _begins(entry.ids, ids)
                    ]  # fmt: skip
                    if not self._crops:
                        older = sorted(older, key=entries.last_use)[: max(len(older) + 1 - MOST_CHECKPOINTS, 0)]
                    gone = entries.evict(self.folder, self._max_bytes, {path, *in_use}, older)
                    self.saves, self.evictions = self.saves + (not segment), self.evictions + len(gone) - len(older)
                    self._forget(gone)

    def _leave_line(self, entry: _Entry) -> None:
        """An entry no longer waits; until now what it comes from stayed on disk."""
        with self._lock:
            self._urgent = [other for other in self._urgent if other is not entry]

    def flush(self) -> None:
        """Save now all that is to be saved.

        Raises:
            OSError: the disk is full, or the folder cannot be written; what is in memory stays there.
        """
        with self._lock:
            failed, self._failed = self._failed, None
            for entry in self._held:
                entry.failed = False
                if self._wants_saving(entry) and entry not in self._urgent:
                    self._urgent.append(entry)
            waiting = list(self._urgent)
        for entry in waiting:
            try:
                self._save(entry)
            except Exception as error:
                failed = error
            self._leave_line(entry)
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Save what is to be saved and free the memory; the end of the process does it, too.

        Raises:
            OSError: as `flush`.
        """
        if self._process != os.getpid():
            return
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        atexit.unregister(self.close)
        if self._thread is not None:
            self._thread.join()
        try:
            self.flush()
        finally:
            self._held.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"PrefixStore({str(self.folder)!r}, entries={len(self._held)}, ram={size_text(self.ram_bytes)})"


def _rope_types(config: Any) -> set[Any]:
    """How a model's rotary embeddings are scaled, in any layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)}


def _begins(ids: np.ndarray, start: np.ndarray) -> bool:
    """Whether ids begin with others."""
    return len(start) <= len(ids) and np.array_equal(ids[: len(start)], start)


def _ids_of(given: Any) -> np.ndarray:
    """Token ids `[1, N]` or `[N]` as int32 `[N]`.

    Raises:
        TypeError: no integers.
        ValueError: several rows, or numbers that are no ids.
    """
    ids = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else np.asarray(given)
    if not ids.size:
        return np.zeros(0, np.int32)
    if ids.dtype.kind not in "iu":
        raise TypeError(f"token ids are integers, not {ids.dtype}")
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1:
        raise ValueError(f"token ids have shape {list(ids.shape)}; a PrefixStore takes one row without padding, [1, N]")
    if len(ids) and not 0 <= ids.min() <= ids.max() < 2**31:
        raise ValueError(f"{ids.min()} … {ids.max()} are no token ids")
    return np.array(ids, np.int32)  # a copy
