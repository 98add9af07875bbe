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
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
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


SINKS, DIGESTS, JOINS = [0, 8, 16], ["submean", "quest", "mean"], ["max", "mean", "raw"]
CHOICES: dict[str, dict[str, list[Any]]] = {
    "full": {"host": ["attend", "fetch"]},
    "window": {"sinks": SINKS},
    "quest": {"sinks": SINKS, "recent": [0, 16], "digest": DIGESTS, "join": JOINS},
    "scout": {
        "sinks": SINKS, "recent": [0, 16], "digest": DIGESTS, "join": JOINS, "recall": ["adaptive", 0, 1, 3],
        "attend_resident": ["selected", "all"], "place_queries": [1, 16], "synchronous_layers": [(0,)],
    },
    "fixed_hybrid": {"sinks": SINKS, "local": [0, 16, 40], "digest": DIGESTS},
    "hgca": {
        "sinks": SINKS, "group": ["any", "mean"], "append": ["max", "mean"], "steps": ["max", "mean"],
        "append_queries": [None, 3], "prompt_queries": [None, 5], "reevaluate": [False, True],
    },
    "h2o": {"heavy": [0, 0.1, 0.5, 1], "recent": [0, 0.1, 0.5, 1], "prompt_queries": [1, 20, 512]},
    "infinigen": {"partial": [0.1, 0.3, 1.0], "lookahead": [False, True], "prompt_queries": [1, 20, 512]},
    "fluxion": {},
}  # fmt: skip
"""Knobs of each policy, whatever the budget covers."""


@st.composite
def some_settings(draw: st.DrawFn, policies: Sequence[str], kv_heads: Sequence[int]) -> Setting:
    """Caches of some policies, all tiers and sizes; with a budget that covers every history, or a small one."""

    def pick(label: str, *choices: Any) -> Any:
        return draw(st.sampled_from(choices), label=label)

    policy = pick("policy", *policies)
    size = 16 if policy == "fluxion" else pick("block_size", 8, 16, 32)
    covers = policy == "full" or (policy != "h2o" and pick("covers", False, True))
    tier = pick("tier", *TIERS)
    two = tier != "one"
    knobs: dict[str, Any] = {name: pick(name, *choices) for name, choices in CHOICES[policy].items()}
    if policy == "hgca":
        knobs |= pick("window", {"window": 1}, {"window": 50}, {"gpu_ratio": 0.3}, {})
        knobs["beta"] = 0.0 if covers else pick("beta", 0.5, 1.0)
    if policy == "fluxion":
        knobs["predictor"] = ConstantPredictor(
            1.0 if covers else pick("budget0", -0.1, 0.1, 0.5),
            slope=0.0 if covers else pick("slope", 0.0, 0.02),
            streaming=False if covers else pick("streaming", False, True),
            digest=pick("digest", "submean", "quest"),
            sinks=pick("sinks", 0, 16),
            local=pick("local", 0, 16, 40),
        )
    if policy == "fixed_hybrid":
        knobs["budget"] = 1.0 if covers else pick("budget", 0.0, 0.1, 0.5)
    if policy == "scout":
        knobs["lookahead"] = pick("lookahead", *(("off", "select", "attend") if two else ("auto", "off")))
    if policy == "infinigen":
        knobs["alpha"] = math.inf if covers else pick("alpha", 0.5, 4.0)
        knobs["share"] = 1 if covers else pick("share", 0.1, 0.5)
    if policy in ("scout", "quest", "window"):
        knobs["budget"] = COVERING
        least = make_policy(policy, knobs).requirements.always_blocks(size)
        knobs["budget"] = COVERING if covers else size * (least + pick("budget over the least", 0, 1, 2, 3))
    if policy == "hgca" and not knobs.keys() & {"window", "gpu_ratio"}:
        knobs["resident"] = size * pick("resident", 3, 5)
    elif two and policy != "hgca":
        least = least_blocks(make_policy(policy, knobs), size)
        knobs["resident"] = size * (least + pick("resident over the least", 0, 1, 3, 20))
    exact = covers and knobs.get("lookahead") != "attend"  # predicted queries are not the real ones
    knobs |= {
        "tier": tier,
        "block_size": size,
        "timeout": TIMEOUT,
        "prefill_tile": pick("prefill_tile", 32, 4096),
        "host_dtype": pick("host_dtype", None, None, "int8"),
    }
    return Setting(pick("kv_heads", *kv_heads), pick("dim", 16, 32, 64), policy, knobs, exact)


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
    policies = ("h2o", "infinigen")  # they hold tokens themselves


class Foreseen(Histories):
    policies = ("fluxion",)  # it predicts what heads need


class Kept(Histories):
    policies = ("hgca",)  # it keeps single tokens


def run(examples: int, fixed: bool, histories: type[Histories] = Histories) -> None:
    how = settings(
        max_examples=examples, stateful_step_count=12, deadline=None, derandomize=fixed, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(histories, settings=how)


def test_any_history_leaves_the_cache_right() -> None:
    run(16, fixed=True, histories=Usual)


@pytest.mark.slow
@pytest.mark.parametrize(("histories", "count"), [(Histories, 2000), (Foreseen, 1000), (Apart, 1000), (Kept, 1000)])
def test_many_histories_leave_the_cache_right(histories: type[Histories], count: int) -> None:
    run(count, fixed=False, histories=histories)
