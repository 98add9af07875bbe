"""`cache.save(folder)` and `HybridCache.load(folder, model)`."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
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
from test_from_cache import decode, prefill
from tiny import DEVICE, ONE_MEMORY, prompt, tiny_model
from transformers import PreTrainedModel

from hf_offload import Field, HybridCache
from hf_offload.files import loading, saving, segments

PROMPT = 205
MEMORIES: dict[str, dict[str, Any]] = {"one": ONE_MEMORY, "split": {"tier": "split", "resident": 128}}
FILES = ("cache", "segment", "tail")


def file_of(folder: Path, kind: str) -> Path:
    (found,) = folder.glob(f"{kind}*")
    return found


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    found = {family: tiny_model(family) for family in ("llama", "gemma3")}
    return found | {"linear": build("qwen3_next", "hybrid_sparse")}


@pytest.fixture(scope="module")
def saved(models: dict[str, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A folder with a cache, and the token and mask that follow."""
    folder = tmp_path_factory.mktemp("saved") / "cache"
    ids, mask = prompt(2, PROMPT)
    cache = make(models["llama"], "scout", "one")
    token = prefill(models["llama"], cache, ids, mask)
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
        ("h2o", "one", 5),
        ("infinigen", "split", 5),
        ("h2o", "split", 19),
        ("fluxion", "one", 5),
        ("fluxion", "split", 19),
        pytest.param("scout", "one", 5, marks=pytest.mark.slow),
    ],
)
def test_goes_on_bit_by_bit(
    models: dict[str, PreTrainedModel], tmp_path: Path, case: str, tier: str, steps: int
) -> None:
    model = models["gemma3" if case == "scout" else "linear" if case == "window" else "llama"]
    ids, mask = prompt(2, PROMPT)
    cache = make(model, case, tier)
    token = prefill(model, cache, ids, mask)
    if steps:
        token = decode(model, cache, token, mask, steps)[0][:, -1:]
        mask = torch.cat([mask, mask.new_ones(2, steps)], 1)
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


@pytest.mark.parametrize("tier", ["one", "split"])
def test_long_lists_of_kept_tokens_go_on_bit_by_bit(
    models: dict[str, PreTrainedModel], tmp_path: Path, tier: str
) -> None:
    """Lists that have grown are cut into as many parts when they are loaded."""
    model = models["llama"]
    ids, mask = prompt(1, 900)
    cache = HybridCache(model, "hgca", window=16, beta=0.0, block_size=16, tier=tier)
    token = prefill(model, cache, ids, mask)
    token = decode(model, cache, token, mask, 40)[0][:, -1:]
    mask = torch.cat([mask, mask.new_ones(1, 40)], 1)
    cache.save(tmp_path / "cache")
    loaded = HybridCache.load(tmp_path / "cache", model)
    want, got = (decode(model, one, token, mask, 5) for one in (cache, loaded))
    assert torch.equal(got[1], want[1])


def test_int8_with_two_memories_goes_on_up_to_its_codes(models: dict[str, PreTrainedModel], tmp_path: Path) -> None:
    """A slot may hold a block as it was before it was packed; after loading it holds what the codes say."""
    model = models["llama"]
    ids, mask = prompt(2, PROMPT)
    cache = make(model, "full-int8", "split")
    token = prefill(model, cache, ids, mask)
    token = decode(model, cache, token, mask, 30)[0][:, -1:]
    mask = torch.cat([mask, mask.new_ones(2, 30)], 1)
    cache.save(tmp_path / "cache")
    want = decode(model, cache, token, mask, 3)
    got = decode(model, HybridCache.load(tmp_path / "cache", model), token, mask, 3)
    assert torch.equal(got[0], want[0])
    assert (got[1] - want[1]).abs().max() < 0.02 * want[1].abs().max()


@pytest.mark.skipif(DEVICE != "cpu", reason="beside a device there are two memories")
@pytest.mark.parametrize("lookahead", ["attend", "select"])
def test_one_memory_goes_on_without_looking_ahead(
    models: dict[str, PreTrainedModel], tmp_path: Path, lookahead: str
) -> None:
    model = models["llama"]
    ids, mask = prompt(2, PROMPT)
    knobs: dict[str, Any] = {"budget": 96, "sinks": 16, "recent": 16, "block_size": 16, "synchronous_layers": (0,)}
    cache = HybridCache(model, **knobs, lookahead=lookahead, **MEMORIES["split"])
    token = prefill(model, cache, ids, mask)
    cache.save(tmp_path / "cache")
    loaded = HybridCache.load(tmp_path / "cache", model, tier="one")
    assert loaded.policy == replace(cache.policy, lookahead="off")
    one = HybridCache(model, **knobs, tier="one")
    prefill(model, one, ids, mask)
    want, got = (decode(model, each, token, mask, 20) for each in (one, loaded))
    assert torch.equal(got[1], want[1])
    assert HybridCache.load(tmp_path / "cache", model).policy == cache.policy


@pytest.mark.parametrize("case", ["full", "hgca"])
@pytest.mark.parametrize(("before", "after"), [("one", "split"), ("split", "one")])
def test_another_tier_may_go_on(
    models: dict[str, PreTrainedModel], tmp_path: Path, before: str, after: str, case: str
) -> None:
    model = models["llama"]
    ids, mask = prompt(2, PROMPT)
    cache = make(model, case, before)
    token = prefill(model, cache, ids, mask)
    cache.save(tmp_path / "cache")
    want = decode(model, cache, token, mask, 19)
    knobs = {"tier": after} if case == "hgca" else MEMORIES[after]  # its window says what is resident
    assert_equal(decode(model, HybridCache.load(tmp_path / "cache", model, **knobs), token, mask, 19), want)


@pytest.mark.parametrize(
    "given", [{"resident": 256}, {"device_budget": "40 blocks"}, {"tier": "one", "resident": None}]
)
def test_a_resident_set_of_another_size_is_placed_anew(
    models: dict[str, PreTrainedModel], tmp_path: Path, given: dict[str, Any]
) -> None:
    if DEVICE != "cpu" and "tier" in given:
        pytest.skip("beside a device there are two memories")
    model = models["llama"]
    ids, mask = prompt(2, PROMPT)
    cache = HybridCache(model, "full", block_size=16, tier="split", device_budget="20 blocks")
    token = prefill(model, cache, ids, mask)
    token = decode(model, cache, token, mask, 3)[0][:, -1:]
    mask = torch.cat([mask, mask.new_ones(2, 3)], 1)
    cache.save(tmp_path / "cache")
    want = decode(model, cache, token, mask, 5)
    assert_equal(decode(model, HybridCache.load(tmp_path / "cache", model, **given), token, mask, 5), want)


def test_a_loaded_cache_is_a_cache(models: dict[str, PreTrainedModel], saved: Any) -> None:
    folder, token, mask = saved
    model = models["llama"]
    base = HybridCache.load(folder, model)
    forks = [base.fork() for _ in range(2)]
    want = decode(model, base, token, mask, 9)
    decode(model, forks[0], torch.full_like(token, 99), mask, 9)
    assert torch.equal(decode(model, forks[1], token, mask, 9)[1], want[1])
    forks[0].crop(-150)
    forks[0].reorder_cache(torch.tensor([1, 1]))
    assert forks[0].to_dynamic().get_seq_length() == PROMPT + 9 - 150
    with torch.no_grad():  # a longer turn
        ids, _ = prompt(2, 100, seed=9)
        more = torch.cat([mask, mask.new_ones(2, 109)], 1)
        base_logits, fork_logits = (
            model(ids, attention_mask=more, past_key_values=one).logits for one in (base, forks[1])
        )
    assert torch.equal(base_logits, fork_logits)


def test_the_files_are_safetensors(saved: Any) -> None:
    folder = saved[0]
    for name in FILES:
        assert load_file(file_of(folder, name))
    blocks = load_file(file_of(folder, "segment"))["layers.0.blocks"]
    assert blocks.shape == (2 * 12, 2, 2, 16, 16)
    tail = load_file(file_of(folder, "tail"))["layers.0.blocks"]
    assert tail.shape == (2, 2, 2, 16, 16)
    assert not tail[:, :, :, PROMPT % 16 :].any()  # what was in memory behind the tokens is not written


# --- what is wrong with a folder --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", MEMORIES)
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_noticed(
    models: dict[str, PreTrainedModel], saved: Any, tmp_path: Path, name: str, tier: str
) -> None:
    model = models["llama"]
    folder = tmp_path / "cache"
    shutil.copytree(saved[0], folder)
    path = file_of(folder, name)
    data = bytearray(path.read_bytes())
    generator = torch.Generator().manual_seed(0)
    count = len(data) if len(data) < 200 and tier == "one" else 12
    places = torch.randperm(len(data), generator=generator)[:count].tolist()
    if name in FILES[1:]:
        places += [0, 8, 4095, 4096, len(data) - 1]
    for place in places:
        old = data[place]
        data[place] ^= 1 << place % 8
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"not what was saved|not all of one|invalid contents"):
            HybridCache.load(folder, model, **MEMORIES[tier]).to_dynamic()
        data[place] = old


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_short_or_missing_is_noticed(
    models: dict[str, PreTrainedModel], saved: Any, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(saved[0], folder)
    path = file_of(folder, name)
    whole = path.read_bytes()
    for keep in (0, 7, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:keep])
        with pytest.raises(ValueError, match=r"not what was saved|invalid contents"):
            HybridCache.load(folder, models["llama"])
    path.unlink()
    with pytest.raises(ValueError, match="not all of one"):
        HybridCache.load(folder, models["llama"])


@pytest.mark.parametrize("tier", MEMORIES)
def test_an_altered_block_is_noticed_unless_nobody_wants_to_know(
    models: dict[str, PreTrainedModel], saved: Any, tmp_path: Path, tier: str
) -> None:
    model, knobs = models["llama"], MEMORIES[tier]
    folder = tmp_path / "cache"
    shutil.copytree(saved[0], folder)
    with file_of(folder, "segment").open("r+b") as file:
        file.seek(4096 + 10_000)
        file.write(b"\xff")
    with pytest.raises(ValueError, match=r"segment-\w+\.safetensors is not what was saved"):
        HybridCache.load(folder, model, **knobs)
    cache = HybridCache.load(folder, model, verify=False, **knobs)
    assert torch.isfinite(decode(model, cache, saved[1], saved[2], 1)[1]).all()
    with pytest.raises(ValueError, match="verify=0 is not True or False"):
        HybridCache.load(folder, model, verify=0)


def test_an_altered_packed_block_is_noticed(models: dict[str, PreTrainedModel], tmp_path: Path) -> None:
    ids, mask = prompt(1, 300)
    cache = make(models["llama"], "full-int8", "one")
    decode(models["llama"], cache, prefill(models["llama"], cache, ids, mask), mask, 2)
    assert all(layer.store.packed_blocks for layer in cache.layers)
    cache.save(tmp_path / "cache")
    file = file_of(tmp_path / "cache", "segment")
    whole = file.read_bytes()
    for place in range(4096, len(whole), len(whole) // 7):
        data = bytearray(whole)
        data[place] ^= 1
        file.write_bytes(data)
        with pytest.raises(ValueError, match=r"not what was saved"):
            HybridCache.load(tmp_path / "cache", models["llama"])


@pytest.mark.parametrize("axis", [0, 1])
def test_padding_without_rows_or_tokens_is_refused(
    models: dict[str, PreTrainedModel], saved: Any, tmp_path: Path, axis: int
) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(saved[0], folder)
    tensors = load_file(folder / "cache.safetensors")
    tensors["padding"] = tensors["padding"].narrow(axis, 0, 0).clone()
    with safe_open(folder / "cache.safetensors", "pt") as file:
        about = json.loads(file.metadata()["about"])
    forging.write(folder, about, tensors)
    with pytest.raises(ValueError, match=r"cache\.safetensors has invalid contents \(padding has shape"):
        HybridCache.load(folder, models["llama"])


def test_another_model_is_refused(saved: Any) -> None:
    with pytest.raises(ValueError, match=r"weight .* has other values"):
        HybridCache.load(saved[0], tiny_model("llama", seed=1))
    with pytest.raises(ValueError, match="model_type was 'llama', here it is 'qwen3'"):
        HybridCache.load(saved[0], tiny_model("qwen3"))
    with pytest.raises(ValueError, match="another dtype"):
        HybridCache.load(saved[0], tiny_model("llama").bfloat16())
    with pytest.raises(ValueError, match="set_attn_implementation"):
        HybridCache.load(saved[0], tiny_model("llama", "sdpa"))
    model = tiny_model("llama")
    model.model.layers[3].mlp = torch.nn.Identity()
    with pytest.raises(ValueError, match="is missing here"):
        HybridCache.load(saved[0], model)
    model = tiny_model("llama")
    model.model.register_parameter("more", torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match="the weight more is new"):
        HybridCache.load(saved[0], model)


def test_samples_of_quest_are_named_as_those_of_scout(
    models: dict[str, PreTrainedModel], saved: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(saved[0], folder)
    tensors = load_file(folder / "cache.safetensors")
    with safe_open(folder / "cache.safetensors", "pt") as file:
        about = json.loads(file.metadata()["about"])
    about["policy"] = {"name": "quest", "knobs": {"budget": None, "samples": 64, "recent": 0}}
    forging.write(folder, about, tensors)
    with pytest.raises(ValueError, match=r"cache: samples=64 is a knob of policy 'scout'.*recent=0, block_size=16$"):
        HybridCache.load(folder, models["llama"])


@pytest.mark.parametrize("other", [saving.FORMAT - 1, saving.FORMAT + 1])
def test_another_format_is_refused(
    models: dict[str, PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: int
) -> None:
    cache = make(models["llama"], "full", "one")
    monkeypatch.setattr(saving, "FORMAT", other)
    cache.save(tmp_path / "cache")
    with pytest.raises(ValueError, match=f"saved in format {other}, this version reads format {loading.FORMAT}"):
        HybridCache.load(tmp_path / "cache", models["llama"])


@pytest.mark.parametrize(
    ("version", "words"), [(8, "saved in format 8, this version reads format 9"), (9, "not what was saved")]
)
def test_files_without_a_checksum_are_of_older_formats(
    models: dict[str, PreTrainedModel], saved: Any, tmp_path: Path, version: int, words: str
) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(saved[0], folder)
    with safe_open(folder / "cache.safetensors", "pt") as file:
        about = json.loads(file.metadata()["about"]) | {"format": version}
    save_file(load_file(folder / "cache.safetensors"), folder / "cache.safetensors", {"about": json.dumps(about)})
    with pytest.raises(ValueError, match=words):
        HybridCache.load(folder, models["llama"])


def test_knobs_on_which_the_blocks_depend_stay(models: dict[str, PreTrainedModel], saved: Any) -> None:
    with pytest.raises(ValueError, match="block_size: a saved cache keeps its own"):
        HybridCache.load(saved[0], models["llama"], block_size=32)
    assert HybridCache.load(saved[0], models["llama"], threads=2).settings.worker.threads == 2


# --- where it is written ----------------------------------------------------------------------------------------------


def test_a_save_that_fails_leaves_the_old_one(
    models: dict[str, PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models["llama"]
    ids, mask = prompt(1, 40)
    cache = make(model, "full", "one")
    folder = tmp_path / "deep" / "cache"
    cache.save(folder)  # an empty one may be saved
    assert HybridCache.load(folder, model).get_seq_length() == 0
    prefill(model, cache, ids, mask)

    def fail(*args: Any) -> None:
        raise OSError(28, "no space left on device")

    for module, site in ((segments, "sync"), (saving, "sync"), (saving, "save")):
        with monkeypatch.context() as patch:
            patch.setattr(module, site, fail)
            with pytest.raises(OSError, match="no space left"):
                cache.save(folder)
        assert os.listdir(folder.parent) == ["cache"]
        assert HybridCache.load(folder, model).get_seq_length() == 0
    cache.save(folder)
    assert os.listdir(folder.parent) == ["cache"]
    assert HybridCache.load(folder, model).get_seq_length() == 40


@pytest.mark.parametrize(("case", "tier"), [("h2o", "one"), ("scout", "split")])
def test_what_no_load_would_read_is_not_saved(
    models: dict[str, PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, tier: str
) -> None:
    model = models["llama"]
    ids, mask = prompt(1, PROMPT)
    cache = make(model, case, tier)
    token = prefill(model, cache, ids, mask)
    decode(model, cache, token, mask, 3)
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


def test_other_peoples_files_are_left_alone(models: dict[str, PreTrainedModel], tmp_path: Path) -> None:
    cache = make(models["llama"], "full", "one")
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "one.txt").write_text("dear")
    for taken in (tmp_path / "letters", tmp_path / "letters" / "one.txt"):
        with pytest.raises(ValueError, match="no saved cache"):
            cache.save(taken)
    with pytest.raises(ValueError, match="no saved cache"):
        HybridCache.load(tmp_path / "letters", models["llama"])
    (tmp_path / "empty").mkdir()
    cache.save(tmp_path / "empty")
    assert sorted(os.listdir(tmp_path)) == ["empty", "letters"]
