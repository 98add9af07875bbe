"""`HybridLayer`: a cache layer of Transformers over blocks, with a resident set and a policy's state."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from hf_offload.blocks.block_store import BlockStore
from hf_offload.blocks.device_mirror import DeviceMirror
from hf_offload.blocks.digests import DIGESTS
from hf_offload.blocks.last_queries import LastQueries
from hf_offload.blocks.prefill_tiles import read_tiles
from hf_offload.blocks.resident_set import ResidentSet
from hf_offload.blocks.sealing import seal
from hf_offload.blocks.view import DeviceView
from hf_offload.cache.arrivals import unconsumed, unsuitable
from hf_offload.cache.rollback import Snapshot, Snapshots
from hf_offload.cache.settings import Settings
from hf_offload.cache.stats import LayerStats, Tally
from hf_offload.cache.torch_modes import attended, uncompiled
from hf_offload.gpu.block_topk import MOST_BLOCKS
from hf_offload.policies.base import LayerState
from hf_offload.scores import Scores

Work = TypeVar("Work")


class HybridLength(int):
    """The key length that a `HybridLayer` gives the mask function, which then keeps masks compact."""


class HybridLayer(CacheLayerMixin):
    """K and V of one full-attention layer: in host memory, with some blocks also on the device.

    `update` returns the new K and V tagged with this layer. The attention function finds the layer by the tag, appends
    them and attends; the cache itself computes no attention.
    """

    is_compileable = False
    is_sliding = False
    is_croppable = True
    supports_early_init = False
    dtype: torch.dtype
    device: torch.device
    device_type: str
    mirror: DeviceMirror
    """With two memories: what layers on one device share."""

    def __init__(self, index: int, settings: Settings) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.index, self.settings, self.tag = index, settings, weakref.ref(self)
        self.policy, self.requirements = settings.policy, settings.policy.requirements
        self.modules: Callable[[torch.nn.Module], bool] = lambda module: True
        """Whether an attention module belongs to the model that the cache was made for."""
        self.last_module: Callable[[], torch.nn.Module | None] = lambda: None
        """The last module for which `modules` was true."""
        self.transaction: Callable[[], Any] = lambda: None
        """The `Transaction` of the layer's cache."""
        self.size_is_asked = False
        """Whether the model's own code reads `keys` in a forward, for their size alone."""
        self.compact_masks = True
        """Whether all layers that share this layer's mask are `HybridLayer`s."""
        self.scores: Scores | None = None
        """The model's scale and softcap, known from the first call of the attention function on."""
        self.reset()

    def reset(self) -> None:
        """Drop all tokens, statistics and the policy's state; shapes may change afterwards."""
        with suppress(Exception):  # running work keeps its memory alive
            self.drain()
        self.is_initialized = False
        self.two_memories = self.settings.tier == "split"
        """Whether there are two memories, as far as that is known before `open_layer`."""
        self.store: BlockStore | None = None
        self.revision = self.settings.padding.revision
        self.resident: ResidentSet | None = None
        self._device_view: DeviceView | None = None
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self.changed = False
        """Whether the attention function got other K and V than the pending ones."""
        self.state = LayerState()
        self.step_buffers: dict[Any, Any] = {}
        """The buffers of steps (`attention.step_cpu.StepBuffers`)."""
        self.steps: dict[bool, Any] = {}
        """Planned steps with one memory (`attention.step_cpu.CpuStep`): by True for the layer itself, which writes its
        token, by False for layers that share its tokens."""
        self.ahead: Any = None
        self.host_partial: Any = None
        """The host partial, with two memories (`attention.host_partial.BlockHostPartial`), kept from step to step."""
        self.last_queries: LastQueries | None = None
        self.unplaced = True
        self.slots: int | None = None
        """Slots for each row and KV head, if given by the cache that this one is a fork or load of."""
        self.snapshots = Snapshots()
        self.stats = LayerStats(self.index)
        self.tally = Tally(self.stats)
        self.settings.padding.reset()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take sizes, dtype and device from the first K and V `[B, Hkv, T, D]`."""
        if reason := unsuitable(key_states, value_states):
            raise ValueError(f"layer {self.index} cannot be held in blocks: {reason}; use DynamicCache")
        batch, heads, _, dim = key_states.shape
        if key_states.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"K and V are {key_states.dtype}; HybridCache holds float32, float16 and bfloat16")
        open_layer(self, batch, heads, dim, key_states.dtype, key_states.device, key_states.shape[2])

    def join(
        self, modules: Callable[[torch.nn.Module], bool], transaction: Callable[[], Any], size_is_asked: bool
    ) -> None:
        """Become a layer of a cache: of its model's modules, and of its transaction.

        Args:
            modules: whether a module is the model's; transaction: returns the transaction.
            size_is_asked: whether the model's own code reads `keys` in a forward, for their size alone (Mllama).
        """
        self.modules, self.transaction, self.size_is_asked = modules, transaction, size_is_asked

    def serves(self, module: torch.nn.Module) -> bool:
        """Whether an attention module belongs to the model that the cache was made for."""
        if self.last_module() is module:
            return True
        ours = self.modules(module)
        if ours:
            self.last_module = weakref.ref(module)
        return ours

    @property
    def on_device(self) -> bool:
        """Whether the model is on a device other than the CPU."""
        return self.is_initialized and self.device_type != "cpu"

    @property
    def looks_ahead(self) -> bool:
        """Whether the policy wants this layer's query predicted."""
        return self.policy.looks_ahead(self.index, two_memories=self.two_memories, on_device=self.on_device)

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first token."""
        return self.store.batch if self.store is not None else -1

    @property
    def past(self) -> int:
        """Tokens stored in the blocks."""
        return self.store.length if self.store is not None else 0

    @property
    def keys(self) -> torch.Tensor | None:
        """K of all tokens, `[B, Hkv, T, D]` in the model's dtype on its device: a copy. None before the first token.

        Within a forward of Mllama, which asks every layer for their number, a tensor without memory (device "meta").

        Raises:
            RuntimeError: another thread is at work with the cache.
        """
        return self._read()[0]

    @keys.setter
    def keys(self, value: Any) -> None:
        self._refuse(value)

    @property
    def values(self) -> torch.Tensor | None:
        """V of all tokens, as `keys`. Each reading of either gathers both; `gather` returns them at once."""
        return self._read()[1]

    @values.setter
    def values(self, value: Any) -> None:
        self._refuse(value)

    def _read(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if self.store is None:
            return None, None
        transaction = self.transaction()
        if transaction is not None:
            transaction.check_alone()
        if not (self.size_is_asked and transaction is not None and transaction.open):
            return self.gather()
        shape = (self.store.batch, self.store.num_kv_heads, self.total, self.store.head_dim)
        empty = torch.empty(shape, dtype=self.dtype, device="meta")
        return empty, empty

    def _refuse(self, value: Any) -> None:
        if value is not None:  # which Transformers' own initialisation sets
            raise AttributeError(
                "keys and values of a HybridCache are copies and cannot be set; use to_dynamic(), change the layers of "
                "that cache, and take it over with from_cache()"
            )

    def gather(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy K and V of all tokens, `[B, Hkv, T, D]` each, in the model's dtype to its device.

        Raises:
            WorkerError: a copy between the memories failed.
            RuntimeError: a step is being captured as a CUDA graph.
        """
        store = self.store
        assert store is not None
        self.write_back()
        shape = (store.batch, store.num_kv_heads, store.length, store.head_dim)
        keys, values = (torch.empty(shape, dtype=store.dtype, device=store.device) for _ in range(2))
        for first, k, v in read_tiles(store, store.length, self.settings.prefill_tile):
            keys[:, :, first : first + k.shape[2]], values[:, :, first : first + k.shape[2]] = k, v
        if self.pending is None:
            return keys, values
        return torch.cat((keys, self.pending[0]), 2), torch.cat((values, self.pending[1]), 2)

    @uncompiled
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Announce new K and V `[B, Hkv, T, D]`; return them, without the cached ones, tagged with this layer.

        Raises:
            RuntimeError: the previous K and V never reached the `hybrid_sparse` attention function.
            ValueError: gradients are required, or a shape or dtype differs from what is cached.
        """
        if self.pending is not None:
            self.pending = None
            raise RuntimeError(unconsumed(self.index))
        if key_states.requires_grad or value_states.requires_grad:
            raise ValueError("HybridCache keeps no gradients; run the model under torch.no_grad() or use DynamicCache")
        # `tensor.device.type` takes longer than the rest of this function.
        kind = self.device_type if self.is_initialized else key_states.device.type
        if torch.is_autocast_enabled(kind):
            key_states, value_states = attended(key_states, value_states, kind)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.check_arrivals(key_states, value_states)
        if key_states.shape[2] > 1 and self.settings.residence is not None:
            self.settings.residence.make_room(self, key_states.shape[2])
        # `detach` gives new objects that carry the tag; the model's own tensors stay untagged.
        self.pending = pending = key_states.detach(), value_states.detach()
        pending[0]._hybrid_layer = pending[1]._hybrid_layer = self.tag  # type: ignore[attr-defined]
        self.changed = False
        return pending

    def check_arrivals(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Raise ValueError unless new K and V `[B, Hkv, T, D]` are like those that are held, and not too many."""
        store, index = self.store, self.index
        assert store is not None
        batch, heads, _, dim = key.shape
        if (batch, heads, dim) != (store.batch, store.num_kv_heads, store.head_dim):
            raise ValueError(
                f"layer {index} holds {store.batch} rows, {store.num_kv_heads} KV heads and head_dim {store.head_dim}, "
                f"but {batch}, {heads} and {dim} arrived; call reset() or make a new cache for another batch or model"
            )
        if key.dtype != value.dtype:
            raise ValueError(
                f"layer {index} got {key.dtype} keys and {value.dtype} values; load the model in the dtype that it "
                "should run in"
            )
        if key.dtype != self.dtype or key.device != self.device:
            raise ValueError(
                f"layer {index} holds {self.dtype} from {self.device}, but {key.dtype} on {key.device} arrived; call "
                "reset() or make a new cache"
            )
        tokens = store.length + key.shape[2]
        if tokens > (MOST_BLOCKS - 2) * store.block_size and self.two_memories:  # beside the block that comes next
            raise ValueError(
                f"{tokens} tokens a row are more than the {MOST_BLOCKS - 2} blocks of {store.block_size} among which a "
                "device chooses; use a larger block_size"
            )

    @uncompiled
    def get_seq_length(self) -> int:
        """Tokens seen, those announced included."""
        return self.total

    @property
    def total(self) -> int:
        """Tokens seen, those announced included."""
        past = 0 if self.store is None else self.store.length
        return past if self.pending is None else past + self.pending[0].shape[2]

    def get_max_length(self) -> int:
        """No limit (-1)."""
        return -1

    @uncompiled
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Key length and offset of the mask that the model prepares."""
        length = self.total + query_length
        return HybridLength(length) if self.compact_masks else length, 0

    def device_view(self) -> DeviceView:
        """The `DeviceView` of a step with two memories; the same object as long as its tensors are the same."""
        store, resident = self.store, self.resident
        assert store is not None
        assert resident is not None
        digests = store.digests
        parts = (
            store.tables.table(), store.tables.block_ptr(), resident.pool, resident.block_of, resident.slot_of,
            resident.worth, resident.scored, self.state,
            *(() if digests is None or not digests.frozen else digests.held()),
        )  # fmt: skip
        if self._device_view is None or not self._device_view.names(parts):
            self._device_view = DeviceView(parts)
        return self._device_view

    def fits_device(self, length: int) -> bool:
        """Whether there is a slot for each block of `length` tokens, so that all of them are resident."""
        return self.resident is not None and -(-length // self.settings.block_size) <= self.resident.slots

    @property
    def outgrown(self) -> bool:
        """Whether all blocks are resident but the next one will not be, so that `Residence` is asked again."""
        residence, length = self.settings.residence, self.past
        if residence is None or not self.fits_device(length) or self.fits_device(length + 1):
            return False
        return residence.decides(self.device)

    @property
    def is_least(self) -> bool:
        """Whether a number of slots was given, or the least was taken; if not, the device's room has decided."""
        least = self.settings.resident // self.settings.block_size
        return self.settings.residence is None or (self.resident is not None and self.resident.slots == least)

    def holds_all(self, length: int) -> bool:
        """Whether all blocks are resident in a step with `length` tokens."""
        resident = self.resident
        return resident is not None and not (self.unplaced or resident.lacks) and self.fits_device(length)

    def may_begin_early(self, length: int) -> bool:
        """Whether a step with `length` tokens may have a part for the host, to be begun one layer ahead."""
        return not (self.requirements.holds_all and self.holds_all(length))

    def is_dense(self, length: int) -> bool:
        """Whether a step with `length` tokens attends all of them on the device, without a choice."""
        return self.holds_all(length) and self.policy.attends_all(self, length)

    def take_pending(self) -> bool:
        """Return whether the forward has new K and V, and forget them: they are stored, or it has failed."""
        pending, self.pending = self.pending, None
        return pending is not None

    def remember(self, scores: Scores | None, queries: LastQueries | None) -> None:
        """Hold the model's scores and a prompt's last queries."""
        self.scores, self.last_queries = scores, queries

    def note_placed(self) -> None:
        """The resident set holds its blocks."""
        self.unplaced = False

    def start_ahead(self, work: Work) -> Work:
        """Hold work for a step that is started a layer ahead, until that step ends (None) or is drained; return it."""
        self.ahead = work
        return work

    def host_partial_of(self, fits: Callable[[Any], bool], make: Callable[[], Work]) -> Work:
        """Return the host partial that is kept from step to step, or a new one if it does not fit the step."""
        if self.host_partial is None or not fits(self.host_partial):
            self.host_partial = make()
        kept: Work = self.host_partial
        return kept

    def drain_ahead(self) -> None:
        """Wait for the host partial that was started a layer ahead, and drop it."""
        ahead, self.ahead = getattr(self, "ahead", None), None
        for partial in (ahead, getattr(self, "host_partial", None)):
            if partial is not None:
                partial.cancel()

    def drain(self) -> None:
        """Wait for all work in flight: copies, the state's jobs, and the host partial started ahead, which is dropped.

        Raises:
            WorkerError: a copy failed; its blocks are then not resident, and the host still has them.
        """
        self.drain_ahead()
        if getattr(self, "resident", None) is not None:
            self.resident.synchronize()  # type: ignore[union-attr]
        if hasattr(self, "state"):
            self.state.wait()

    def count(self, name: str, value: torch.Tensor | float) -> None:
        """Record a tensor or a number for the statistics (`Tally.add`)."""
        if self.mirror.capture is not None:
            self.mirror.capture.count(self, name, value)
        else:
            self.tally.add(name, value)

    def pack_old(self, length: int) -> None:
        """Pack the host blocks that are old at a length of `length` tokens."""
        assert self.store is not None
        if self.store.has_old(length):
            if self.resident is not None:
                self.resident.synchronize()  # recalls may be reading
            self.store.pack_old(length)

    def heed_padding(self) -> None:
        """If earlier tokens became valid or invalid, rebuild their digests and drop resident set and plans."""
        padding = self.settings.padding
        if self.revision == padding.revision:
            return
        block = padding.changed_block
        if self.store is not None and self.store.sealed > block:
            self.unplace()  # and no work in flight reads the blocks
            self.state.padding_changed(self, block)
            self.store.own(range(block, self.store.sealed))
            self.store.sealed = block
            if self.store.digests is not None:
                self.store.digests.crop(block * self.store.block_size)
            seal(self.store, self.settings.prefill_tile)
        else:
            self.state.padding_changed(self, block)
        self.revision = padding.revision

    def forget_plans(self) -> None:
        """Drop all plans and begun work; the next step is planned again."""
        self.drain_ahead()
        self.steps.clear()
        self.state.cancelled()

    def resize_resident(self, slots: int) -> ResidentSet:
        """Replace the resident set by an empty one with this many slots for each row and KV head."""
        assert self.store is not None
        assert self.resident is not None
        self.resident.free()  # before there is another
        self.host_partial = self._device_view = None
        self.resident = ResidentSet(self.store, slots, self.mirror)
        return self.resident

    def write_back(self) -> None:
        """Copy the block that only the device holds to the host; the resident set stays."""
        if self.resident is None or self.store is None or self.unplaced:
            return
        if self.store.sealed < self.store.num_blocks:  # full if a step failed before `close_step`
            with self.mirror.current():
                self.resident.store_block(self.store.num_blocks - 1, self.store.length)
        self.resident.synchronize()

    def unplace(self) -> None:
        """Copy the block that only the device holds to the host; drop the resident set until the next decode step."""
        self.drain_ahead()
        self.write_back()
        self.state.unplaced(self)
        if self.resident is not None and not self.unplaced:
            self.unplaced = True  # set first: the host has all blocks, and slots change from here on
            self.resident.clear()
        self.unplaced = True
        self.forget_plans()

    def prepare_crop(self, tokens_to_remove: int) -> int:
        """Do the part of a crop that may fail; return minus the number of tokens that `crop` will drop.

        Raises:
            ValueError: the number is positive.
        """
        tokens_to_remove = int(tokens_to_remove)  # some versions of Transformers pass a tensor
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): a positive number is not supported; use -n to drop n tokens")
        if tokens_to_remove == 0 or self.store is None:
            return 0
        tokens_to_remove = max(tokens_to_remove, -self.store.length)
        length = self.store.length + tokens_to_remove
        if not self.snapshots.knows(length):
            self.store.open(length)
            self.state.prepare_crop(self, length)
        return tokens_to_remove

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens, at most all of them.

        Raises:
            ValueError: the number is positive.
        """
        self.go_back(self.past + self.prepare_crop(tokens_to_remove))

    def go_back(self, length: int) -> None:
        """Keep the first `length` tokens, after `prepare_crop` or in a rollback: as they were in a snapshot, if any."""
        if self.store is None or length >= self.store.length:
            return
        self.drain()
        snapshot = self.snapshots.take(length)
        if snapshot is None:
            self.snapshots.clear()
            self.unplace()
        else:
            self.store.unpack(snapshot.packed)
        if self.last_queries is not None:
            self.last_queries = self.last_queries.cropped(length)
        if snapshot is None:
            self.state.crop(self, length)
        self.store.crop(length)  # last: after an interruption, another crop completes it
        if snapshot is not None:
            self._restore(snapshot)
        self.settings.padding.truncate(length)

    def take_snapshot(self) -> None:
        """Keep a snapshot of the layer between two tokens, for a crop to its present length."""
        store = self.store
        assert store is not None
        policy = self.state.snapshot()  # may free slots
        resident = None if self.resident is None or self.unplaced else self.resident.state()
        snapshot = Snapshot(policy, store.packed_so_far(), store.awaits_digests, resident)
        self.snapshots.save(self.past, snapshot, store.pool)

    def _restore(self, snapshot: Snapshot) -> None:
        """Restore a snapshot; the blocks are cropped already."""
        self.state.restore(self, snapshot.policy)
        self.unplaced = snapshot.resident is None
        if snapshot.awaits_digests and self.store is not None and self.store.digests is not None:
            self.store.digests.frozen = False
        if self.resident is None:
            return
        if snapshot.resident is None or snapshot.resident[0].shape[2] != self.resident.slots:
            self.unplaced = True
            self.resident.clear()
        else:
            self.resident.restore(snapshot.resident, f"a crop of layer {self.index}")

    def select_rows(self, rows: np.ndarray) -> None:
        """Keep the rows of an index `[B']`; host blocks are shared, not copied."""
        if self.store is None:
            return
        self.drain()
        self.snapshots.clear()
        if len(rows) > self.store.batch and not self.is_least:  # of more rows the device may hold less
            self.unplace()
            self.resize_resident(0)
        self.store.select_rows(rows)
        if self.resident is not None:
            self.resident.select_rows(rows)
        self.state.select_rows(self, torch.from_numpy(rows))
        if self.last_queries is not None:
            self.last_queries = self.last_queries.select_rows(torch.from_numpy(rows))
        self.step_buffers.clear()
        self.steps.clear()
        self._device_view = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the rows for beam search."""
        self.select_rows(beam_idx.detach().cpu().numpy())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, in place."""
        self.select_rows(np.repeat(np.arange(max(self.batch_size, 0)), repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows of an index (numbers, or a bool mask)."""
        rows = indices.detach().cpu().numpy()
        self.select_rows(np.flatnonzero(rows) if rows.dtype == bool else rows)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a layer of a HybridCache cannot be copied or pickled by itself; use fork() of the cache")

    def offload(self) -> None:
        """Nothing to do: blocks are offloaded by the policy."""

    def prefetch(self) -> None:
        """Nothing to do: blocks are fetched by the policy."""


def open_layer(
    layer: HybridLayer, batch: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device, tokens: int = 0,
    slots: int | None = None,
) -> None:  # fmt: skip
    """Make the store, resident set and state of an empty layer.

    Args:
        layer: the layer.
        batch: rows; heads: KV heads; dim: head dimension.
        dtype, device: dtype and device of the model's K and V.
        tokens: tokens of the first prompt; with a device budget, their digests reduce the slots.
        slots: slots for each row and KV head; None: by the settings.

    Raises:
        ValueError: one memory is asked for, but the model is on a device.
        MemoryError: no memory is left for threads or blocks.
    """
    settings, policy = layer.settings, layer.policy
    layer.dtype, layer.device, layer.device_type = dtype, device, device.type
    layer.slots, layer.revision = slots, settings.padding.revision
    layer.two_memories = settings.tier == "split" or (settings.tier is None and device.type != "cpu")
    if settings.tier == "one" and device.type != "cpu":
        raise ValueError(f'tier="one" is for models on the CPU, but this one is on {device}; leave tier out')
    if layer.two_memories:
        settings.worker.ready()
    name = layer.requirements.digest
    layer.store = store = BlockStore(
        batch, heads, dim, dtype, block_size=settings.block_size, device=device, digest=DIGESTS[name] if name else None,
        padding=settings.padding, host_dtype=settings.host_dtype,
        worker=settings.worker if layer.two_memories else None,
        scored_on_host=layer.requirements.scored_on_host,
    )  # fmt: skip
    if layer.two_memories:
        budget = settings.device_budget if slots is None else None
        if slots is None:
            later = settings.residence is not None and settings.residence.decides(device)
            slots = 0 if later else settings.resident // settings.block_size
        layer.mirror = settings.mirror(device)
        layer.tally.record_bytes = store.pool.record_bytes
        if budget is not None:
            slots = budget.slots(store, tokens)
        layer.resident = ResidentSet(store, slots, layer.mirror)
    state = policy.new_state(layer)
    if not isinstance(state, LayerState):
        raise TypeError(f"{type(policy).__name__}.new_state gave {state!r}, which is no LayerState")
    layer.state = state
    layer.is_initialized = True
