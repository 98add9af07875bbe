"""`HybridCache`: the cache that users make."""

from __future__ import annotations

import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from hf_offload.blocks.digests import DIGESTS
from hf_offload.blocks.padding import Padding
from hf_offload.blocks.row_index import row_numbers
from hf_offload.cache.checks import Checks
from hf_offload.cache.conversion import fork_layers, give_back, take_over
from hf_offload.cache.layer import HybridLayer
from hf_offload.cache.memory_budget import make_budget, resident_tokens
from hf_offload.cache.progress import PromptProgress
from hf_offload.cache.residence import Residence, append_bytes
from hf_offload.cache.settings import AUTO, Settings, check_sizes, check_tier
from hf_offload.cache.settings import BLOCK_SIZES as BLOCK_SIZES
from hf_offload.cache.stats import LayerStats, Pace, Stats
from hf_offload.cache.stock_layers import copy_layer
from hf_offload.cache.transaction import Transaction
from hf_offload.cpu.cores import cores
from hf_offload.cpu.thread_pool import Worker, WorkerError
from hf_offload.files.fingerprint import difference, fingerprint, likeness
from hf_offload.files.loading import SavedCache, merge_knobs
from hf_offload.files.saving import save_cache
from hf_offload.files.segments import Segment
from hf_offload.graph.cuda_graph import StepGraph, graphed
from hf_offload.graph.graph_support import obstacle, tell_eager
from hf_offload.knobs import MOST, check_choice, check_flag, shown
from hf_offload.model.announced_drafts import check_drafts, watch
from hf_offload.model.fallback import Fallback
from hf_offload.model.hooks import attach, find_layers, hybrid_layers
from hf_offload.model.model_support import (
    check_held,
    check_model,
    has_two_memories,
    held_layers,
    image_layers,
    on_device,
    stock_layers,
)
from hf_offload.policies.base import Policy
from hf_offload.policies.registry import describe_policy, make_policy, saved_policy

MOST_THREADS = 16  # by default: more hardly read faster


class HybridCache(Cache):
    """A KV cache with a few blocks on the device and the rest in host memory.

    Pass it as `past_key_values` to `generate()` or to a forward of the model that it was made for. The model must run
    with `attn_implementation="hybrid_sparse"`. Prompts and appends attend every token; decode steps attend what the
    policy chooses. Layers that are not plain full attention (sliding windows, linear attention) keep Transformers'
    own cache.

    Args:
        model: the model that will use the cache.
        policy: a policy's name (`"scout"`, `"hgca"`, `"full"`, …) or a policy such as `Scout(budget=1024)`.
        tier: None: two memories for a model on a GPU, one for a model on the CPU. `"split"`: two memories on the CPU,
            to try what a GPU would do. `"one"`: one memory; a ValueError for a model on a GPU.
        block_size: tokens in a block: 8, 16, 32, 64 or 128; None: the policy's own, 32 or 16.
        resident: tokens that a row and KV head keeps on the device, with two memories. `"auto"` (or None): all, while a
            GPU has room for them, else one and a half budgets, or the window (`docs/device-memory.md`).
        device_budget: in place of `resident`: device memory for the resident blocks of all layers, in bytes or as a
            string such as `"2GiB"` or `"512MB"`. All layers get an equal share. It covers the digests of the first
            tokens; digests of later ones come on top. Or `"64 blocks"`: for each row and KV head of a layer.
        host_dtype: `"int8"`: the host keeps all but the newest blocks in int8, with a scale for each channel of a
            block's keys and for each token of its values. None: the model's dtype.
        prefill_tile: cached tokens that a prompt chunk or append reads at a time. With two memories the device holds
            two tiles.
        cuda_graph: capture a decode step as a CUDA graph and replay it in later steps. `"auto"`: where a model on one
            CUDA device has full attention in all layers and the policy allows it; a warning tells once why steps of
            such a model run eagerly all the same. True: an error where it cannot be had; a replay calls no hooks and
            asks no module. False: never.
        threads: CPU threads for work that runs beside the model. None: one without a GPU; with one, all cores of the
            process but one, at most 16, shared among the processes that a launcher started. Work that the model waits
            for runs on torch's threads (`torch.set_num_threads`).
        timeout: seconds to wait for a worker thread; then a `WorkerError`.
        check_every: compare a step of one layer in turn with full attention, every `check_every` steps, and report in
            `stats()` what was missed. A check takes as long as full attention in that layer, on the CPU. None: never.
        progress: show a `tqdm.auto` bar on stderr for prompts and appends that take longer than five seconds, by layer
            and tile. Each chunk of a chunked prompt has a bar of its own; the five seconds count from the first chunk.
        knobs: the policy's knobs; see its class.

    Raises:
        TypeError: `model` is not a Transformers model, or `policy` is neither a name nor a policy.
        ValueError: a value that is not allowed, or a model that this cache does not support.
    """

    layer_type = HybridLayer
    """What hooks know a cache of theirs by: after the package was imported again, both imports' hooks may be there."""

    def __init__(
        self,
        model: PreTrainedModel,
        policy: str | Policy = "scout",
        *,
        tier: str | None = None,
        block_size: int | None = None,
        resident: int | str | None = AUTO,
        device_budget: int | str | None = None,
        host_dtype: str | None = None,
        prefill_tile: int = 4096,
        cuda_graph: bool | str = AUTO,
        threads: int | None = None,
        timeout: float = 120.0,
        check_every: int | None = None,
        progress: bool = False,
        **knobs: Any,
    ) -> None:
        config = check_model(model)
        self.policy = make_policy(policy, knobs).for_model(lambda: likeness(config, find_layers(model)[0]))
        block_size = self.policy.block_size if block_size is None else block_size
        check_tier(tier)
        check_flag("progress", progress)
        check_sizes(block_size, prefill_tile, host_dtype, cuda_graph)
        stock = stock_layers(config)
        two_memories = has_two_memories(model, tier)
        self.policy = self.policy.with_defaults(two_memories=two_memories)
        self.policy.check(block_size=block_size, two_memories=two_memories)
        check_choice("digest", self.policy.requirements.digest, (None, *DIGESTS))
        held = held_layers(config, stock)
        check_held(type(model).__name__, stock, held)
        if isinstance(resident, str) and resident != AUTO:
            raise ValueError(f'resident={shown(resident)} is no number of tokens; use one, or "{AUTO}"')
        given = None if isinstance(resident, str) else resident
        budget = make_budget(device_budget, given, sum(held), self.policy, block_size, two_memories=two_memories)
        least = resident_tokens(given, self.policy, block_size)
        residence = None
        if two_memories and given is None and budget is None and self.policy.requirements.holds_all:
            residence = Residence(least // block_size, append_bytes(config))
        captured = self._may_capture(model, config, cuda_graph, host_dtype)
        checks = None
        if check_every is not None:
            checks = Checks(check_every, tuple(i for i, ours in enumerate(held) if ours))
        settings = Settings(
            policy=self.policy,
            tier=tier,
            block_size=block_size,
            resident=least,
            prefill_tile=prefill_tile,
            worker=Worker(default_threads(model) if threads is None else threads, timeout),
            padding=Padding(block_size),
            host_dtype=host_dtype,
            device_budget=budget,
            residence=residence,
            progress=PromptProgress() if progress else None,
            checks=checks,
        )
        self.settings = settings
        self._config = config
        self._model = weakref.ref(model)
        # How the cache was made, but for the policy, its threads and their timeout.
        self._knobs: dict[str, Any] = {
            "tier": tier,
            "block_size": block_size,
            "resident": given,
            "device_budget": device_budget,
            "host_dtype": host_dtype,
            "prefill_tile": prefill_tile,
            "cuda_graph": cuda_graph,
        }
        super().__init__(layers=[HybridLayer(i, settings) if held[i] else layer for i, layer in enumerate(stock)])
        shares = bool(getattr(config, "num_kv_shared_layers", 0))
        self.fallback = Fallback(
            type(model).__name__,
            self.layers,
            image_layers(config),
            compact=not shares,
            graphs=captured and cuda_graph is True,
        )
        self._attachment, self._watch = attach(model), watch(model)
        self._forking = threading.Lock()
        self._looks_ahead: dict[bool, bool] = {}
        device = on_device(model) and captured
        self._may_look_ahead = any(
            self.policy.looks_ahead(layer.index, two_memories=two_memories, on_device=device)
            for layer in hybrid_layers(self)
        )
        self.donors: dict[int, int] = {}
        """For each decoder layer, an earlier one whose keyword arguments serve it; learnt from their calls."""
        self._pace = Pace()
        self.after_forward: Callable[[], None] | None = None
        """Called after each forward that has not failed."""
        self.transaction = Transaction(self.layers, settings, self.fallback.undo)
        self.graph = StepGraph(self, auto=cuda_graph == AUTO) if captured else None
        self._graphed = graphed(model) if captured else None
        if residence is not None:
            residence.serve(hybrid_layers(self), weakref.WeakMethod(self.graph.close) if self.graph else None)
        owned = weakref.WeakSet(model.modules())
        for layer in hybrid_layers(self):
            layer.join(owned.__contains__, weakref.ref(self.transaction), bool(image_layers(config)))

    def _may_capture(self, model: PreTrainedModel, config: Any, wanted: bool | str, host_dtype: str | None) -> bool:
        """Whether decode steps are to be captured; what speaks against it is an error if they must be.

        Raises:
            ValueError: `wanted` is True, and they cannot be.
        """
        if wanted is False:
            return False
        reason = obstacle(model, self.policy, config, host_dtype)
        if reason is not None and wanted is True:
            raise ValueError(f"cuda_graph=True: {reason}; leave it out")
        if reason is not None and self.policy.requirements.capturable and on_device(model):
            tell_eager(reason, stacklevel=3)
        return reason is None

    # --- what the model calls -----------------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values `[B, Hkv, T, D]` to a layer; the model calls this.

        A layer whose keys and values fit no block becomes one of Transformers' own, with a warning.

        Raises:
            ValueError: other rows, heads, dtype or device than those that the cache holds.
        """
        layer = self.layers[layer_idx]
        if type(layer) is HybridLayer and layer.past:  # what `admit` and the base class do is for others
            return layer.update(key_states, value_states)
        self.fallback.admit(layer_idx, key_states, value_states)
        updated: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return updated

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]]:
        """Yield copies of K and V `[B, Hkv, T, D]` of each layer, and its window or None, as `DynamicCache` does."""
        layers: list[Any] = self.layers
        for layer in layers:
            if isinstance(layer, HybridLayer):
                yield (*(layer.gather() if layer.past else (layer.keys, layer.values)), None)
            else:  # a replayed step overwrites a window
                keys, values = (None if x is None else x.clone() for x in (layer.keys, layer.values))
                yield keys, values, getattr(layer, "_sliding_window_tensor", None)

    @property
    def looks_ahead(self) -> bool:
        """Whether any layer wants its query predicted; until the first token has arrived, whether one may."""
        captured = self.graph is not None and not self.graph.off
        if captured not in self._looks_ahead:
            layers = hybrid_layers(self)
            if not all(layer.is_initialized for layer in layers):
                return self._may_look_ahead
            self._looks_ahead[captured] = any(
                self.policy.looks_ahead(
                    layer.index, two_memories=layer.two_memories, on_device=layer.on_device and captured
                )
                for layer in layers
            )
        return self._looks_ahead[captured]

    def predict_query(
        self, target: int, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """The query `[B, Hq, Q, D]` that decoder layer `target` would compute from an earlier layer's input.

        Args:
            target: number of the decoder layer.
            hidden: `[B, Q, hidden]`, the input of the layer before.
            args, kwargs: the other arguments of its forward.
        """
        return self._attachment.predictors[target](hidden, args, kwargs)

    @property
    def is_initialized(self) -> bool:
        """Whether the cache holds tokens; models distinguish a prompt from a decode step by it."""
        return self.get_seq_length() > 0

    def drain(self, *, quiet: bool = False) -> None:
        """Wait for the work in flight of all layers.

        Args:
            quiet: whether failures are of no interest any more.

        Raises:
            WorkerError: a copy failed in some layer; raised once for all layers; nothing is lost.
        """
        failed: WorkerError | None = None
        if self.graph is not None and not quiet:
            self.graph.check(wait=True)
        for layer in hybrid_layers(self):
            try:
                layer.drain()
            except WorkerError as error:
                failed = failed or error
        if failed is not None and not quiet:
            raise failed

    def begin(self) -> None:
        """A forward starts (the model's hook calls this).

        Raises:
            RuntimeError: the forward before was interrupted; the cache has been put back to what it was before it. Or
                another thread is at work with this cache.
        """
        self.transaction.begin(self.get_seq_length())
        if self.settings.progress is not None:
            self.settings.progress.begin(len(hybrid_layers(self)))
        self.settings.drafts.begin()
        if self.settings.drafts.recording:
            for layer in hybrid_layers(self):
                layer.snapshots.clear()

    def end(self, finished: bool) -> None:
        """A forward ends (the model's hook calls this); one that raised is undone."""
        transaction = self.transaction
        if not transaction.held_by_this_thread:  # it never began
            if finished:
                transaction.mark_inconsistent("a forward during which the cache was changed")
            return
        self.settings.drafts.end()
        if self.settings.progress is not None:
            self.settings.progress.end(finished)
        if finished:
            self._pace.forward(self.get_seq_length() - (transaction.floor or 0))
            transaction.commit()
        with suppress(RuntimeError):  # raised by the next forward; this one raises its own error
            transaction.rollback(interrupted=False)
        transaction.leave()
        if finished and self.after_forward is not None:
            self.after_forward()

    def fail(self, past: int) -> None:
        """Undo a forward that failed when its layers had ended; the cache held `past` tokens before it."""
        self.transaction.reopen(past)
        with suppress(RuntimeError):
            self.transaction.rollback()
        self.transaction.leave()

    # --- tokens and rows ----------------------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens, at most all of them, and wait for work in flight first.

        It also undoes an interrupted forward; `crop(0)` does nothing else.

        Args:
            tokens_to_remove: 0 or less.

        Raises:
            TypeError: not a whole number.
            ValueError: a positive number.
            RuntimeError: a sliding-window layer is past its window and does not record the tokens that left it; or
                another thread uses the cache.
        """
        try:
            tokens = operator.index(tokens_to_remove)  # a tensor of one whole number, too
        except (TypeError, ValueError):
            raise TypeError(f"crop({tokens_to_remove!r}): use a whole number, -n to drop n tokens") from None
        with self.alone():
            lengths = [layer.past for layer in hybrid_layers(self)] or [self.get_seq_length()]
            tokens = max(tokens, -max(lengths))
            if tokens:
                self.transaction.crop(tokens, max(min(lengths) + tokens, 0))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the rows for beam search; rows share host blocks by reference.

        Args:
            beam_idx: int64 or int32 `[rows]`, the old row of each new one.

        Raises:
            IndexError, TypeError, ValueError: as `batch_select_indices`; a mask is a TypeError.
        """
        with self.alone(), self._rows("reorder_cache()", beam_idx, (torch.int64, torch.int32)) as rows:
            super().reorder_cache(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times; the copies share host blocks.

        Raises:
            TypeError: not a whole number.
            ValueError: less than 1.
        """
        what = f"batch_repeat_interleave({shown(repeats)})"
        rows = self._row_count()
        most = MOST // max(rows, 1)
        if isinstance(repeats, int) and not 1 <= repeats <= most:
            raise ValueError(f"{what}: use a whole number from 1 to {most}")
        try:
            index = torch.arange(rows, device="cpu").repeat_interleave(repeats)
        except TypeError:
            raise TypeError(f"{what}: use a whole number") from None
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            raise ValueError(f"{what}: use a whole number from 1 to {most}") from None
        with self.alone(), self._rows(what, index) as index:
            self._keep_rows("batch_repeat_interleave", repeats, index)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows that an index names, and drop the others.

        Args:
            indices: int64 or int32 row numbers `[n]`, negative ones from the end; or a bool mask `[rows]`. A list or
                tuple will do.

        Raises:
            IndexError: a number beyond the rows.
            TypeError: neither row numbers nor a mask.
            ValueError: a mask of another length, an index of another shape than `[rows]`, or one that keeps no row.
        """
        with self.alone(), self._rows("batch_select_indices()", indices) as index:
            self._keep_rows("batch_select_indices", index, index)

    def reset(self) -> None:
        """Drop all tokens and statistics; the next batch may have other rows.

        Raises:
            RuntimeError: another thread uses the cache.
        """
        self.transaction.take(inconsistent=True)
        with self.transaction.changing_rows("reset()"):
            with suppress(Exception):  # a state of the user's own may raise what it likes
                self.drain(quiet=True)
            if self.graph is not None:
                self.graph.reset()
            self.transaction.commit()
            self._looks_ahead, self._pace = {}, Pace()
            self.settings.drafts.forget()
            if self.settings.residence is not None:
                self.settings.residence.forget()
            for i, fresh in enumerate(stock_layers(self._config)):
                layer = self.layers[i]
                if isinstance(layer, HybridLayer):
                    layer.snapshots.clear()
                    layer.reset()
                else:  # Transformers' own resets keep old keys in some versions
                    self.layers[i] = fresh
        self.transaction.leave()

    def activate_past_recording(self) -> None:
        """Verify drafts from now on: until `reset()`, a forward with `logits_to_keep=n + 1` ends with n draft tokens.

        Assisted decoding calls this. The policy attends each draft in a decode step of its own. `crop` drops rejected
        drafts and restores the policy's state from before them.

        Raises:
            ValueError: the model's forward takes no `logits_to_keep`, or no `position_ids` for a cache with tokens.
        """
        check_drafts(self._watch, self.policy, self.get_seq_length())
        for layer in self.layers:  # those that keep only what they need
            getattr(layer, "activate_past_recording", lambda: None)()
        self.settings.drafts.recording = self.settings.drafts.fresh = True

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have the cache to oneself, as a whole forward left it and with no work in flight."""
        self.transaction.take()
        try:
            self.transaction.rollback()
            self.drain()
            yield
        finally:
            self.transaction.leave()

    @contextmanager
    def _rows(
        self, what: str, index: Any, dtypes: tuple[torch.dtype, ...] = (torch.int64, torch.int32, torch.bool)
    ) -> Iterator[torch.LongTensor]:
        """What is inside keeps the rows of an index in every layer; it gets their numbers `[rows]`, none negative.

        Raises:
            IndexError, TypeError, ValueError: as `batch_select_indices`; nothing has happened.
        """
        rows = row_numbers(what, index, self._row_count(), dtypes)
        for layer in self.transaction.hybrid:
            if layer.store is not None:
                layer.state.check_rows(layer)
        if self.graph is not None:
            self.graph.close()  # which holds what is resident now
        with self.transaction.changing_rows(what):
            yield rows
            self.settings.padding.select_rows(rows.numpy())

    def _keep_rows(self, method: str, argument: Any, rows: torch.LongTensor) -> None:
        """Call a method of every layer, or `reorder_cache` of those with linear attention, which lack it."""
        layers: list[Any] = self.layers
        for layer in layers:
            if hasattr(layer, method):
                getattr(layer, method)(argument)
            else:
                layer.reorder_cache(rows)

    def _row_count(self) -> int:
        """Rows of the cache; 0 if it is empty."""
        stock = [getattr(layer, "keys", None) for layer in self.layers if not isinstance(layer, HybridLayer)]
        rows = len(self.settings.padding.first)  # 0 where no layer of ours is left
        return rows or next((len(keys) for keys in stock if keys is not None), 0)

    # --- other caches, and files --------------------------------------------------------------------------------------
    # Callers may be in inference mode. The tensors made here are also written outside of it: `inference_mode(False)`.

    @classmethod
    @torch.inference_mode(False)
    def from_cache(
        cls,
        cache: DynamicCache,
        model: PreTrainedModel,
        policy: str | Policy = "scout",
        *,
        attention_mask: torch.Tensor | None = None,
        **knobs: Any,
    ) -> Self:
        """Make a cache that continues after the tokens of a `DynamicCache` of the same model.

        Policies that learn from a prompt's queries (`hgca`, `h2o`, `infinigen`, `fluxion`) do not have these queries.

        Args:
            cache: keys and values `[B, Hkv, T, D]` of each layer, on any device; they are copied.
            model, policy, knobs: as for `HybridCache(...)`.
            attention_mask: `[B, T]`, 0 where a cached token is padding; None: there is none.

        Raises:
            TypeError: `cache` is not a `DynamicCache`.
            ValueError: `cache` is not of this model, or the mask has another shape; and as `HybridCache(...)`.
        """
        made = cls(model, policy, **knobs)
        take_over(made.layers, cache, made._attachment.layers, attention_mask, made._config)
        made.fallback.taken_over()
        return made

    @torch.inference_mode(False)
    def to_dynamic(self) -> DynamicCache:
        """Copy all tokens into a `DynamicCache`: keys and values `[B, Hkv, T, D]` on each layer's device."""
        made, layers = DynamicCache(config=self._config), stock_layers(self._config)
        with self.alone():
            for index, layer in enumerate(self.layers):
                if isinstance(layer, HybridLayer):
                    give_back(layer, layers[index])
                else:
                    layers[index] = copy_layer(layer)
        made.layers = layers
        return made

    @torch.inference_mode(False)
    def fork(self) -> Self:
        """Make another cache that continues from the same tokens; both may run, also in two threads.

        Caches share host blocks and digests, counted by reference, and copy a block before they write into it. Resident
        blocks, the policy's state and padding are copied, so that the fork gives the tokens that this cache would have
        given. Its statistics start at zero. `copy.deepcopy(cache)` does the same. A subclass's attributes are left
        out.

        Raises:
            RuntimeError: the model was deleted, or another thread uses the cache.
        """
        return self._fork(self._model())

    @property
    def knobs(self) -> dict[str, Any]:
        """How the cache was made, but for model and policy."""
        worker, checks = self.settings.worker, self.settings.checks
        return self._knobs | {
            "threads": worker.threads, "timeout": worker.timeout, "progress": self.settings.progress is not None,
            "check_every": None if checks is None else checks.every,
        }  # fmt: skip

    def _fork(self, model: PreTrainedModel | None) -> Self:
        if model is None:
            raise RuntimeError("the model of this cache is gone; keep a reference to it")
        made = type(self)(model, self.policy, **self.knobs)
        with self._forking, self.alone():  # one fork after the other, in whichever threads
            fork_layers(self.layers, made.layers, self.settings.padding, made.settings.padding)
            made.fallback.taken_over()
        made.donors = dict(self.donors)
        return made

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the cache into a folder; `load` makes a cache of it that continues as this one would have.

        A saved cache of that name is replaced: the last step is a rename. A `save` that is interrupted, killed or cut
        off by a power failure leaves the old one or the new one, whole, and maybe files that the next one removes.

        Args:
            folder: a folder for this cache alone; created if missing. A symbolic link is followed.

        Raises:
            ValueError: something else has that name, or the policy is not registered (`register_policy`).
            OSError: the disk is full, or the folder cannot be written; nothing is left behind.
            RuntimeError: the model was deleted, or another thread uses the cache.
        """
        self.save_segments(Path(folder))

    def save_segments(
        self, folder: Path, parent: Sequence[Segment] = (), more: Mapping[str, bytes] | None = None
    ) -> list[Segment]:
        """`save` for a store of many caches; see `files.saving.save_cache`."""
        about = {
            "policy": describe_policy(self.policy),
            "knobs": self._knobs,
            "donors": list(self.donors.items()),
            "model": fingerprint(self._config, self._attachment.stack),
        }
        with self.alone():
            return save_cache(folder, self.layers, self.settings.padding, about, parent=parent, more=more)

    @classmethod
    @torch.inference_mode(False)
    def load(cls, folder: str | os.PathLike[str], model: PreTrainedModel, *, verify: bool = True, **knobs: Any) -> Self:
        """Make the cache that `save` wrote, for the same model.

        Every number and tensor of the files is checked: one that was damaged or forged is a ValueError. With one memory
        the file of the blocks is mapped and not written; do not change it while the cache lives. With two memories
        `load` reads the blocks.

        Args:
            folder: the folder given to `save`.
            model: a model with the same weights, in the same dtype.
            verify: whether all blocks are compared with their checksums. False: with one memory, a step reads a block
                when it first needs it, and does not notice keys and values that were altered.
            knobs: these knobs of `HybridCache`, in place of the saved ones: `tier`, `resident`, `device_budget`,
                `prefill_tile`, `cuda_graph`, `threads`, `timeout`, `check_every`, `progress`.

        Raises:
            ValueError: no saved cache, a file that was cut short, altered or forged, another model, or another knob.
            FileNotFoundError: the file of the policy's predictor is gone.
            MemoryError: the host has no memory left for the cache.
        """
        return cls.load_segments(Path(folder), model, verify=verify, **knobs)[0]

    @classmethod
    @torch.inference_mode(False)
    def load_segments(
        cls, folder: Path, model: PreTrainedModel, *, verify: bool = True, **knobs: Any
    ) -> tuple[Self, list[Segment]]:
        """`load`; and the segments of the cache, for `save_segments` of its forks while it is unchanged."""
        check_flag("verify", verify)
        saved = SavedCache(folder)
        config, stack = check_model(model), find_layers(model)[0]
        with saved.sound():
            odd = difference(saved.about["model"], fingerprint(config, stack))
            policy = saved_policy(saved.about["policy"])
        if odd is not None:
            raise ValueError(f"{folder} was saved with another model than this {type(model).__name__}: {odd}")
        merged = merge_knobs(saved.about["knobs"], knobs)
        policy = policy.for_memories(two_memories=has_two_memories(model, merged["tier"]))
        made = cls(model, policy, **merged)
        restore_resident = not knobs.keys() & {"resident", "device_budget"}
        segments = saved.restore(
            made.layers, stock_layers(config), made._attachment.layers, image_layers(config),
            restore_resident=restore_resident, verify=verify,
        )  # fmt: skip
        made.fallback.taken_over()
        made.donors = dict(saved.about["donors"])
        return made, segments

    # --- statistics ---------------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Return steps, recalls and times since the cache was made or reset, and the memory in use now."""
        layers = hybrid_layers(self)
        rows = [_report(layer) for layer in layers]
        near = sum(
            (row.resident_bytes if layer.two_memories else row.host_bytes)
            + (0 if layer.two_memories and layer.requirements.scored_on_host else row.digest_bytes)
            for layer, row in zip(layers, rows, strict=True)
            if layer.is_initialized
        )
        stock = [layer for layer in self.layers if not isinstance(layer, HybridLayer)]
        tensors = [getattr(layer, name, None) for layer in stock for name in ("keys", "values")]
        other = sum(int(tensor.nbytes) for tensor in tensors if isinstance(tensor, torch.Tensor))
        numbers = [i for i, layer in enumerate(self.layers) if not isinstance(layer, HybridLayer)]
        return Stats(rows, near + other, numbers, self._pace.percentiles())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """`copy.deepcopy` is `fork`, also within another object; for the copy of the model if that was copied first."""
        model = self._model()
        return self._fork(memo.get(id(model), model))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a HybridCache can be neither pickled nor copied by copy.copy (it has threads and shared blocks); use "
            "fork() or copy.deepcopy(), or save() and load()"
        )

    def __repr__(self) -> str:
        return f"HybridCache({self.policy!r}, tokens={self.get_seq_length()})"


def default_threads(model: PreTrainedModel) -> int:
    """Threads beside the model's: with a GPU all of this process' cores but one, otherwise one (torch has them)."""
    return min(max(cores() - 1, 1), MOST_THREADS) if on_device(model) else 1


def _report(layer: HybridLayer) -> LayerStats:
    """A copy of a layer's counters, with the memory in use now."""
    layer.tally.count()
    stats, store = layer.stats, layer.store
    if store is not None:
        stats.host_bytes, stats.digest_bytes = store.host_bytes, store.digest_bytes
        stats.shared_bytes = store.shared_bytes
        stats.resident_bytes = layer.state.nbytes
        stats.resident_bytes += layer.resident.nbytes if layer.resident is not None else 0
    layer.state.report(stats)
    return replace(stats, cpu_ratio_by_step=stats.cpu_ratio_by_step.copy())
