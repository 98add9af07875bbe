"""Converts, forks, saves and loads a `HybridCache`."""

from __future__ import annotations

import os
import warnings
import weakref
from pathlib import Path
from typing import Any, Self, cast

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from hf_offload.attention.fallback import Fallback
from hf_offload.attention.hooks import Attachment, find_layers
from hf_offload.attention.model_support import check_model, image_layers, stock_layers, two_memories
from hf_offload.cache.conversion import device_of, fork_layers, give_back, take_over
from hf_offload.cache.fingerprint import difference, fingerprint
from hf_offload.cache.layer import HybridLayer
from hf_offload.cache.loading import SavedCache, merge_knobs
from hf_offload.cache.saving import save_cache
from hf_offload.cache.stock_layers import copy_layer
from hf_offload.changing import Changing
from hf_offload.knobs import check_flag
from hf_offload.policies.registry import Policy, describe_policy, saved_policy


class Portable(Changing):
    """What `HybridCache` offers beyond one cache and one process.

    Whoever calls it, the tensors that are made are written in other modes, too: hence `inference_mode(False)`.
    """

    policy: Policy
    donors: dict[int, int]
    _config: Any
    _model: weakref.ref[PreTrainedModel]
    _attachment: Attachment
    fallback: Fallback
    _knobs: dict[str, Any]
    """How the cache was made, but for the policy, its threads and their timeout."""

    @classmethod
    def _make(cls, model: PreTrainedModel, policy: str | Policy, **knobs: Any) -> Self:
        return cast(Any, cls)(model, policy, **knobs)  # type: ignore[no-any-return]

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
        made = cls._make(model, policy, **knobs)
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
        given. Its statistics start at zero.

        Raises:
            RuntimeError: the model was deleted, or another thread uses the cache.
        """
        model = self._model()
        if model is None:
            raise RuntimeError("the model of this cache is gone; keep a reference to it")
        worker = self.settings.worker
        made = self._make(
            model,
            self.policy,
            threads=worker.threads,
            timeout=worker.timeout,
            progress=self.settings.progress is not None,
            **self._knobs,
        )
        with self.alone():
            fork_layers(self.layers, made.layers, self.settings.padding, made.settings.padding)
            made.fallback.taken_over()
        made.donors = dict(self.donors)
        return made

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the cache into a folder; `load` makes a cache of it that continues as this one would have.

        A saved cache of that name is replaced as a whole. An interrupted `save` leaves the old one as it was.

        Args:
            folder: a folder for this cache alone; created if missing. A symbolic link is followed.

        Raises:
            ValueError: something else has that name, or the policy is not registered (`register_policy`).
            OSError: the disk is full, or the folder cannot be written; nothing is left behind.
            RuntimeError: the model was deleted, or another thread uses the cache.
        """
        about = {
            "policy": describe_policy(self.policy),
            "knobs": self._knobs,
            "donors": list(self.donors.items()),
            "model": fingerprint(self._config, self._attachment.stack),
        }
        with self.alone():
            save_cache(Path(folder), self.layers, self.settings.padding, about)

    def _one_token(self, model: PreTrainedModel) -> list[Any]:
        """The layers of a cache that holds one token: the model alone says what Transformers' own ones hold."""
        cache = self._make(model, "full")
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of layers that fit no block
            model(torch.zeros(1, 1, dtype=torch.long, device=device_of(self._attachment.stack)), past_key_values=cache)
        return list(cache.layers)

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
                when it first needs it, and nobody notices that its keys and values were altered.
            knobs: these knobs of `HybridCache`, in place of the saved ones: `tier`, `resident`, `device_budget`,
                `prefill_tile`, `cuda_graph`, `threads`, `timeout`, `progress`.

        Raises:
            ValueError: no saved cache, a file that was cut short, altered or forged, another model, or another knob.
            FileNotFoundError: the file of the policy's predictor is gone.
            MemoryError: the host has no memory left for the cache.
        """
        check_flag("verify", verify)
        saved = SavedCache(Path(folder))
        config, stack = check_model(model), find_layers(model)[0]
        with saved.sound():
            odd = difference(saved.about["model"], fingerprint(config, stack))
            policy = saved_policy(saved.about["policy"])
        if odd is not None:
            raise ValueError(f"{folder} was saved with another model than this {type(model).__name__}: {odd}")
        merged = merge_knobs(saved.about["knobs"], knobs)
        policy = policy.for_memories(two=two_memories(model, merged["tier"]))
        made = cls._make(model, policy, **merged)
        place = not knobs.keys() & {"resident", "device_budget"}
        examples = made._one_token(model) if any("stock" in told for told in saved.about["layers"]) else ()
        saved.restore(
            made.layers, stock_layers(config), made._attachment.layers, examples, image_layers(config), place=place,
            verify=verify,
        )  # fmt: skip
        made.fallback.taken_over()
        made.donors = dict(saved.about["donors"])
        return made
