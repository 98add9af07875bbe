"""The method, the digest and the host format of `docs/extending.md`: exact, and consistent after all changes."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny import prompt, tiny_model
from transformers import DynamicCache, PreTrainedModel

import hf_offload
from hf_offload import HybridCache
from hf_offload.blocks.digests import DIGESTS
from hf_offload.blocks.host_format import FORMATS
from hf_offload.cpu import launch
from hf_offload.policies.registry import POLICIES
from hf_offload.scores import Scores

PAGE = Path(__file__).parent.parent.parent / "docs" / "extending.md"
SMALL: dict[str, Any] = {"block_size": 16, "prefill_tile": 32}
KNOBS = {"one": {"tier": "one", **SMALL}, "split": {"tier": "split", "resident": 96, **SMALL}}
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


def varied(method: Any, **parts: Any) -> Any:
    """The page's policy with other methods; `plan` is a function of the step, `new_state` one of the layer."""
    functions = {name: lambda self, given, part=part: part(given) for name, part in parts.items()}
    return type("Varied", (method,), functions)()


def whole(step: Any) -> hf_offload.Plan:
    return hf_offload.Plan(step.attend(step.all_blocks()))


def filled(llama: PreTrainedModel, policy: Any, tier: str, tokens: int = 100) -> HybridCache:
    cache = HybridCache(llama, policy, **KNOBS[tier])
    feed(llama, cache, prompt(1, 101)[0], 0, tokens, tokens)
    return cache


def step(llama: PreTrainedModel, cache: HybridCache, count: int = 1) -> torch.Tensor:
    length = cache.get_seq_length()
    return feed(llama, cache, prompt(1, 101)[0], length, length + count)


def test_a_state_whose_rows_do_not_come_first_keeps_them(llama: PreTrainedModel, method: Any) -> None:
    class Heads(hf_offload.LayerState):
        def tensors(self) -> dict[str, torch.Tensor]:
            return {"worth": torch.zeros(4)}

    cache = filled(llama, varied(method, new_state=lambda layer: Heads(), plan=whole), "one", 50)
    with pytest.raises(ValueError, match=r"Heads.tensors gives 'worth' of shape \[4\] for 1 rows"):
        cache.batch_repeat_interleave(2)
    assert torch.equal(*(step(llama, one, 10) for one in (cache, filled(llama, "full", "one", 50))))


def test_a_state_of_another_kind_is_refused(llama: PreTrainedModel, method: Any) -> None:
    with pytest.raises(TypeError, match=r"new_state gave .* no LayerState"):
        filled(llama, varied(method, new_state=lambda layer: {"phase": 0}), "one")


def test_a_class_that_is_defined_again_takes_its_own_place(method: Any) -> None:
    """As in a notebook's cell that is run twice; another class does not."""
    named = {"__module__": method.__module__, "__qualname__": method.__qualname__}
    again = dataclass(frozen=True)(type(method.__name__, (method,), named))
    assert hf_offload.register_policy(again) is again is POLICIES["every_tenth"]
    hf_offload.register_policy(method)
    other = dataclass(frozen=True)(type("Other", (method,), {"__module__": method.__module__}))
    with pytest.raises(ValueError, match=r"belongs to extending\.EveryTenth"):
        hf_offload.register_policy(other)


def test_the_former_name_of_a_states_wait_is_called() -> None:
    class Old(hf_offload.LayerState):
        waited = False

        def settle(self) -> None:
            self.waited = True

    state = Old()
    with pytest.warns(FutureWarning, match=r"Old\.settle is called wait now"):
        state.wait()
    assert state.waited


def test_reset_helps_whatever_a_state_does(llama: PreTrainedModel, method: Any) -> None:
    class Sour(hf_offload.LayerState):
        def wait(self) -> None:
            raise ArithmeticError("no luck")

    made: list[int] = []

    def state(layer: Any) -> hf_offload.LayerState:
        made.append(layer.index)
        return Sour() if made.count(1) == 1 == layer.index else hf_offload.LayerState()

    cache = filled(llama, varied(method, new_state=state, plan=whole), "one", 50)
    with pytest.raises(ArithmeticError):
        cache.drain()
    cache.reset()
    feed(llama, cache, prompt(1, 60)[0], 0, 50, 50)
    assert cache.get_seq_length() == 50


# --- plans and requirements that cannot be ---------------------------------------------------------------------------


def parts_of(step: Any) -> tuple[Any, Any]:
    """All blocks in two calls."""
    end = step.num_blocks - 2
    return step.attend(step.blocks(range(end))), step.attend(step.blocks([end, end + 1]))


def zeros(step: Any, dtype: torch.dtype = torch.float32, of: Any = lambda x: x) -> hf_offload.Plan:
    """A partial of zeros, of each of whose tensors something is made."""
    shape = (1, step.query.shape[1], step.store.head_dim)
    made = of(torch.zeros(shape, dtype=dtype)), of(torch.zeros(shape[:2], dtype=dtype))
    return hf_offload.Plan((hf_offload.Partial(*made),))


def attend(step: Any, **knobs: Any) -> hf_offload.Plan:
    return hf_offload.Plan(step.attend(step.recent(2)), **knobs)


def numbered(numbers: Any) -> Any:
    return lambda step: hf_offload.Plan(step.attend(step.blocks(numbers)))


WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda step: None, TypeError, "plan gave a NoneType"),
    (lambda step: step.attend(step.recent(2)), TypeError, "plan gave a tuple"),
    (lambda step: hf_offload.Plan(parts_of(step)), TypeError, "a tuple of them"),
    (lambda step: hf_offload.Plan(step.attend(step.recent(2))[0]), TypeError, "it takes partials"),
    (lambda step: hf_offload.Plan((None,)), TypeError, "holds a NoneType"),  # type: ignore[arg-type]
    (lambda step: hf_offload.Plan((step.recent(2),)), TypeError, "holds a Selection"),
    (lambda step: attend(step, until="x"), TypeError, "until='x'"),
    (lambda step: attend(step, until=-5), ValueError, "until=-5"),
    (lambda step: zeros(step, of=lambda x: x[0]), ValueError, "has shapes"),
    (lambda step: zeros(step, of=lambda x: None), TypeError, "tensors or arrays"),
    (lambda step: zeros(step, of=lambda x: x.numpy().astype(object)), TypeError, "an array of object"),
    (lambda step: zeros(step, of=torch.Tensor.to_sparse), TypeError, "torch.sparse_coo"),
    (lambda step: zeros(step, of=lambda x: x.to("meta")), TypeError, "on meta"),
    (lambda step: hf_offload.Plan(()), ValueError, "is empty"),
    (lambda step: zeros(step, torch.int64), TypeError, "use float32"),
    (lambda step: zeros(step, torch.complex64), TypeError, "use float32"),
    (lambda step: hf_offload.Plan(step.attend(step.choose("max", 4)[1])), ValueError, "name no digest"),
    *((numbered(numbers), ValueError, "sort them") for numbers in ([3, 1], [1, 1], [-1, 2], [0, 10**6], [[1]])),
]


@pytest.mark.parametrize(("make", "error", "told"), WRONG)
def test_a_plan_that_cannot_be_is_refused(
    llama: PreTrainedModel, method: Any, make: Any, error: type[Exception], told: str
) -> None:
    for tier in KNOBS:
        cache = filled(llama, varied(method, plan=make), tier)
        with pytest.raises(error, match=told):
            step(llama, cache)
        assert cache.get_seq_length() == 100


@tiers
@pytest.mark.parametrize("kind", ["generator", "double", "strided"])
def test_partials_of_other_forms_count_alike(llama: PreTrainedModel, method: Any, tier: str, kind: str) -> None:
    def formed(step: Any) -> hf_offload.Plan:
        parts = whole(step).partials
        step.begin()
        if kind == "generator":
            return hf_offload.Plan(part for part in parts)  # type: ignore[arg-type]
        out, lse = (torch.as_tensor(x) for x in parts[0])  # type: ignore[union-attr]
        if kind == "double":
            out, lse = out.double(), lse.double()
        else:
            out = out.repeat_interleave(2, -1)[..., ::2]
        return hf_offload.Plan((hf_offload.Partial(out, lse), *parts[1:]))

    got, want = (step(llama, filled(llama, varied(method, plan=make), tier)) for make in (formed, whole))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_an_lse_of_ones_own_counts(llama: PreTrainedModel, method: Any) -> None:
    """Also beside an `out` that lies where the step merges, or that no launch has filled yet."""
    lses: list[Any] = []

    def planned(make: Any) -> torch.Tensor:
        return step(llama, filled(llama, varied(method, plan=make), "one"))

    def heavier(step: Any, more: float, *, copy: bool) -> hf_offload.Plan:
        (first,), (second,) = parts_of(step)
        step.begin()
        return hf_offload.Plan((hf_offload.Partial(first.out.copy() if copy else first.out, first.lse + more), second))

    def noted(step: Any) -> hf_offload.Plan:
        parts = parts_of(step)
        step.begin()
        lses.append([part.lse.copy() for (part,) in parts])
        return hf_offload.Plan(tuple(part for (part,) in parts))

    def given(step: Any, place: int) -> hf_offload.Plan:
        parts = [part for (part,) in parts_of(step)]
        parts[place] = hf_offload.Partial(parts[place].out, lses[step.layer.index][place])
        return hf_offload.Plan(parts)

    makes = [partial(heavier, more=more, copy=copy) for more, copy in ((5, False), (5, True), (0, False))]
    one, other, plain = map(planned, makes)
    assert torch.equal(one, other)
    assert not torch.allclose(one, plain, atol=1e-2)
    want = planned(noted)
    for place in (0, 1):
        torch.testing.assert_close(planned(partial(given, place=place)), want, atol=1e-5, rtol=1e-5)


@tiers
@pytest.mark.parametrize("others", ["attended", "nothing attended"])
def test_an_lse_that_is_nan_is_never_left_out(llama: PreTrainedModel, method: Any, tier: str, others: str) -> None:
    """The merge may not take it for the share of no token; whether it does could depend on the other partials."""

    def plan(step: Any) -> hf_offload.Plan:
        shape = (1, step.query.shape[1], step.store.head_dim)
        nan, none = (
            hf_offload.Partial(torch.zeros(shape), torch.full(shape[:2], value)) for value in (torch.nan, -torch.inf)
        )
        others_are = whole(step).partials if others == "attended" else (none, none)
        return hf_offload.Plan((*others_are, nan))

    assert step(llama, filled(llama, varied(method, plan=plan), tier)).isnan().all()


@tiers
@pytest.mark.parametrize("way", ["first", "after reset", "after a crop to nothing", "after a forward that failed"])
def test_no_padding_no_event(llama: PreTrainedModel, method: Any, tier: str, way: str) -> None:
    """`padding_changed` is told when older tokens became valid or invalid; before a first prompt there are none."""
    told: list[tuple[int, int]] = []

    class Noting(hf_offload.LayerState):
        def padding_changed(self, layer: Any, block: int) -> None:
            told.append((layer.index, block))

    ids, mask = prompt(1, 60)[0], torch.ones(1, 60, dtype=torch.long)
    cache = HybridCache(llama, varied(method, new_state=lambda layer: Noting(), plan=whole), **KNOBS[tier])
    if way == "after a forward that failed":
        with pytest.raises(IndexError):
            feed(llama, cache, torch.full((1, 50), 10**6), 0, 50, 50)
        with llama.model.layers[2].mlp.register_forward_pre_hook(fail), pytest.raises(ArithmeticError):
            feed(llama, cache, ids, 0, 50, 50)
    elif way != "first":
        feed(llama, cache, ids, 0, 50, 50)
        cache.reset() if way == "after reset" else cache.crop(-50)
    for stop in (50, 51, 52, 53):
        mask[:, :20] = stop < 53
        assert told == []
        with torch.no_grad():
            model_ids = ids[:, cache.get_seq_length() : stop]
            llama(model_ids, attention_mask=mask[:, :stop], past_key_values=cache)
    assert told == [(index, 0) for index in range(4)]


def fail(*_: Any) -> None:
    raise ArithmeticError("no luck")


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"sinks": -5}, ValueError, "sinks=-5"),
        ({"recent": 12.5}, ValueError, "recent=12.5"),
        ({"budget": "2"}, ValueError, "budget='2'"),
        ({"query_window": -1}, ValueError, "query_window=-1"),
        ({"digest_memory": "disk"}, ValueError, "digest_memory='disk'"),
        ({"capturable": "yes"}, ValueError, "capturable='yes'"),
        ({"digest": 3}, ValueError, "digest=3"),
        ({"digest": "nope"}, ValueError, "digest='nope'"),
        (None, TypeError, "requirements is a NoneType"),
    ],
)
def test_requirements_that_cannot_be_are_refused(
    llama: PreTrainedModel, method: Any, given: Any, error: type[Exception], told: str
) -> None:
    def make() -> HybridCache:
        requirements = None if given is None else hf_offload.Requirements(**given)
        return HybridCache(llama, type("Wrong", (method,), {"requirements": requirements})(), **KNOBS["one"])

    with pytest.raises(error, match=told):
        make()


# --- a digest, a host format -----------------------------------------------------------------------------------------


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
        cache = HybridCache(llama, budget=64, **{**knobs, "digest": digest})
        feed(llama, cache, ids, 0, 290, 290)
        logits.append(feed(llama, cache, ids, 290, 300))
        assert logits[-1].isfinite().all()
    assert not torch.equal(*logits)


@pytest.mark.one_in(3)
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


def test_no_kernel_on_disk_needs_the_format(llama: PreTrainedModel, short: str) -> None:
    """Another process, which has no such module, reads the same files."""
    feed(llama, HybridCache(llama, "full", host_dtype="bfloat16", **KNOBS["one"]), prompt(2, 400)[0], 0, 390, 390)
    files = [file for compiled in (launch._enter, launch._call) for file in compiled._cache.files()]  # type: ignore[attr-defined]
    assert files
    assert not any(short.encode() in file.read_bytes() for file in files)


@pytest.mark.parametrize("resident", [512, 96])
def test_a_placement_of_all_blocks_is_one(llama: PreTrainedModel, resident: int) -> None:
    """When decoding begins nothing is resident yet, though all blocks may fit."""

    @dataclass(frozen=True)
    class Everything(hf_offload.Policy):
        name = "everything"

        def plan(self, step: Any) -> hf_offload.Plan:
            return hf_offload.Plan(step.attend(step.all_blocks()))

        def place(self, step: Any, slots: int) -> Any:
            return step.all_blocks()

    ids = prompt(1, 110)[0]
    full = HybridCache(llama, "full", **KNOBS["one"])
    mine = HybridCache(llama, Everything(), **SMALL, tier="split", resident=resident)
    found = []
    for cache in (full, mine):
        feed(llama, cache, ids, 0, 100, 100)
        found.append(feed(llama, cache, ids, 100, 110))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=5e-5)


def test_pairs_of_an_earlier_draw_are_refused(llama: PreTrainedModel) -> None:
    @dataclass(frozen=True)
    class Twice(hf_offload.Policy):
        name = "twice"

        @property
        def requirements(self) -> hf_offload.Requirements:
            return hf_offload.Requirements(digest="submean", digest_memory="host", leaves_out=True)

        def plan(self, step: Any) -> hf_offload.Plan:
            first = step.draw("max", 64)
            step.draw("max", 8)
            return hf_offload.Plan(step.attend(first))

    ids = prompt(1, 301)[0]
    cache = HybridCache(llama, Twice(), **KNOBS["split"])
    feed(llama, cache, ids, 0, 300, 300)
    with pytest.raises(ValueError, match="these pairs are of an earlier draw"):
        feed(llama, cache, ids, 300, 301)
