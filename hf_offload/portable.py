"""How a cache comes from elsewhere and goes there: taken over, given back, forked, saved and loaded."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any, Self, cast

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from hf_offload.attention.checks import check_model, stock_layers
from hf_offload.attention.fallback import Fallback
from hf_offload.attention.hooks import Attachment, find_layers
from hf_offload.cache.fingerprint import difference, fingerprint
from hf_offload.cache.forking import fork_layers
from hf_offload.cache.layer import HybridLayer
from hf_offload.cache.loading import SavedCache, merge_knobs
from hf_offload.cache.saving import save_cache
from hf_offload.cache.stock import copy_layer
from hf_offload.cache.takeover import give_back, take_over
from hf_offload.changing import Changing
from hf_offload.policies import Policy, describe_policy, saved_policy


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
        """A cache that goes on where a `DynamicCache` of the same model ends, such as one prefilled elsewhere.

        Args:
            cache: with any number of tokens, on any device; it is left as it is.
            model, policy, knobs: as for `HybridCache(...)`.
            attention_mask: `[B, T]`, 0 where a cached token is padding; None: there is none.

        Raises:
            TypeError: not a `DynamicCache`.
            ValueError: it is not a cache of this model, or the mask does not fit; and as `HybridCache(...)`.
        """
        made = cls._make(model, policy, **knobs)
        take_over(made.layers, cache, made._attachment.layers, attention_mask, made._config)
        made.fallback.taken_over()
        return made

    @torch.inference_mode(False)
    def to_dynamic(self) -> DynamicCache:
        """A `DynamicCache` with the tokens of this one, layer by layer, on the model's device; this one stays."""
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
        """Another cache of the same model that goes on from the same tokens; both may run, in threads too.

        Host blocks and their digests are shared and counted by reference: what only one cache holds is free when that
        one is reset or gone. A block that one of them writes into is copied first. What is resident, the policy's state
        and padding are copied, so that each gives the tokens that this one would have given. Statistics begin anew.

        Raises:
            RuntimeError: the model is gone.
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
        """Write the cache into a folder of its own, from which `load` makes one that goes on as this one would have.

        A saved cache that is there is replaced as a whole; one that was interrupted leaves the old one as it was.

        Args:
            folder: made where it is missing; a link stays, and the folder that it names is written.

        Raises:
            ValueError: something else is there, or the policy is not registered (`register_policy`).
            OSError: the disk is full, or the folder cannot be written; nothing is left behind.
            RuntimeError: the model is gone.
        """
        about = {
            "policy": describe_policy(self.policy),
            "knobs": self._knobs,
            "donors": list(self.donors.items()),
            "model": fingerprint(self._config, self._attachment.stack),
        }
        with self.alone():
            save_cache(Path(folder), self.layers, self.settings.padding, about)

    @classmethod
    @torch.inference_mode(False)
    def load(cls, folder: str | os.PathLike[str], model: PreTrainedModel, **knobs: Any) -> Self:
        """The cache that `save` wrote, for the same model.

        With one memory its file is mapped: blocks are read, and compared with their checksums, when they are first
        wanted, and the file is never written into; leave it where it is as long as the cache lives. With two memories
        all blocks are read and compared at once. Everything else is compared at once, too.

        Args:
            folder: given to `save`.
            model: the model, in the dtype that it had.
            knobs: in place of the saved ones, those of `HybridCache` that say how it runs: tier, resident,
                device_budget, prefill_tile, cuda_graph, threads, timeout, progress.

        Raises:
            ValueError: no saved cache, a file that was cut short or altered, another model (in what it differs), or
                another knob. A block that was altered raises when it is first wanted.
            MemoryError: the host has no memory left for it.
        """
        saved = SavedCache(Path(folder))
        config, stack = check_model(model), find_layers(model)[0]
        odd = difference(saved.about["model"], fingerprint(config, stack))
        if odd is not None:
            raise ValueError(f"{folder} was saved with another model than this {type(model).__name__}: {odd}")
        made = cls._make(model, saved_policy(saved.about["policy"]), **merge_knobs(saved.about["knobs"], knobs))
        place = not knobs.keys() & {"resident", "device_budget"}
        saved.restore(made.layers, stock_layers(config), made._attachment.layers, place=place)
        made.fallback.taken_over()
        made.donors = dict(saved.about["donors"])
        return made
