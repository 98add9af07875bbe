"""The method, the digest and the host format of `docs/extending.md`: exact, and consistent after all changes."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny import prompt, tiny_model
from transformers import DynamicCache, PreTrainedModel

import hf_offload
from hf_offload import HybridCache
from hf_offload.cache.digests import DIGESTS
from hf_offload.cache.host_format import FORMATS
from hf_offload.policies.registry import POLICIES
from hf_offload.scores import Scores

PAGE = Path(__file__).parent.parent.parent / "docs" / "extending.md"
SMALL: dict[str, Any] = {"block_size": 8, "prefill_tile": 32}
KNOBS = {"one": {"tier": "one", **SMALL}, "split": {"tier": "split", "resident": 64, **SMALL}}
tiers = pytest.mark.parametrize("tier", KNOBS)


@pytest.fixture(scope="module", autouse=True)
def method() -> Iterator[type[hf_offload.Policy]]:
    """The class of the page's first block, registered as there."""
    code = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.DOTALL)
    assert code is not None
    module = ModuleType("extending")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "extending", module)  # dataclasses look their module up
        exec(compile(code[1], str(PAGE), "exec"), module.__dict__)
        yield module.EveryTenth
        POLICIES.pop("every_tenth")


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model("llama")


@torch.no_grad()
def feed(model: PreTrainedModel, cache: Any, ids: torch.Tensor, first: int, stop: int, step: int = 1) -> torch.Tensor:
    """The last logits of the pieces of so many tokens, `[B, pieces, V]`."""
    pieces = [ids[:, at : at + step] for at in range(first, stop, step)]
    return torch.stack([model(piece, past_key_values=cache).logits[:, -1] for piece in pieces], 1)


def begun(model: PreTrainedModel, ids: torch.Tensor, tier: str, length: int = 300, **knobs: Any) -> HybridCache:
    cache = HybridCache(model, "every_tenth", **KNOBS[tier], **knobs)
    feed(model, cache, ids, 0, length, length)
    return cache


@tiers
def test_it_is_exact_where_it_covers_the_context(llama: PreTrainedModel, tier: str) -> None:
    ids, mask = prompt(2, 300)
    told: dict[str, Any] = {"max_new_tokens": 20, "min_new_tokens": 20, "attention_mask": mask, "num_beams": 3}
    want = tiny_model("llama", "sdpa").generate(ids, past_key_values=DynamicCache(config=llama.config), **told)
    cache = HybridCache(llama, "every_tenth", newest=1000, **KNOBS[tier])
    assert torch.equal(llama.generate(ids, past_key_values=cache, **told), want)


def test_both_memories_attend_the_same(llama: PreTrainedModel) -> None:
    ids = prompt(1, 340)[0]
    one, two = (feed(llama, begun(llama, ids, tier), ids, 300, 340) for tier in KNOBS)
    torch.testing.assert_close(one, two, atol=5e-5, rtol=1e-5)
    full = HybridCache(llama, "full", **KNOBS["one"])
    feed(llama, full, ids, 0, 300, 300)
    assert not torch.allclose(one, feed(llama, full, ids, 300, 340), atol=1e-2)


@tiers
def test_a_fork_and_a_saved_cache_go_on_as_it_does(llama: PreTrainedModel, tier: str, tmp_path: Path) -> None:
    ids = prompt(1, 340)[0]
    cache = begun(llama, ids, tier)
    feed(llama, cache, ids, 300, 307)
    assert {layer.state.phase for layer in cache.layers} == {7}
    fork = cache.fork()
    cache.save(tmp_path / "saved")
    loaded = HybridCache.load(tmp_path / "saved", llama)
    want = feed(llama, cache, ids, 307, 340)
    for other in (fork, loaded):
        assert torch.equal(feed(llama, other, ids, 307, 340), want)


@tiers
def test_a_crop_begins_anew_and_rows_keep_their_phase(llama: PreTrainedModel, tier: str) -> None:
    ids = prompt(1, 640)[0].view(2, 320)
    cache = begun(llama, ids, tier, 310)
    feed(llama, cache, ids, 310, 314)
    cache.crop(-14)
    assert {layer.state.phase for layer in cache.layers} == {0}
    feed(llama, cache, ids, 300, 305)
    cache.batch_select_indices(torch.tensor([1]))
    alone = begun(llama, ids[1:], tier)
    feed(llama, alone, ids[1:], 300, 305)
    got, want = (feed(llama, one, ids[1:], 305, 320) for one in (cache, alone))
    torch.testing.assert_close(got, want, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("numbers", [[3, 1], [1, 1], [-1, 2], [0, 10**6], [[1]]])
def test_blocks_that_cannot_be_are_refused(llama: PreTrainedModel, method: Any, numbers: Any) -> None:
    class Wrong(method):  # type: ignore[misc]
        def plan(self, step: Any) -> hf_offload.Plan:
            return hf_offload.Plan(step.attend(step.blocks(numbers)))

    cache = HybridCache(llama, Wrong(), **KNOBS["one"])
    ids = prompt(1, 60)[0]
    feed(llama, cache, ids, 0, 50, 50)
    with pytest.raises(ValueError, match="sort them"):
        feed(llama, cache, ids, 50, 51)
    assert cache.get_seq_length() == 50


def test_a_state_of_another_kind_is_refused(llama: PreTrainedModel, method: Any) -> None:
    class Wrong(method):  # type: ignore[misc]
        def new_state(self, layer: Any) -> Any:
            return {"phase": 0}

    with pytest.raises(TypeError, match=r"new_state gave .* no LayerState"):
        feed(llama, HybridCache(llama, Wrong(), **KNOBS["one"]), prompt(1, 60)[0], 0, 50, 50)


def test_a_class_that_is_defined_again_takes_its_own_place(method: Any) -> None:
    """As in a notebook's cell that is run twice; another class does not."""
    named = {"__module__": method.__module__, "__qualname__": method.__qualname__}
    again = dataclass(frozen=True)(type(method.__name__, (method,), named))
    assert hf_offload.register_policy(again) is again is POLICIES["every_tenth"]
    hf_offload.register_policy(method)
    other = dataclass(frozen=True)(type("Other", (method,), {"__module__": method.__module__}))
    with pytest.raises(ValueError, match=r"belongs to extending\.EveryTenth"):
        hf_offload.register_policy(other)


def test_reset_helps_whatever_a_state_does(llama: PreTrainedModel, method: Any) -> None:
    class Sour(hf_offload.LayerState):
        def settle(self) -> None:
            raise ArithmeticError("no luck")

    class Wrong(method):  # type: ignore[misc]
        def new_state(self, layer: Any) -> Any:
            return Sour() if layer.index == 1 and not helped else super().new_state(layer)

    helped, ids = False, prompt(1, 60)[0]
    cache = HybridCache(llama, Wrong(), **KNOBS["one"])
    feed(llama, cache, ids, 0, 50, 50)
    with pytest.raises(ArithmeticError):
        cache.drain()
    helped = True
    cache.reset()
    feed(llama, cache, ids, 0, 50, 50)
    assert cache.get_seq_length() == 50


def own_file(folder: Path, name: str, word: str) -> ModuleType:
    """The page's block with a word as a file of a user's own, imported: kernels are compiled from files."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.DOTALL)
    (folder / f"{name}.py").write_text(next(block for block in blocks if word in block), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ball(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield own_file(tmp_path_factory.mktemp("digest"), "own_digest", "VectorStore").Ball
    DIGESTS.pop("ball")
    del sys.modules["own_digest"]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield own_file(tmp_path_factory.mktemp("format"), "own_format", "HostFormat").__name__
    FORMATS.pop("bfloat16")
    del sys.modules["own_format"]


def test_the_digest_bounds_the_scores_of_a_block(ball: Any) -> None:
    torch.manual_seed(0)
    store = ball(2, 32, 16, torch.device("cpu"))
    store.reserve(6)
    keys, valid = torch.randn(6, 2, 16, 32), torch.rand(6, 16) < 0.7
    valid[3] = False
    keys[~valid[:, None].expand(6, 2, 16)] = float("nan")
    store.seal(torch.arange(6), keys, valid)
    query, table = torch.randn(1, 4, 32), torch.arange(6, dtype=torch.int32)[None]
    got = store.score(query, table, torch.tensor([96, 6], dtype=torch.int32), Scores(0.5, None))
    exact = 0.5 * torch.einsum("hgd,nhtd->hgnt", query.view(2, 2, 32), keys)
    exact = exact.masked_fill(~valid[None, None], -torch.inf).amax(-1).view(1, 4, 6)
    assert (got >= exact - 1e-4).all()
    assert got[0, :, 3].isneginf().all()


@tiers
def test_a_policy_chooses_by_the_digest(llama: PreTrainedModel, ball: Any, tier: str) -> None:
    ids, mask = prompt(2, 300)
    told: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "attention_mask": mask}
    want = tiny_model("llama", "sdpa").generate(ids, **told)
    knobs = {"sinks": 8, "recent": 8, "digest": "ball", **KNOBS[tier]}
    assert torch.equal(llama.generate(ids, past_key_values=HybridCache(llama, budget=4096, **knobs), **told), want)
    logits = []
    for digest in ("ball", "submean"):
        cache = HybridCache(llama, budget=32, **{**knobs, "digest": digest})
        feed(llama, cache, ids, 0, 290, 290)
        logits.append(feed(llama, cache, ids, 290, 300))
        assert logits[-1].isfinite().all()
    assert not torch.equal(*logits)


@tiers
@pytest.mark.parametrize("policy", ["full", "scout", "hgca", "fixed_hybrid"])
def test_the_format_keeps_older_blocks_in_half_the_memory(
    llama: PreTrainedModel, short: str, tier: str, policy: str
) -> None:
    ids = prompt(2, 500)[0]
    knobs: dict[str, Any] = {"hgca": {"window": 64, "beta": 0.0}, "fixed_hybrid": {"budget": 1.0}}.get(policy, {})
    two = {} if tier == "one" else {"tier": "split"}
    caches = [HybridCache(llama, policy, block_size=16, host_dtype=kind, **two, **knobs) for kind in (None, "bfloat16")]
    wide, narrow = (feed(llama, cache, ids, 0, 430, 430)[:, 0] for cache in caches)
    assert torch.equal(wide, narrow)
    wide, narrow = (feed(llama, cache, ids, 430, 450) for cache in caches)
    error, size = (wide - narrow).abs().mean(), (wide - wide.mean()).abs().mean()
    assert 0 < error < 0.01 * size
    held = [cache.stats().as_dict()["host_bytes"] for cache in caches]
    assert held[1] < 0.7 * held[0]
    fork = caches[1].fork()
    assert torch.equal(feed(llama, caches[1], ids, 450, 470), feed(llama, fork, ids, 450, 470))
    for cache in (caches[1], fork):
        cache.crop(-300)
    assert torch.equal(feed(llama, caches[1], ids, 170, 180), feed(llama, fork, ids, 170, 180))


@tiers
def test_a_saved_cache_names_the_format(llama: PreTrainedModel, short: str, tier: str, tmp_path: Path) -> None:
    ids = prompt(2, 400)[0]
    cache = HybridCache(llama, "full", host_dtype="bfloat16", **KNOBS[tier])
    feed(llama, cache, ids, 0, 380, 380)
    cache.save(tmp_path / "saved")
    loaded = HybridCache.load(tmp_path / "saved", llama)
    got, want = feed(llama, loaded, ids, 380, 400), feed(llama, cache, ids, 380, 400)
    assert torch.equal(got, want) if tier == "one" else torch.allclose(got, want, atol=0.05)
