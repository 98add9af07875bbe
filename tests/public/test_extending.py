"""The method, the digest and the host format of `docs/extending.md`: exact, and consistent after all changes."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny import prompt, tiny_model
from transformers import PreTrainedModel

import hf_offload
from hf_offload import HybridCache
from hf_offload.blocks.digests import DIGESTS
from hf_offload.blocks.host_format import FORMATS
from hf_offload.cpu import launch
from hf_offload.cpu.kernels.decode_attention import attention_kernel
from hf_offload.cpu.kernels.prefill import prefill_kernel
from hf_offload.policies.registry import POLICIES

PAGE = Path(__file__).parent.parent.parent / "docs" / "extending.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.DOTALL)
SMALL: dict[str, Any] = {"block_size": 16, "prefill_tile": 32}
KNOBS = {"one": {"tier": "one", **SMALL}, "split": {"tier": "split", "resident": 96, **SMALL}}
tiers = pytest.mark.parametrize("tier", KNOBS)


@pytest.fixture(scope="module", autouse=True)
def method() -> Iterator[type[hf_offload.Policy]]:
    """The class of the page's first block, registered as there."""
    module = ModuleType("extending")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "extending", module)  # dataclasses look their module up
        exec(compile(BLOCKS[0], str(PAGE), "exec"), module.__dict__)
        yield module.EveryTenth
        POLICIES.pop("every_tenth")


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
    """Also by its name, in a model that is enabled."""
    ids, mask = prompt(2, 300)
    told: dict[str, Any] = {"max_new_tokens": 20, "attention_mask": mask, "num_beams": 3, "do_sample": False}
    stock = tiny_model("llama", "sdpa")
    want = stock.generate(ids, **told)
    cache = HybridCache(llama, "every_tenth", newest=1000, **KNOBS[tier])
    assert torch.equal(llama.generate(ids, past_key_values=cache, **told), want)
    with hf_offload.enabled(stock, "every_tenth", newest=1000, **KNOBS[tier]):
        assert torch.equal(stock.generate(ids, **told), want)


def test_both_memories_attend_the_same(llama: PreTrainedModel) -> None:
    ids = prompt(1, 340)[0]
    one, two = (feed(llama, begun(llama, ids, tier), ids, 300, 340) for tier in KNOBS)
    torch.testing.assert_close(one, two, atol=5e-5, rtol=1e-5)
    assert not torch.allclose(one[:, -1], feed(llama, None, ids, 0, 340, 340)[:, -1], atol=1e-2)


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


def test_states_that_cannot_be_are_refused(llama: PreTrainedModel, method: Any) -> None:
    heads = type("Heads", (hf_offload.LayerState,), {"tensors": lambda self: {"worth": torch.zeros(4)}})
    cache = filled(llama, varied(method, new_state=lambda layer: heads(), plan=whole), "one", 50)
    with pytest.raises(ValueError, match=r"Heads.tensors gives 'worth' of shape \[4\] for 1 rows"):
        cache.batch_repeat_interleave(2)
    assert torch.equal(*(step(llama, one, 10) for one in (cache, filled(llama, "full", "one", 50))))
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
    calls: list[Any] = []
    old = type("Old", (hf_offload.LayerState,), {"settle": lambda self: calls.append(self)})()
    with pytest.warns(FutureWarning, match=r"Old\.settle is called wait now"):
        old.wait()
    assert calls == [old]


def test_reset_helps_whatever_a_state_does(llama: PreTrainedModel, method: Any) -> None:
    def sour(state: Any) -> None:
        raise ArithmeticError("no luck")

    states = iter([type("Sour", (hf_offload.LayerState,), {"wait": sour})()])
    new_state = lambda layer: next(states, hf_offload.LayerState())  # noqa: E731
    cache = filled(llama, varied(method, new_state=new_state, plan=whole), "one", 50)
    with pytest.raises(ArithmeticError):
        cache.drain()
    cache.reset()
    feed(llama, cache, prompt(1, 60)[0], 0, 50, 50)
    assert cache.get_seq_length() == 50


# --- plans and requirements that cannot be ---------------------------------------------------------------------------


def zeros(step: Any, dtype: torch.dtype = torch.float32, of: Any = lambda x: x) -> hf_offload.Plan:
    """A partial of zeros, of each of whose tensors something is made."""
    shape = (1, step.query.shape[1], step.store.head_dim)
    return hf_offload.Plan((hf_offload.Partial(*(of(torch.zeros(size, dtype=dtype)) for size in (shape, shape[:2]))),))


def attend(step: Any, **knobs: Any) -> hf_offload.Plan:
    return hf_offload.Plan(step.attend(step.recent(2)), **knobs)


def numbered(numbers: Any) -> Any:
    return lambda step: hf_offload.Plan(step.attend(step.blocks(numbers)))


WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda step: None, TypeError, "plan gave a NoneType"),
    (lambda step: step.attend(step.recent(2)), TypeError, "plan gave a tuple"),
    (lambda step: hf_offload.Plan((step.attend(step.recent(2)),) * 2), TypeError, "a tuple of them"),
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


@tiers
def test_a_plan_that_cannot_be_is_refused(llama: PreTrainedModel, method: Any, tier: str) -> None:
    """The cache is as before the step, and the next one, with a right plan, goes on."""
    plans = [whole]
    cache = filled(llama, varied(method, plan=lambda step: plans[0](step)), tier)
    for plans[0], error, told in WRONG:
        with pytest.raises(error, match=told):
            step(llama, cache)
        assert cache.get_seq_length() == 100
    plans[0] = whole
    want = step(llama, filled(llama, "full", tier))
    torch.testing.assert_close(step(llama, cache), want, atol=1e-5, rtol=1e-5)


FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]] = {
    "doubles": lambda out, lse: [(out.double(), lse.double())],
    "strides": lambda out, lse: [(out.repeat_interleave(2, -1)[..., ::2], lse)],
    "twice, with half the weight": lambda out, lse: [(out, lse - math.log(2))] * 2,
}


@tiers
@pytest.mark.parametrize("form", FORMS)
def test_partials_of_other_forms_count_alike(llama: PreTrainedModel, method: Any, tier: str, form: str) -> None:
    def formed(step: Any) -> hf_offload.Plan:
        first, *others = whole(step).partials
        step.begin()
        parts = (hf_offload.Partial(*made) for made in FORMS[form](*map(torch.as_tensor, first)))
        return hf_offload.Plan(part for part in (*parts, *others))  # type: ignore[arg-type]

    got, want = (step(llama, filled(llama, varied(method, plan=make), tier)) for make in (formed, whole))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@tiers
@pytest.mark.parametrize("others", ["attended", "nothing attended"])
def test_an_lse_that_is_nan_is_never_left_out(llama: PreTrainedModel, method: Any, tier: str, others: str) -> None:
    """The merge may not take it for the share of no token; whether it does could depend on the other partials."""

    def plan(step: Any) -> hf_offload.Plan:
        out, lse = (torch.as_tensor(x) for x in (*zeros(step).partials,)[0])
        nan, none = (hf_offload.Partial(out, lse + value) for value in (torch.nan, -torch.inf))
        return hf_offload.Plan((*(whole(step).partials if others == "attended" else (none, none)), nan))

    assert step(llama, filled(llama, varied(method, plan=plan), tier)).isnan().all()


@tiers
def test_no_padding_no_event(llama: PreTrainedModel, method: Any, tier: str) -> None:
    """`padding_changed` is told when older tokens became valid or invalid; before a first prompt there are none."""
    told: list[tuple[int, int]] = []

    class Noting(hf_offload.LayerState):
        def padding_changed(self, layer: Any, block: int) -> None:
            told.append((layer.index, block))

    def fail(*_: Any) -> None:
        raise ArithmeticError("no luck")

    ids, mask = prompt(1, 60)[0], torch.ones(1, 60, dtype=torch.long)
    cache = HybridCache(llama, varied(method, new_state=lambda layer: Noting(), plan=whole), **KNOBS[tier])
    with llama.model.layers[2].mlp.register_forward_pre_hook(fail), pytest.raises(ArithmeticError):
        feed(llama, cache, ids, 0, 50, 50)
    for empty in (lambda: None, cache.reset, lambda: cache.crop(-53)):
        empty()
        told.clear()
        for stop in (50, 51, 52, 53):
            mask[:, :20] = stop < 53
            assert told == []
            with torch.no_grad():
                llama(ids[:, cache.get_seq_length() : stop], attention_mask=mask[:, :stop], past_key_values=cache)
        assert told == [(index, 0) for index in range(4)]


def test_requirements_that_cannot_be_are_refused(llama: PreTrainedModel, method: Any) -> None:
    for name, value in (
        ("sinks", -5), ("recent", 12.5), ("budget", "2"), ("query_window", -1), ("digest_memory", "disk"),
        ("capturable", "yes"), ("digest", 3), ("digest", "nope"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name}={value!r}"):
            HybridCache(llama, type("Wrong", (method,), {"requirements": hf_offload.Requirements(**{name: value})})())
    with pytest.raises(TypeError, match="requirements is a NoneType"):
        HybridCache(llama, type("Wrong", (method,), {"requirements": None})())


# --- a digest, a host format -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ModuleType]]:
    """The page's blocks with a digest and a host format as files of a user's own: kernels are compiled from files."""
    folder, made = tmp_path_factory.mktemp("own"), {}
    for name, word in (("own_digest", "VectorStore"), ("own_format", "HostFormat")):
        file = folder / f"{name}.py"
        file.write_text(next(block for block in BLOCKS if word in block), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        made[name] = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made[name])
    yield made
    for name in made:
        del sys.modules[name]
    DIGESTS.pop("ball")
    FORMATS.pop("bfloat16")


@tiers
@pytest.mark.usefixtures("own")
def test_a_policy_chooses_by_the_digest(llama: PreTrainedModel, tier: str) -> None:
    ids, logits = prompt(1, 300)[0], []
    for knobs in ({"budget": 4096, "digest": "ball"}, {"budget": 64, "digest": "ball"}, {"budget": 64}):
        cache = HybridCache(llama, sinks=8, recent=8, **KNOBS[tier], **knobs)
        feed(llama, cache, ids, 0, 290, 290)
        logits.append(feed(llama, cache, ids, 290, 300))
    exact, mine, stock = logits
    torch.testing.assert_close(exact[:, -1], feed(llama, None, ids, 0, 300, 300)[:, -1], atol=5e-5, rtol=1e-5)
    assert mine.isfinite().all()
    assert not torch.equal(mine, exact)
    assert not torch.equal(mine, stock)


@pytest.mark.one_in(3)
@tiers
@pytest.mark.parametrize("policy", ["full", "scout", "hgca", "fixed_hybrid"])
@pytest.mark.usefixtures("own")
def test_the_format_keeps_older_blocks_in_half_the_memory(
    llama: PreTrainedModel, tier: str, policy: str, tmp_path: Path
) -> None:
    """A fork and a saved cache go on as it does, also behind a crop."""
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
    caches[1].save(tmp_path / "saved")
    fork, loaded = caches[1].fork(), HybridCache.load(tmp_path / "saved", llama)
    for first, stop in ((450, 470), (170, 180)):
        want, forked, again = (feed(llama, each, ids, first, stop) for each in (caches[1], fork, loaded))
        assert torch.equal(want, forked)
        assert torch.equal(want, again) if tier == "one" else torch.allclose(want, again, atol=0.05)
        for each in (caches[1], fork, loaded):
            each.crop(-300)


def test_no_kernel_on_disk_needs_the_format(llama: PreTrainedModel, own: dict[str, Any]) -> None:
    """Another process, which has no such module, reads the same files."""
    feed(llama, HybridCache(llama, "full", host_dtype="bfloat16", **KNOBS["one"]), prompt(2, 400)[0], 0, 390, 390)
    kernels = launch._call, launch._run_all, attention_kernel, prefill_kernel
    files = [file for compiled in kernels for file in compiled._cache.files()]  # type: ignore[attr-defined]
    assert files
    assert not any(b"own_format" in file.read_bytes() for file in files)


@dataclass(frozen=True)
class Everything(hf_offload.Policy):
    name = "everything"

    def plan(self, step: Any) -> hf_offload.Plan:
        return whole(step)

    def place(self, step: Any, slots: int) -> Any:
        return step.all_blocks()


@pytest.mark.parametrize("resident", [512, 96])
def test_a_placement_of_all_blocks_is_one(llama: PreTrainedModel, resident: int) -> None:
    """When decoding begins nothing is resident yet, though all blocks may fit."""
    mine = HybridCache(llama, Everything(), **SMALL, tier="split", resident=resident)
    feed(llama, mine, prompt(1, 101)[0], 0, 80, 80)
    torch.testing.assert_close(
        step(llama, mine, 10), step(llama, filled(llama, "full", "one", 80), 10), rtol=0, atol=5e-5
    )


def test_pairs_of_an_earlier_draw_are_refused(llama: PreTrainedModel, method: Any) -> None:
    def twice(policy: Any, step: Any) -> hf_offload.Plan:
        first = step.draw("max", 64)
        step.draw("max", 8)
        return hf_offload.Plan(step.attend(first))

    needs = hf_offload.Requirements(digest="submean", digest_memory="host", leaves_out=True)
    cache = filled(llama, type("Twice", (method,), {"requirements": needs, "plan": twice})(), "split")
    with pytest.raises(ValueError, match="these pairs are of an earlier draw"):
        step(llama, cache)
