"""`cache.save(folder)` and `HybridCache.load(folder, model)`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import forging
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_exactness import assert_equal
from test_families import build
from test_fork import make
from tiny import DEVICE, ONE_MEMORY, begin, decode, prompt, tiny_model
from transformers import PreTrainedModel

from hf_offload import Field, HybridCache

Models = dict[str, PreTrainedModel]
PROMPT = 205
MEMORIES: dict[str, dict[str, Any]] = {"one": ONE_MEMORY, "split": {"tier": "split", "resident": 128}}
FILES = ("cache", "segment", "tail")


def file_of(folder: Path, kind: str) -> Path:
    (found,) = folder.glob(f"{kind}*")
    return found


@pytest.fixture(scope="module")
def models() -> Models:
    found = {family: tiny_model(family) for family in ("llama", "gemma3")}
    return found | {"linear": build("qwen3_next", "hybrid_sparse")}


@pytest.fixture(scope="module")
def saved(models: Models, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A folder with a cache, and the token and mask that follow."""
    folder = tmp_path_factory.mktemp("saved") / "cache"
    cache = make(models["llama"], "scout", "one")
    token, mask = begin(models["llama"], cache, 2, PROMPT)
    cache.save(folder)
    return folder, token, mask


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("case", "tier", "steps"),
    [
        ("full-int8", "one", 21),
        ("window", "split", 0),
        ("scout", "split", 19),  # the next token begins a block
        ("scout-quest-int8", "one", 0),
        ("scout-attend", "split", 21),
        ("hgca", "one", 0),
        ("hgca", "split", 19),
        ("fixed_hybrid", "split", 0),
        ("quest", "split", 19),
        ("h2o", "split", 19),
        ("infinigen", "split", 5),
        ("fluxion", "one", 5),
    ],
)
def test_goes_on_bit_by_bit(models: Models, tmp_path: Path, case: str, tier: str, steps: int) -> None:
    model = models["gemma3" if case == "scout" else "linear" if case == "window" else "llama"]
    cache = make(model, case, tier)
    token, mask = begin(model, cache, 2, PROMPT, steps)
    cache.save(tmp_path / "cache")
    first, second = (HybridCache.load(tmp_path / "cache", model, prefill_tile=64) for _ in range(2))
    assert first.get_seq_length() == cache.get_seq_length()
    assert first.policy == cache.policy
    want = decode(model, cache, token, mask, 20)
    contents = {path: path.read_bytes() for path in (tmp_path / "cache").iterdir()}
    for loaded, steps in ((first, 20), (second, 3)):
        got = decode(model, loaded, token, mask, steps)
        assert torch.equal(got[1], want[1][:, :steps])
    assert {path: path.read_bytes() for path in (tmp_path / "cache").iterdir()} == contents  # nobody wrote into them
    first.save(tmp_path / "again")
    cache.save(tmp_path / "cache")  # second still reads the old files
    names = [{path.name for path in (tmp_path / folder).glob("*-*")} for folder in ("again", "cache")]
    assert names[0] == names[1]  # the checksums
    second.reset()


def test_long_lists_of_kept_tokens_go_on_bit_by_bit(models: Models, tmp_path: Path) -> None:
    """Lists that have grown are cut into as many parts when they are loaded."""
    model = models["llama"]
    cache = HybridCache(model, "hgca", window=16, beta=0.0, block_size=16, tier="split")
    token, mask = begin(model, cache, 1, 900, 10)
    cache.save(tmp_path / "cache")
    loaded = HybridCache.load(tmp_path / "cache", model)
    want, got = (decode(model, one, token, mask, 5) for one in (cache, loaded))
    assert torch.equal(got[1], want[1])


def test_int8_with_two_memories_goes_on_up_to_its_codes(models: Models, tmp_path: Path) -> None:
    """A slot may hold a block as it was before it was packed; after loading it holds what the codes say."""
    model = models["llama"]
    cache = make(model, "full-int8", "split")
    token, mask = begin(model, cache, 2, PROMPT, 30)
    cache.save(tmp_path / "cache")
    want = decode(model, cache, token, mask, 3)
    got = decode(model, HybridCache.load(tmp_path / "cache", model), token, mask, 3)
    assert torch.equal(got[0], want[0])
    assert (got[1] - want[1]).abs().max() < 0.02 * want[1].abs().max()


@pytest.mark.skipif(DEVICE != "cpu", reason="beside a device there are two memories")
def test_one_memory_goes_on_without_looking_ahead(models: Models, tmp_path: Path) -> None:
    model = models["llama"]
    knobs: dict[str, Any] = {"budget": 96, "sinks": 16, "recent": 16, "block_size": 16, "synchronous_layers": (0,)}
    cache = HybridCache(model, **knobs, lookahead="attend", **MEMORIES["split"])
    token, mask = begin(model, cache, 2, PROMPT)
    cache.save(tmp_path / "cache")
    one, loaded = HybridCache(model, **knobs, tier="one"), HybridCache.load(tmp_path / "cache", model, tier="one")
    assert loaded.policy == replace(cache.policy, lookahead="off")
    begin(model, one, 2, PROMPT)
    want, got = (decode(model, each, token, mask, 20) for each in (one, loaded))
    assert torch.equal(got[1], want[1])
    assert HybridCache.load(tmp_path / "cache", model).policy == cache.policy


BUDGET = {"block_size": 16, "tier": "split", "device_budget": "20 blocks"}
OTHER_MEMORY: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("full", {"block_size": 16, **MEMORIES["one"]}, MEMORIES["split"]),
    ("full", {"block_size": 16, **MEMORIES["split"]}, MEMORIES["one"]),
    ("hgca", {"block_size": 16, "window": 60, "tier": "one"}, {"tier": "split"}),  # the window says what is resident
    ("full", BUDGET, {"resident": 256}),
    ("full", BUDGET, {"tier": "one", "resident": None}),
]


@pytest.mark.skipif(DEVICE != "cpu", reason="beside a device there are two memories")
@pytest.mark.parametrize(("policy", "knobs", "given"), OTHER_MEMORY)
def test_it_goes_on_in_other_memory(
    models: Models, tmp_path: Path, policy: str, knobs: dict[str, Any], given: dict[str, Any]
) -> None:
    cache = HybridCache(models["llama"], policy, **knobs)
    token, mask = begin(models["llama"], cache, 2, PROMPT, 3)
    cache.save(tmp_path / "cache")
    loaded = HybridCache.load(tmp_path / "cache", models["llama"], **given)
    want, got = (decode(models["llama"], one, token, mask, 19) for one in (cache, loaded))
    assert_equal(got, want)


def test_a_loaded_cache_is_a_cache(models: Models, saved: Any) -> None:
    folder, token, mask = saved
    model, ids = models["llama"], prompt(2, 100, seed=9)[0]
    base = HybridCache.load(folder, model)
    forks = [base.fork() for _ in range(2)]
    want = decode(model, base, token, mask, 9)
    decode(model, forks[0], torch.full_like(token, 99), mask, 9)
    assert torch.equal(decode(model, forks[1], token, mask, 9)[1], want[1])
    forks[0].crop(-150)
    forks[0].reorder_cache(torch.tensor([1, 1]))
    assert forks[0].to_dynamic().get_seq_length() == PROMPT + 9 - 150
    more = torch.cat([mask, mask.new_ones(2, 109)], 1)
    with torch.no_grad():  # a longer turn
        assert torch.equal(*(model(ids, attention_mask=more, past_key_values=one).logits for one in (base, forks[1])))


def test_the_files_are_safetensors(saved: Any) -> None:
    files = {name: load_file(file_of(saved[0], name)) for name in FILES}
    assert all(files.values())
    assert files["segment"]["layers.0.blocks"].shape == (2 * 12, 2, 2, 16, 16)
    assert not files["tail"]["layers.0.blocks"][:, :, :, PROMPT % 16 :].any()  # what was in memory behind the tokens


def about_of(folder: Path) -> dict[str, Any]:
    with safe_open(folder / "cache.safetensors", "pt") as file:
        return dict(json.loads(file.metadata()["about"]))


def rewritten(about: dict[str, Any] | None = None, **tensors: Any) -> Callable[[Path], None]:
    """Files with valid checksums and other contents."""

    def damage(folder: Path) -> None:
        mine = load_file(folder / "cache.safetensors")
        mine |= {name: change(mine[name]) for name, change in tensors.items()}
        forging.write(folder, about_of(folder) | (about or {}), mine)

    return damage


def without_checksum(version: int, folder: Path) -> None:
    about = {"about": json.dumps(about_of(folder) | {"format": version})}
    save_file(load_file(folder / "cache.safetensors"), folder / "cache.safetensors", about)


def cut(kind: str, share: float, folder: Path) -> None:
    data = file_of(folder, kind).read_bytes()
    file_of(folder, kind).write_bytes(data[: int(share * len(data))])


def altered(folder: Path) -> None:
    with file_of(folder, "segment").open("r+b") as file:
        file.seek(4096 + 10_000)
        file.write(b"\xff")


QUEST = {"name": "quest", "knobs": {"budget": None, "samples": 64, "recent": 0}}
OTHER_FORMAT = "saved in format {}, this version reads format 9"
DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    *(
        (partial(cut, kind, share), r"not what was saved|invalid contents")
        for kind in FILES
        for share in (0, 0.01, 0.999)
    ),
    *((lambda folder, kind=kind: file_of(folder, kind).unlink(), "not all of one") for kind in FILES),
    (altered, r"segment-\w+\.safetensors is not what was saved"),
    (rewritten(padding=lambda x: x[:0]), r"cache\.safetensors has invalid contents \(padding has shape"),
    (rewritten(padding=lambda x: x[:, :0]), r"cache\.safetensors has invalid contents \(padding has shape"),
    (rewritten({"policy": QUEST}), r"cache: samples=64 is a knob of policy 'scout'.*recent=0, block_size=16$"),
    (rewritten({"format": 8}), OTHER_FORMAT.format(8)),
    (rewritten({"format": 10}), OTHER_FORMAT.format(10)),
    (partial(without_checksum, 8), OTHER_FORMAT.format(8)),
    (partial(without_checksum, 9), "not what was saved"),
    (lambda folder: shutil.rmtree(folder), "no saved cache"),
    (lambda folder: [path.unlink() for path in folder.iterdir()], "no saved cache"),
]


@pytest.mark.parametrize(("damage", "told"), DAMAGES)
def test_a_damaged_folder_is_refused(
    models: Models, saved: Any, tmp_path: Path, damage: Callable[[Path], Any], told: str
) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(saved[0], folder)
    damage(folder)
    for knobs in MEMORIES.values():
        with pytest.raises(ValueError, match=told):
            HybridCache.load(folder, models["llama"], **knobs)


def test_a_flipped_bit_anywhere_is_noticed(models: Models, tmp_path: Path) -> None:
    folder, model = tmp_path / "cache", models["llama"]
    cache = make(model, "full-int8", "one")
    begin(model, cache, 1, 300, 2)
    assert all(layer.store.packed_blocks for layer in cache.layers)
    cache.save(folder)
    for name in FILES:
        path = file_of(folder, name)
        data = path.read_bytes()
        places = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:12].tolist()
        for i, place in enumerate([*places, 0, 8, *((4095, 4096) if name != "cache" else ()), len(data) - 1]):
            path.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
            with pytest.raises(ValueError, match=r"not what was saved|not all of one|invalid contents"):
                HybridCache.load(folder, model, **list(MEMORIES.values())[i % 2]).to_dynamic()
        path.write_bytes(data)


def test_an_altered_block_is_read_where_nobody_wants_to_know(models: Models, saved: Any, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(saved[0], folder)
    altered(folder)
    for knobs in MEMORIES.values():
        cache = HybridCache.load(folder, models["llama"], verify=False, **knobs)
        assert torch.isfinite(decode(models["llama"], cache, *saved[1:], 1)[1]).all()


def without_mlp() -> PreTrainedModel:
    model = tiny_model("llama")
    model.model.layers[3].mlp = torch.nn.Identity()
    return model


def one_weight_more() -> PreTrainedModel:
    model = tiny_model("llama")
    model.model.register_parameter("more", torch.nn.Parameter(torch.zeros(3)))
    return model


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (lambda: tiny_model("llama", seed=1), r"weight .* has other values"),
        (lambda: tiny_model("qwen3"), "model_type was 'llama', here it is 'qwen3'"),
        (lambda: tiny_model("llama").bfloat16(), "another dtype"),
        (lambda: tiny_model("llama", "sdpa"), "set_attn_implementation"),
        (without_mlp, "is missing here"),
        (one_weight_more, "the weight more is new"),
    ],
)
def test_another_model_is_refused(saved: Any, other: Callable[[], PreTrainedModel], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        HybridCache.load(saved[0], other())


def test_knobs_on_which_the_blocks_depend_stay(models: Models, saved: Any) -> None:
    for knobs, told in (
        ({"block_size": 32}, "block_size: a saved cache keeps its own"),
        ({"verify": 0}, "verify=0 is not True or False"),
    ):
        with pytest.raises(ValueError, match=told):
            HybridCache.load(saved[0], models["llama"], **knobs)
    assert HybridCache.load(saved[0], models["llama"], threads=2).settings.worker.threads == 2


def test_what_no_load_would_read_is_not_saved(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(models["llama"], "h2o", "one")
    begin(models["llama"], cache, 1, PROMPT, 3)
    cache.save(tmp_path / "cache")
    kind, states = type(cache.policy), [path.read_bytes() for path in sorted((tmp_path / "cache").iterdir())]
    fields = kind.state_fields
    wrong = (
        lambda policy, sizes: {},
        lambda policy, sizes: {**fields(policy, sizes), "more": Field(torch.int64)},
        lambda policy, sizes: {name: Field(torch.int16) for name in fields(policy, sizes)},
    )
    for each in wrong:
        monkeypatch.setattr(kind, "state_fields", each)
        with pytest.raises(ValueError, match=rf"remembers of layer \d .*{kind.__name__}.state_fields"):
            cache.save(tmp_path / "cache")
    assert [path.read_bytes() for path in sorted((tmp_path / "cache").iterdir())] == states
