"""Property tests: any sequence of a cache's operations leaves it right; hypothesis draws settings and sequences.

The draws of the quick tests are fixed, so that a commit always gives the same result. The slow tests draw another 5,000
histories, new ones in each run; a failing one is printed, shrunk, with the lines that repeat it:

    python -m pytest -m slow tests/test_properties.py
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from histories import History, Setting, check_books, empty, late
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from tiny import DEVICE

from hf_offload import ConstantPredictor, HybridCache
from hf_offload.cache.memory_budget import least_blocks
from hf_offload.policies.registry import make_policy

COVERING = 2048
MOST_TOKENS = 420  # in a history: more is only slower
MOST_ROWS = 4
MOST_HISTORIES = 3
TIMEOUT = 60.0
ERRORS = (ValueError, KeyboardInterrupt)
TIERS = ["one", "split"] if DEVICE == "cpu" else [None]


@st.composite
def some_settings(draw: st.DrawFn, policies: Sequence[str], kv_heads: Sequence[int]) -> Setting:
    """Caches of some policies, all tiers and sizes; with a budget that covers every history, or a small one."""
    policy = draw(st.sampled_from(policies), label="policy")
    size = 16 if policy == "fluxion" else draw(st.sampled_from([8, 16, 32]), label="block_size")
    covers = policy == "full" or draw(st.booleans(), label="covers")
    tier = draw(st.sampled_from(TIERS), label="tier")
    two = tier != "one"
    knobs: dict[str, Any] = {}
    if policy == "hgca":
        knobs |= draw(st.sampled_from([{"window": 1}, {"window": 50}, {"gpu_ratio": 0.3}, {}]), label="window")
        knobs |= {
            "beta": 0.0 if covers else draw(st.sampled_from([0.5, 1.0]), label="beta"),
            "group": draw(st.sampled_from(["any", "mean"]), label="group"),
            "append": draw(st.sampled_from(["max", "mean"]), label="append"),
            "steps": draw(st.sampled_from(["max", "mean"]), label="steps"),
            "append_queries": draw(st.sampled_from([None, 3]), label="append_queries"),
            "prompt_queries": draw(st.sampled_from([None, 5]), label="prompt_queries"),
            "reevaluate": draw(st.booleans(), label="reevaluate"),
        }
    if policy == "fluxion":
        knobs["predictor"] = ConstantPredictor(
            1.0 if covers else draw(st.sampled_from([-0.1, 0.1, 0.5]), label="budget0"),
            slope=0.0 if covers else draw(st.sampled_from([0.0, 0.02]), label="slope"),
            streaming=False if covers else draw(st.booleans(), label="streaming"),
            digest=draw(st.sampled_from(["submean", "quest"]), label="digest"),
            sinks=draw(st.sampled_from([0, 16]), label="sinks"),
            local=draw(st.sampled_from([0, 16, 40]), label="local"),
        )
    elif policy not in ("full", "h2o", "infinigen"):
        knobs["sinks"] = draw(st.sampled_from([0, 8, 16]), label="sinks")
    if policy == "fixed_hybrid":
        knobs |= {
            "local": draw(st.sampled_from([0, 16, 40]), label="local"),
            "budget": 1.0 if covers else draw(st.sampled_from([0.0, 0.1, 0.5]), label="budget"),
            "digest": draw(st.sampled_from(["submean", "quest", "mean"]), label="digest"),
        }
    if policy == "scout":
        knobs |= {
            "recent": draw(st.sampled_from([0, 16]), label="recent"),
            "lookahead": draw(
                st.sampled_from(["off", "select", "attend"] if two else ["auto", "off"]), label="lookahead"
            ),
            "synchronous_layers": (0,),
            "digest": draw(st.sampled_from(["submean", "quest", "mean"]), label="digest"),
            "join": draw(st.sampled_from(["max", "mean", "raw"]), label="join"),
            "recall": draw(st.sampled_from(["adaptive", 0, 1, 3]), label="recall"),
            "attend_resident": draw(st.sampled_from(["selected", "all"]), label="attend_resident"),
            "place_queries": draw(st.sampled_from([1, 16]), label="place_queries"),
        }
    if policy == "quest":
        knobs |= {
            "recent": draw(st.sampled_from([0, 16]), label="recent"),
            "digest": draw(st.sampled_from(["submean", "quest", "mean"]), label="digest"),
            "join": draw(st.sampled_from(["max", "mean", "raw"]), label="join"),
        }
    if policy == "h2o":  # no share covers a prompt of one token and what follows it
        covers = False
        knobs |= {name: draw(st.sampled_from([0, 0.1, 0.5, 1]), label=name) for name in ("heavy", "recent")}
    if policy == "infinigen":
        knobs |= {
            "alpha": math.inf if covers else draw(st.sampled_from([0.5, 4.0]), label="alpha"),
            "share": 1 if covers else draw(st.sampled_from([0.1, 0.5]), label="share"),
            "partial": draw(st.sampled_from([0.1, 0.3, 1.0]), label="partial"),
            "lookahead": draw(st.booleans(), label="lookahead"),
        }
    if policy in ("h2o", "infinigen"):
        knobs["prompt_queries"] = draw(st.sampled_from([1, 20, 512]), label="prompt_queries")
    if policy == "full":
        knobs["host"] = draw(st.sampled_from(["attend", "fetch"]), label="host")
    if policy in ("scout", "quest", "window"):
        knobs["budget"] = COVERING
        least = make_policy(policy, knobs).requirements.always_blocks(size)
        knobs["budget"] = (
            COVERING if covers else size * (least + draw(st.integers(0, 3), label="budget over the least"))
        )
    if policy == "hgca" and not knobs.keys() & {"window", "gpu_ratio"}:
        knobs["resident"] = size * draw(st.sampled_from([3, 5]), label="resident")
    elif two and policy != "hgca":
        least = least_blocks(make_policy(policy, knobs), size)
        knobs["resident"] = size * (least + draw(st.sampled_from([0, 1, 3, 20]), label="resident over the least"))
    exact = covers and knobs.get("lookahead") != "attend"  # predicted queries are not the real ones
    knobs |= {
        "tier": tier,
        "block_size": size,
        "timeout": TIMEOUT,
        "prefill_tile": draw(st.sampled_from([32, 4096]), label="prefill_tile"),
        "host_dtype": draw(st.sampled_from([None, None, "int8"]), label="host_dtype"),
    }
    kv_heads, dim = draw(st.sampled_from(kv_heads), label="kv_heads"), draw(st.sampled_from([16, 32, 64]), label="dim")
    return Setting(kv_heads, dim, policy, knobs, exact)


class Histories(RuleBasedStateMachine):
    """Up to three histories of one setting that may share blocks."""

    policies: tuple[str, ...] = (
        "scout", "scout", "full", "window", "hgca", "fixed_hybrid", "quest", "fluxion", "h2o", "infinigen",
    )  # fmt: skip
    kv_heads = (4, 2, 1)

    def __init__(self) -> None:
        super().__init__()
        self.histories: list[History] = []
        self.folder, self.numbers = tempfile.TemporaryDirectory(), itertools.count()

    def teardown(self) -> None:
        self.histories.clear()
        self.folder.cleanup()

    @initialize(rows=st.integers(1, 3), data=st.data(), count=st.integers(1, 300))
    def begin(self, rows: int, data: st.DataObject, count: int) -> None:
        self.setting = data.draw(some_settings(self.policies, self.kv_heads), label="setting")
        self.histories.append(empty(self.setting, rows))
        self.histories[0].feed(*self._tokens(data, rows, count, data.draw(st.booleans(), label="pads")))

    def _one(self, data: st.DataObject) -> History:
        """One of the histories, which holds something: one that was emptied begins again."""
        history = self.histories[data.draw(st.integers(0, len(self.histories) - 1), label="history")]
        if not history.length:
            count = data.draw(st.integers(1, 150), label="tokens of a prompt")
            history.feed(*self._tokens(data, history.rows, count, True))
        return history

    def _tokens(self, data: st.DataObject, rows: int, count: int, pads: bool) -> tuple[torch.Tensor, torch.Tensor]:
        seed = data.draw(st.integers(0, 99), label="seed")
        ids = torch.randint(3, 150, (rows, count), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones_like(ids)
        for row in range(rows if pads else 0):
            mask[row, : data.draw(st.integers(0, count - 1), label="padding")] = 0
        return ids.to(DEVICE), mask.to(DEVICE)

    @rule(data=st.data(), count=st.integers(1, 40) | st.integers(1, 300), pads=st.booleans())
    def append(self, data: st.DataObject, count: int, pads: bool) -> None:
        history = self._one(data)
        count = min(count, MOST_TOKENS - history.length)
        if count > 0:
            history.feed(*self._tokens(data, history.rows, count, pads))

    @rule(data=st.data(), steps=st.integers(1, 20))
    def decode(self, data: st.DataObject, steps: int) -> None:
        history = self._one(data)
        if history.length <= MOST_TOKENS - steps:
            ids, mask = self._tokens(data, history.rows, steps, False)
            for i in range(steps):
                history.feed(ids[:, i : i + 1], mask[:, i : i + 1])

    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        history = self._one(data)
        for cache in history.caches:
            with pytest.raises(ValueError, match="positive"):
                cache.crop(1)
        history.crop(data.draw(st.integers(0, history.length + 1), label="tokens"))

    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        history = self._one(data)
        rows = data.draw(
            st.lists(st.integers(0, history.rows - 1), min_size=history.rows, max_size=history.rows), label="rows"
        )
        for cache in history.caches:
            cache.reorder_cache(torch.tensor(rows))
        history.keep_rows(torch.tensor(rows))

    @rule(data=st.data(), repeats=st.integers(1, 3))
    def repeat(self, data: st.DataObject, repeats: int) -> None:
        history = self._one(data)
        if history.rows * repeats <= MOST_ROWS:
            for cache in history.caches:
                cache.batch_repeat_interleave(repeats)
            history.keep_rows(torch.arange(history.rows).repeat_interleave(repeats))

    @rule(data=st.data(), as_mask=st.booleans())
    def select(self, data: st.DataObject, as_mask: bool) -> None:
        history = self._one(data)
        kept = data.draw(st.lists(st.integers(0, history.rows - 1), min_size=1, max_size=MOST_ROWS), label="rows")
        rows = torch.tensor(kept)
        if as_mask:
            rows = torch.zeros(history.rows, dtype=torch.bool).index_fill(0, rows, True)
        for cache in history.caches:
            cache.batch_select_indices(rows)
        history.keep_rows(rows)

    @rule(data=st.data(), rows=st.integers(1, 3))
    def reset(self, data: st.DataObject, rows: int) -> None:
        history = self._one(data)
        for cache in history.caches:
            cache.reset()
        history.ids = history.mask = torch.zeros(rows, 0, dtype=torch.long, device=DEVICE)

    @rule(data=st.data(), layer=st.integers(0, 1), count=st.integers(1, 30), error=st.sampled_from(ERRORS))
    def fail(self, data: st.DataObject, layer: int, count: int, error: type[BaseException]) -> None:
        """A forward that raises, or is interrupted, in the middle leaves no trace."""
        history = self._one(data)
        ids, mask = self._tokens(data, history.rows, count, count > 1)
        module = self.setting.model.model.layers[layer].mlp

        def raise_it(*args: Any) -> None:
            raise error

        for cache in history.caches:
            with module.register_forward_pre_hook(raise_it), torch.no_grad(), pytest.raises(error):
                history.run(cache, ids, torch.cat([history.mask, mask], 1))
            if error is KeyboardInterrupt:
                cache.crop(0)

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        history = self._one(data)
        if len(self.histories) < MOST_HISTORIES:
            self.histories.append(history.replaced([cache.fork() for cache in history.caches]))

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """A history ends; what only it held is free."""
        history = self._one(data)
        if len(self.histories) > 1:
            self.histories.remove(history)

    @rule(data=st.data(), stays=st.booleans())
    def save_and_load(self, data: st.DataObject, stays: bool) -> None:
        """What was loaded goes on in place of what was saved, or beside it."""
        history, loaded = self._one(data), []
        for cache in history.caches:
            folder = Path(self.folder.name) / str(next(self.numbers))
            cache.save(folder)
            loaded.append(HybridCache.load(folder, self.setting.model, timeout=TIMEOUT))
        if not stays:
            self.histories.remove(history)
        if len(self.histories) < MOST_HISTORIES:
            self.histories.append(history.replaced(loaded))

    @rule(data=st.data())
    def give_and_take(self, data: st.DataObject) -> None:
        """Through a DynamicCache and back."""
        history = self._one(data)
        history.caches = late([
            HybridCache.from_cache(
                cache.to_dynamic(), self.setting.model, self.setting.policy, attention_mask=history.mask,
                **self.setting.knobs,
            )
            for cache in history.caches
        ])  # fmt: skip

    @invariant()
    def books_are_right(self) -> None:
        check_books(self.histories)


class Usual(Histories):
    """Histories of models with two query heads for each KV head: fewer kernels to compile."""

    kv_heads = (2,)


class Apart(Histories):
    """Histories of caches whose policies hold tokens themselves."""

    policies = ("h2o", "infinigen")


class Foreseen(Histories):
    """Histories of caches that predict what heads need."""

    policies = ("fluxion",)


class Kept(Histories):
    """Histories of caches that keep single tokens."""

    policies = ("hgca",)


def run(examples: int, fixed: bool, histories: type[Histories] = Histories) -> None:
    run_state_machine_as_test(
        histories,
        settings=settings(
            max_examples=examples,
            stateful_step_count=12,
            deadline=None,
            derandomize=fixed,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_history_leaves_the_cache_right() -> None:
    run(16, fixed=True, histories=Usual)


@pytest.mark.slow
@pytest.mark.parametrize(("histories", "count"), [(Histories, 2000), (Foreseen, 1000), (Apart, 1000), (Kept, 1000)])
def test_many_histories_leave_the_cache_right(histories: type[Histories], count: int) -> None:
    run(count, fixed=False, histories=histories)
