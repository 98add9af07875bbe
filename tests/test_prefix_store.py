"""`PrefixStore`: what prompts find again, in memory and on disk, and what they must not find."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import cpu_offload
from forks import exit_status, forked
from pools import used_bytes
from tiny import DEVICE, SIZES, spread_weights, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import hf_offload
from hf_offload import HybridCache, PrefixStore, prefix_store
from hf_offload.files import entries, saving, segments
from hf_offload.model.hooks import cache_argument

SIZE = 16
LINEAR = {"num_key_heads": 2, "num_value_heads": 2, "key_head_dim": 16, "value_head_dim": 16}
SCOUT: dict[str, Any] = {"budget": 64, "sinks": 16, "recent": 16}
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "scout": ("scout", SCOUT),
    "samples": ("scout", {"samples": 64}),
    "hgca": ("hgca", {"window": 32}),
    "h2o": ("h2o", {"heavy": 0.3, "recent": 0.1}),
    "int8": ("full", {"host_dtype": "int8"}),
    "split": ("scout", {**SCOUT, "tier": "split"}),
}


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
    linear = {f"linear_{name}": size for name, size in LINEAR.items()}
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    config = AutoConfig.for_model("qwen3_5_text", **sizes, **linear, layer_types=kinds)
    torch.manual_seed(0)
    qwen = AutoModelForCausalLM.from_config(config, attn_implementation="hybrid_sparse")
    return {"llama": tiny_model("llama"), "gemma3": tiny_model("gemma3"), "qwen3_5": spread_weights(qwen)}


@pytest.fixture
def model(models: dict[str, PreTrainedModel]) -> PreTrainedModel:
    return models["llama"]


def ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 160, (1, count), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def joined(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts, 1)


def generate(model: PreTrainedModel, prompt: torch.Tensor, cache: Any, count: int = 8, **options: Any) -> Any:
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False, output_scores=True,
        return_dict_in_generate=True, pad_token_id=0, **cache_argument(model, cache), **options,
    )  # fmt: skip


def make(folder: Path, model: PreTrainedModel, policy: str = "full", **options: Any) -> PrefixStore:
    name, knobs = POLICIES[policy]
    return PrefixStore(folder, model, name, block_size=SIZE, **{"min_seconds": 0, **knobs, **options})


def ask(store: PrefixStore, prompt: torch.Tensor, count: int = 8, keep: bool = True) -> tuple[int, str | None, Any]:
    """What was found for a prompt, where, and what was generated."""
    with store.open(prompt) as found:
        out = generate(store._model, prompt, found.cache, count)
        if keep:
            found.keep(out)
        return found.tokens, found.source, out


def plain(model: PreTrainedModel, prompt: torch.Tensor) -> torch.Tensor:
    """What a cache without a store says."""
    tokens: torch.Tensor = generate(model, prompt, HybridCache(model, "full")).sequences
    return tokens


def scores(out: Any) -> torch.Tensor:
    return torch.stack(out.scores)


def entry_files(folder: Path) -> list[Path]:
    return list(folder.glob("*/*/*"))


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_and_disk_go_on_bit_for_bit_alike(model: PreTrainedModel, tmp_path: Path, policy: str) -> None:
    store = make(tmp_path, model, policy)
    first = ids(300)
    tokens, source, out = ask(store, first)
    assert (tokens, source) == (0, None)
    second = joined(out.sequences, ids(20, 1))
    store.flush()
    store._min_seconds = 1000  # nothing more is saved
    with store.open(second) as found:
        assert (found.tokens, found.source) == (307, "ram")
        ram = generate(model, second, found.cache)
    with make(tmp_path, model, policy).open(second) as found:
        assert (found.tokens, found.source) == (307, "disk")
        disk = generate(model, second, found.cache)
    assert torch.equal(scores(ram), scores(disk))
    if policy == "full":
        plain = generate(model, second, HybridCache(model, "full", block_size=SIZE))
        assert torch.equal(plain.sequences, ram.sequences)
        assert (scores(plain) - scores(ram)).abs().max() < 1e-4


def test_tenants_of_one_store_share_its_memory_and_no_prefix(model: PreTrainedModel, tmp_path: Path) -> None:
    prompt, store = ids(100), make(tmp_path, model)
    for tenant in ("", "one", "two"):
        with store.open(prompt, tenant=tenant) as found:
            assert found.tokens == 0
            found.read()
    store.flush()
    assert store.saves == 3
    assert store.disk_bytes > 0
    for tenant, tokens in (("", 98), ("one", 98), ("two", 98), ("three", 0), (None, 98)):
        with store.open(prompt, tenant=tenant) as found:
            assert found.tokens == tokens
    with make(tmp_path, model, tenant="one").open(prompt) as found:
        assert (found.tokens, found.source) == (98, "disk")


def test_time_between_turns_is_no_work(model: PreTrainedModel, tmp_path: Path) -> None:
    store = make(tmp_path, model, min_seconds=1)
    with store.open(ids(100)) as found:
        time.sleep(1.1)
        found.resume()
        found.read()
    store.flush()
    assert store.saves == 0
    with store.open(ids(100, 1)) as found:
        time.sleep(1.1)
        found.read()
    store.flush()
    assert store.saves == 1


def test_the_longest_common_prefix_is_found_and_two_tokens_are_left(model: PreTrainedModel, tmp_path: Path) -> None:
    document, store = ids(200), make(tmp_path, model)
    for seed, count in ((1, 30), (2, 60)):
        ask(store, joined(document, ids(count, seed)))
    for prompt, want in (
        (joined(document, ids(60, 2), ids(9, 9)), 260),
        (joined(document, ids(60, 2)[:, :41], ids(9, 9)), 241),
        (document, 198),
        (document[:, :50], 48),
        (document[:, :2], 0),
        (document[:, :1], 0),
        (ids(50, 8), 0),
    ):
        with store.open(prompt) as found:
            assert found.tokens == want
            assert found.source == ("ram" if want else None)
            assert found.cache.get_seq_length() == want
            out = generate(model, prompt, found.cache)
        assert torch.equal(out.sequences, plain(model, prompt))


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
@pytest.mark.parametrize("again", ["ram", "disk"])
def test_models_that_cannot_crop_continue_from_whole_entries(
    models: dict[str, PreTrainedModel], tmp_path: Path, family: str, again: str
) -> None:
    model = models[family]
    store = make(tmp_path, model)
    first = ids(300)
    _, _, out = ask(store, first)
    for answer, want in ((out.sequences[:, 300:], 307), (ids(6, 5), 300)):  # as it was; rendered otherwise
        second = joined(first, answer, ids(7, 1))
        if again == "disk":
            store.close()
            store = make(tmp_path, model)
        tokens, source, got = ask(store, second, keep=False)
        assert (tokens, source) == (want, again if want == 307 or again == "ram" else source)
        plain = generate(model, second, HybridCache(model, "full", block_size=SIZE))
        assert (scores(plain) - scores(got)).abs().max() < 1e-4
        assert torch.equal(plain.sequences, got.sequences)


def test_what_read_has_read_is_found_by_models_that_cannot_crop(
    models: dict[str, PreTrainedModel], tmp_path: Path
) -> None:
    model, prompt = models["gemma3"], ids(300)
    store = make(tmp_path, model)
    with store.open(prompt) as found:
        found.read(stop=280, chunk=64)  # the end of the last user's message
        generate(model, prompt, found.cache)
    other = joined(prompt[:, :280], ids(20, 3))
    assert ask(store, other)[0] == 280
    with store.open(prompt) as found:
        assert found.tokens == 280  # the whole prompt leaves nothing to append
        found.read()
    with store.open(prompt) as found:
        assert found.tokens == 298


def test_a_chat_of_a_model_that_cannot_crop_keeps_eight_entries(
    models: dict[str, PreTrainedModel], tmp_path: Path
) -> None:
    store = make(tmp_path, models["gemma3"])
    prompt = ids(60)
    for turn in range(9):
        tokens, _, out = ask(store, prompt, 3)
        assert tokens == (0 if turn == 0 else prompt.shape[1] - 5)
        prompt = joined(out.sequences, ids(4, turn))
        store.flush()
    assert len(store._held) == prefix_store.MOST_CHECKPOINTS
    store.flush()
    assert len(entries.list_entries(tmp_path)) <= prefix_store.MOST_CHECKPOINTS


def test_a_prompt_in_chunks_is_saved_by_segments(model: PreTrainedModel, tmp_path: Path) -> None:
    store = make(tmp_path, model, segment_tokens=64)
    prompt = ids(300)
    with store.open(prompt) as found:
        lengths = []
        after = found.cache.after_forward
        assert after is not None

        def told() -> None:
            after()
            lengths.append((found.cache.get_seq_length(), [entry.tokens for entry in entries.list_entries(tmp_path)]))

        found.cache.after_forward = told
        found.read(chunk=32)
    assert [have for _, have in lengths] == [[], [64], [64], [128], [128], [192], [192], [256], [256], [256]]
    store.close()
    assert [entry.tokens for entry in entries.list_entries(tmp_path)] == [298]
    assert len([path for path in entry_files(tmp_path) if path.name.startswith("segment")]) == 5


@pytest.mark.parametrize("chunk", [2, 3, 7, 64, 297, 298, 299, 500])
def test_read_leaves_two_tokens_and_never_feeds_a_single_one(
    model: PreTrainedModel, tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, fed = make(tmp_path, model), []
    model.register_forward_pre_hook(lambda module, args: fed.append(args[0].shape[1]))
    with store.open(ids(300)) as found:
        found.read(chunk=chunk)
        assert found.cache.get_seq_length() == 298
    model._forward_pre_hooks.clear()
    assert sum(fed) == 298
    assert min(fed) > 1
    assert max(fed) <= chunk + 1


def test_chats_of_one_document_share_it(model: PreTrainedModel, tmp_path: Path) -> None:
    document, store = ids(700), make(tmp_path, model, "scout")
    with store.open(document) as found:
        found.read()
    store.flush()
    pool = store._held[0].cache.layers[0].store.pool
    one, bytes_of_one = used_bytes(pool), entries.used_bytes(*tmp_path.glob("*"))
    for chat in range(8):
        ask(store, joined(document, ids(10, chat)), 3)
    store.flush()
    assert len(store._held) == 8
    assert used_bytes(pool) < 1.5 * one  # two blocks of 44 each, which are its own
    assert {id(entry.cache.layers[0].store.pool) for entry in store._held} == {id(pool)}
    assert entries.used_bytes(*tmp_path.glob("*")) < 2 * bytes_of_one  # tables are large beside a tiny model's keys
    linked = {path.name: path.stat().st_nlink for path in tmp_path.glob("*/*/segment-*")}
    assert max(linked.values()) == 8


def test_turns_write_what_is_new(model: PreTrainedModel, tmp_path: Path) -> None:
    store, written = make(tmp_path, model), dict[int, int]()
    prompt = ids(600)
    for turn in range(12):
        out = ask(store, prompt, 5)[2]
        prompt = joined(out.sequences, ids(20, turn))
        store.flush()
        written |= {path.stat().st_ino: path.stat().st_size for path in tmp_path.glob("*/*/segment-*")}
    blocks = -(-prompt.shape[1] // SIZE) * store._held[-1].cache.layers[0].store.pool.block_bytes * 4
    assert sum(written.values()) < 1.1 * blocks + 12 * 4096  # and headers


def test_limits_hold_within_one_entry(model: PreTrainedModel, tmp_path: Path) -> None:
    store = make(tmp_path, model)
    ask(store, ids(300))
    store.flush()
    memory, disk = store.ram_bytes, entries.used_bytes(*tmp_path.glob("*"))
    store = make(tmp_path, model, max_ram=3 * memory, max_bytes=3 * disk + disk // 2)
    for seed in range(1, 9):
        ask(store, ids(300, seed))
        store.flush()
        assert store.ram_bytes <= 3 * memory
        assert entries.used_bytes(*tmp_path.glob("*")) <= 3 * disk + disk // 2
    assert ask(store, joined(ids(300, 8), ids(5)))[0] == 300  # the newest ones stay
    assert ask(store, joined(ids(300, 7), ids(5)))[0] == 300
    assert ask(store, joined(ids(300, 1), ids(5)))[0] == 0
    assert {entry.users for entry in store._held} == {0}


def test_what_is_in_use_is_not_evicted(model: PreTrainedModel, tmp_path: Path) -> None:
    store = make(tmp_path, model, max_ram=1, max_bytes=1)
    _, _, out = ask(store, ids(300))
    second = joined(out.sequences, ids(5))
    with store.open(second) as found:
        assert found.tokens == 307
        for seed in range(3):
            ask(store, ids(100, 5 + seed))
        got = generate(model, second, found.cache)
    assert torch.equal(got.sequences, plain(model, second))


def test_what_an_unsaved_prompt_comes_from_stays_on_disk(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(tmp_path, model)
    _, _, out = ask(store, ids(300))
    store.flush()
    (durable,) = store._disk
    store._max_bytes = store.disk_bytes
    monkeypatch.setattr(store, "_save_soon", lambda entry: None)  # another save takes long
    second = joined(out.sequences, ids(5))
    with store.open(second) as found:
        generate(model, second, found.cache, 1)
        ask(store, ids(300, 9))
        (other,) = [entry for entry in store._held if entry.path is None and not entry.users]
        store._save(other)
        assert durable.exists()


def test_short_work_is_not_saved_and_long_work_at_once(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_store, "IDLE", 0.2)
    store = make(tmp_path, model, min_seconds=1000)
    ask(store, ids(300))
    store.close()
    assert entry_files(tmp_path) == []
    store = make(tmp_path, model, min_seconds=0)
    with store.open(ids(300)) as found:
        generate(model, ids(300), found.cache, 1)
        wait_for(lambda: [entry.tokens for entry in entries.list_entries(tmp_path)] == [300])  # before the block ends
    ask(store, ids(200, 1))
    wait_for(lambda: sorted(e.tokens for e in entries.list_entries(tmp_path)) == [207, 300])  # when idle


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_side_calls_push_nothing_out(model: PreTrainedModel, tmp_path: Path) -> None:
    """Titles and tags: short prompts about the chat."""
    store = make(tmp_path, model)
    prompt = ids(400)
    ask(store, prompt)
    store.flush()
    limit = int(1.3 * store.ram_bytes)
    store = make(tmp_path, model, max_ram=limit, max_bytes=int(1.3 * entries.used_bytes(*tmp_path.glob("*"))))
    for turn in range(6):
        tokens, _, out = ask(store, prompt)
        assert turn == 0 or tokens >= 390
        ask(store, ids(20, 50 + turn))
        store.flush()
        prompt = joined(out.sequences[:, :-3], ids(2, turn))


def test_short_prompts_push_no_long_one_from_memory(model: PreTrainedModel, tmp_path: Path) -> None:
    store = make(tmp_path, model)
    _, _, out = ask(store, ids(400))
    store.flush()
    store._max_ram, store._min_seconds = int(1.2 * store.ram_bytes), 1000
    for seed in range(3):
        ask(store, ids(300, 50 + seed))
        assert store.ram_bytes <= store._max_ram
    with store.open(joined(out.sequences, ids(5))) as found:
        assert (found.source, found.tokens) == ("ram", 407)


# --- what must not be found -------------------------------------------------------------------------------------------


def test_other_models_policies_and_tenants_find_nothing(model: PreTrainedModel, tmp_path: Path) -> None:
    prompt = ids(200)
    store = make(tmp_path, model)
    ask(store, prompt)
    store.close()
    adapted = peft.get_peft_model(
        tiny_model("llama"), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    ).eval()
    others: list[tuple[Any, str, dict[str, Any]]] = [
        (tiny_model("llama").bfloat16(), "full", {}),
        (tiny_model("llama", seed=1), "full", {}),
        (adapted, "full", {}),
        (model, "int8", {}),
        (model, "hgca", {}),
        (model, "full", {"block_size": 32}),
        (model, "full", {"tenant": "another"}),
    ]
    for other, policy, knobs in others:
        name, more = POLICIES[policy]
        with PrefixStore(tmp_path, other, name, min_seconds=0, **{"block_size": SIZE, **more, **knobs}) as another:
            with another.open(prompt) as found:
                assert found.tokens == 0, (policy, knobs)
                generate(other, prompt, found.cache, 1)
            with another.open(prompt) as found:
                assert found.tokens == 198
    assert ask(make(tmp_path, model), prompt)[0] == 198


def test_an_adapter_that_is_switched_off_finds_nothing_of_it(tmp_path: Path) -> None:
    adapted = peft.get_peft_model(
        tiny_model("llama"), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    ).eval()
    store, prompt = make(tmp_path, adapted), ids(100)
    assert ask(store, prompt)[0] == 0
    with adapted.disable_adapter():
        assert ask(store, prompt)[0] == 0
        assert ask(store, prompt)[0] == 98
    assert ask(store, prompt)[0] == 98
    assert len(list(tmp_path.glob("*/about.json"))) == 2
    other = ids(100, 1)
    with store.open(other) as found, adapted.disable_adapter():
        generate(adapted, other, found.cache)  # by another model than that which `open` saw
    assert ask(store, other)[0] == 0


def test_offloaded_weights_are_those_that_they_were(model: PreTrainedModel, tmp_path: Path) -> None:
    prompt = ids(100)
    with make(tmp_path, model) as store:
        want = ask(store, prompt)[2]
    for seed, tokens in ((0, 98), (1, 0)):
        offloaded = cpu_offload(tiny_model("llama", seed=seed), execution_device=torch.device(DEVICE))
        with make(tmp_path, offloaded) as store:
            have, _, out = ask(store, prompt)
        assert have == tokens
        assert torch.equal(out.sequences, want.sequences) == (seed == 0)


@pytest.mark.parametrize("kind", ["tokens", "cache.safetensors", "segment", "tail"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "empty"])
def test_damaged_entries_are_missed_and_removed(model: PreTrainedModel, tmp_path: Path, kind: str, damage: str) -> None:
    prompt = ids(200)
    store = make(tmp_path, model)
    _, _, want = ask(store, prompt)
    store.close()
    (path,) = (path for path in entry_files(tmp_path) if path.name.startswith(kind))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"flipped": bytes(data), "cut": bytes(data[:-3]), "empty": b""}[damage])
    for _ in range(2):
        tokens, _, out = ask(store := make(tmp_path, model), prompt)
        assert tokens in (0, 198)
        assert torch.equal(out.sequences, want.sequences)
        store.close()
    assert tokens == 198  # saved again
    assert kind == "tokens" or len([entry for entry in entries.list_entries(tmp_path) if entry.tokens]) == 1


def test_the_text_of_one_entry_under_the_name_of_another_is_missed(model: PreTrainedModel, tmp_path: Path) -> None:
    store = make(tmp_path, model)
    ask(store, ids(100))
    ask(store, ids(100, 1))
    store.close()
    one, other = (path for path in tmp_path.glob("*/*") if path.is_dir())
    shutil.copy(one / "tokens", other / "tokens")
    store = make(tmp_path, model)
    assert sorted((ask(store, ids(100))[0], ask(store, ids(100, 1))[0])) == [0, 98]


def test_rows_and_padding_are_not_kept(model: PreTrainedModel, tmp_path: Path) -> None:
    store, prompt = make(tmp_path, model), ids(60)
    with store.open(prompt) as found:
        generate(model, prompt, found.cache, num_beams=2)
    mask = torch.ones_like(prompt)
    mask[:, :5] = 0
    with store.open(prompt) as found:
        assert found.tokens == 0
        model.generate(prompt, attention_mask=mask, max_new_tokens=2, **cache_argument(model, found.cache))
    with store.open(prompt) as found:
        assert found.tokens == 0


def test_images_and_other_input_are_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    store = make(tmp_path, model)
    for wrong, error, words in (
        (torch.zeros(2, 5, dtype=torch.long), ValueError, "one row without padding"),
        (torch.zeros(1, 0, dtype=torch.long), ValueError, "no token"),
        (torch.zeros(1, 4), TypeError, "integers"),
        (torch.tensor([[1, -7]]), ValueError, "no token ids"),
        ([[1, 2], [3, 4]], ValueError, "one row"),
    ):
        with pytest.raises(error, match=words), store.open(wrong):
            pass
    model.config.image_token_id = 77
    try:
        with pytest.raises(ValueError, match="image_token_id 77"), store.open([5, 77, 6]):
            pass
    finally:
        del model.config.image_token_id
    with store.open([5, 7, 6]) as found:
        with pytest.raises(ValueError, match="begin otherwise"):
            found.keep([[5, 7, 8, 9]])
        with pytest.raises(ValueError, match="stop=-1"):
            found.read(stop=-1)
        with pytest.raises(ValueError, match="chunk=1"):
            found.read(chunk=1)
        generate(model, torch.tensor([[5, 7, 6]]), found.cache)
        with pytest.raises(ValueError, match="give all that"):
            found.keep([[5, 7, 6]])
    store.close()
    with pytest.raises(RuntimeError, match="closed"), store.open([1, 2, 3]):
        pass
    for knobs in ({"max_ram": "much"}, {"max_bytes": -1}, {"min_seconds": -1}, {"segment_tokens": 0}, {"budgets": 5}):
        with pytest.raises((ValueError, TypeError)):
            PrefixStore(tmp_path, model, "scout", **knobs)


def test_a_prefix_whose_keys_depend_on_the_prompts_length_is_refused(tmp_path: Path) -> None:
    for kind, more in (("dynamic", {}), ("longrope", {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8})):
        rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64, **more}
        config = LlamaConfig(**SIZES, num_key_value_heads=2, head_dim=16, rope_parameters=rope)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="hybrid_sparse")
        with pytest.raises(ValueError, match=f"rope_type='{kind}'"):
            PrefixStore(tmp_path, model)


def test_what_the_user_does_with_the_cache_gives_no_wrong_entry(model: PreTrainedModel, tmp_path: Path) -> None:
    """A prompt that is read when it was answered already, and a cache that begins again in other memory."""
    store, prompt = make(tmp_path, model, min_seconds=99), ids(100)
    with store.open(prompt) as found:
        generate(model, prompt, found.cache, 12)
        found.read()
    assert all(len(entry.ids) == entry.cache.get_seq_length() for entry in store._held)
    store = make(tmp_path, model)
    first = ids(300)
    ask(store, first)
    store.flush()
    other = joined(first[:, :16], ids(300, 2))
    ask(store, other)
    store.flush()
    prompt = joined(other[:, :220], ids(500, 5))
    with store.open(prompt) as found:
        assert found.tokens == 220
        found.cache.reset()
        out = generate(model, prompt, found.cache)
        found.keep(out)
    store.close()
    again = joined(out.sequences, ids(10, 9))
    tokens, _, got = ask(make(tmp_path, model), again, keep=False)
    assert tokens == 727
    assert torch.equal(got.sequences, plain(model, again))


def test_knobs_of_a_run_are_those_of_the_store(model: PreTrainedModel, tmp_path: Path) -> None:
    with make(tmp_path, model, "split", device_budget="64 blocks") as store:
        ask(store, ids(200))
    with make(tmp_path, model, "scout", tier="one").open(ids(200)) as found:
        assert (found.tokens, found.source) == (198, "disk")
        assert not found.cache.layers[0].two_memories


def test_little_in_common_loads_nothing(model: PreTrainedModel, tmp_path: Path) -> None:
    first = ids(2000)
    with make(tmp_path, model) as store, store.open(first) as found:
        found.read()
    store = make(tmp_path, model)
    for common, want in ((1, 0), (20, 0), (40, 40)):
        prompt = joined(first[:, :common], ids(60, 7))
        assert ask(store, prompt, keep=False)[0] == want


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_told_and_memory_serves(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, prompt = make(tmp_path, model), ids(200)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(segments, "sync", full)
        ask(store, prompt)
        wait_for(lambda: store._failed is not None)
        with pytest.warns(RuntimeWarning, match="not saved.*No space left.*free space on its disk"):
            assert ask(store, prompt)[0] == 198
        with pytest.raises(OSError, match="free space"):
            store.flush()
        assert entry_files(tmp_path) == []
    store.flush()
    assert len(entries.list_entries(tmp_path)) == 1


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounts a file system")
def test_a_folder_that_cannot_be_written_is_read(model: PreTrainedModel, tmp_path: Path) -> None:
    store = make(tmp_path, model)
    ask(store, ids(200))
    store.close()
    if subprocess.run(["mount", "--bind", "-o", "ro", str(tmp_path), str(tmp_path)], capture_output=True).returncode:
        pytest.skip("may not mount")
    try:
        store = make(tmp_path, model)
        assert ask(store, ids(200))[:2] == (198, "disk")
        ask(store, ids(150, 1))
        with pytest.raises(OSError, match="Read-only"):
            store.flush()
        (segment,) = (path for path in entry_files(tmp_path) if path.name.startswith("segment"))
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
    data = bytearray(segment.read_bytes())
    data[5000] ^= 1
    segment.write_bytes(bytes(data))
    assert ask(make(tmp_path, model), ids(200))[0] == 0


def test_an_interrupted_prompt_goes_on_where_it_was(model: PreTrainedModel, tmp_path: Path) -> None:
    store, prompt = make(tmp_path, model), ids(300)
    layer: Any = model.model.layers[2]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def read() -> None:
        with store.open(prompt) as found:
            found.read(stop=128, chunk=64)
            layer.register_forward_pre_hook(interrupt)
            found.read(chunk=64)

    with pytest.raises(KeyboardInterrupt):
        read()
    layer._forward_pre_hooks.popitem()
    tokens, _, out = ask(store, prompt)
    assert tokens == 128
    assert torch.equal(out.sequences, plain(model, prompt))


def test_the_folder_of_something_else_is_left_alone(model: PreTrainedModel, tmp_path: Path) -> None:
    text = tmp_path / "thesis" / "chapters" / "one.tex"
    text.parent.mkdir(parents=True)
    text.write_text("years of work")
    with pytest.raises(ValueError, match="is no PrefixStore"):
        make(tmp_path, model)
    (tmp_path / "lock").touch()  # as if the thesis had been put into a store
    store = make(tmp_path, model, max_bytes=1)
    ask(store, ids(100))
    store.flush()
    with entries.locked(tmp_path, 9.0):
        entries.clean(tmp_path)
    assert text.read_text() == "years of work"
    assert all("thesis" not in str(entry.path) for entry in entries.list_entries(tmp_path))


def test_blocks_that_end_early_raise_what_the_user_raised(models: dict[str, PreTrainedModel], tmp_path: Path) -> None:
    for name, model in models.items():
        store = make(tmp_path / name, model)
        with store.open(ids(30)):
            pass
        with pytest.raises(KeyError, match="mine"), store.open(ids(30)):
            raise KeyError("mine")
        assert store._held == []


def test_found_serves_within_its_block_alone(model: PreTrainedModel, tmp_path: Path) -> None:
    store, prompt = make(tmp_path, model, max_ram=1), ids(100)
    with store.open(prompt) as found:
        out = generate(model, prompt, found.cache)
    with pytest.raises(RuntimeError, match="before the block"):
        found.keep(out)
    with pytest.raises(RuntimeError, match="before the block"):
        found.read()
    assert {entry.users for entry in store._held} == {0}
    with store.open([5]) as found:
        found.read()
    with pytest.raises(ValueError, match="no token"), store.open([]):
        pass


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_warning_that_is_an_error_leaves_nothing_open(model: PreTrainedModel, tmp_path: Path) -> None:
    store = make(tmp_path, model)
    store._failed = OSError("full")
    with pytest.raises(RuntimeWarning, match="full"), store.open(ids(50)):
        pass
    assert store._open == 0
    assert ask(store, ids(50))[0] == 0


def test_a_child_process_has_no_part_in_the_store(model: PreTrainedModel, tmp_path: Path) -> None:
    """It neither holds the lock, nor saves, nor opens; the parent goes on."""
    store = make(tmp_path, model)
    ask(store, ids(50))

    def in_child() -> None:
        store.close()
        with pytest.raises(RuntimeError, match="forked"), store.open(ids(50)):
            pass
        time.sleep(3)

    with entries.locked(tmp_path, 9.0):
        child = forked(in_child)
    start = time.monotonic()
    store.flush()
    assert time.monotonic() - start < 2.5
    assert exit_status(child) == 0


def test_a_lock_that_is_held_costs_a_save_and_no_prompt(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, prompt = make(tmp_path, model, segment_tokens=64), ids(200)
    monkeypatch.setattr(entries, "_lock", lambda file: False)
    monkeypatch.setattr(entries, "_PAUSE", 1e9)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(time, "monotonic", iter(range(0, 10**9, 10)).__next__)
    with store.open(prompt) as found:
        found.read(chunk=64)
    assert found.cache.get_seq_length() == 198
    assert isinstance(store._failed, OSError)
    assert "another process saves" in str(store._failed)
    monkeypatch.undo()
    with pytest.raises(OSError, match="another process saves"):
        store.close()


def test_an_entry_that_is_being_saved_is_found_when_it_is_there(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, prompt = make(tmp_path, model, min_seconds=99), make(tmp_path, model, min_seconds=99), ids(200)
    real, looked = saving._write_file, []

    def slow(*given: Any) -> None:
        if not looked:
            looked.append(ask(other, ids(50, 77), keep=False)[0])
        real(*given)

    ask(one, prompt)
    one._min_seconds = 0
    with monkeypatch.context() as patch:
        patch.setattr(saving, "_write_file", slow)
        one.flush()
    assert looked == [0]
    assert ask(other, prompt, keep=False)[:2] == (198, "disk")


def test_mapped_files_hold_no_descriptors(model: PreTrainedModel, tmp_path: Path) -> None:
    with make(tmp_path, model, segment_tokens=32) as store:
        for seed in range(4):
            with store.open(ids(300, seed)) as found:
                found.read(chunk=32)
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    store = make(tmp_path, model)
    for seed in range(4):
        assert ask(store, ids(300, seed), keep=False)[0] == 298
    assert sys.platform != "linux" or len(os.listdir("/proc/self/fd")) < before + 8


def test_two_threads_read_one_document(model: PreTrainedModel, tmp_path: Path) -> None:
    """Both have found nothing; the second one's entry is the first one's. Later chats of both are right."""
    store, document = make(tmp_path, model), ids(300)
    with store.open(document) as one, store.open(document) as other:
        one.read()
        other.read()
        for found in (one, other):
            out = generate(model, document, found.cache)
            found.keep(out)
    store.flush()
    for again in (store, make(tmp_path, model)):
        tokens, _, got = ask(again, joined(out.sequences, ids(5)), keep=False)
        assert tokens >= 307
        assert torch.equal(got.sequences, plain(model, joined(out.sequences, ids(5))))


def test_many_threads_ask_at_once(model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_store, "IDLE", 0.01)
    store, document, wrong = make(tmp_path, model, max_ram=700_000, max_bytes=900_000), ids(300), []

    def chat(number: int) -> None:
        try:
            for turn in range(4):
                prompt = joined(document[:, : 300 - 40 * (number % 2)], ids(10 + turn, 10 * number + turn))
                out = ask(store, prompt, keep=turn % 2 == 0)[2]
                if not torch.equal(out.sequences, plain(model, prompt)):
                    wrong.append((number, turn))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=chat, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    assert wrong == []


def test_processes_that_evict_each_others_entries(model: PreTrainedModel, tmp_path: Path) -> None:
    with torch.no_grad():
        want = [plain(model, ids(200, seed)) for seed in range(6)]

    def work(process: int) -> None:
        store, hits = make(tmp_path, model, max_bytes=400_000, max_ram=300_000), 0
        for each in torch.randperm(24, generator=torch.Generator().manual_seed(process)).tolist():
            tokens, _, out = ask(store, ids(200, each % 6))
            hits += tokens > 0
            store.flush()
            assert torch.equal(out.sequences, want[each % 6])
        assert hits

    children = [forked(lambda process=process: work(process)) for process in range(3)]
    assert [exit_status(child) for child in children] == [0, 0, 0]
    assert all(entry.tokens for entry in entries.list_entries(tmp_path))


def test_a_clock_that_goes_back(model: PreTrainedModel, tmp_path: Path) -> None:
    store = make(tmp_path, model)
    for seed in range(3):
        ask(store, ids(200, seed))
    store.flush()
    for path in tmp_path.glob("*/*/tokens"):
        os.utime(path, (4e9, 4e9))
    store = make(tmp_path, model, max_bytes=entries.used_bytes(*tmp_path.glob("*")))
    _tokens, _, out = ask(store, ids(200, 9))
    store.flush()
    assert ask(store, ids(200, 9))[0] == 198
    assert torch.equal(out.sequences, plain(model, ids(200, 9)))


def test_the_end_of_the_process_saves(tmp_path: Path) -> None:
    code = f"""
import sys; sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parent.parent)]!r}
import torch; torch.set_num_threads(1)
from tiny import tiny_model
from test_prefix_store import *
from pathlib import Path
store = make(Path({str(tmp_path)!r}), tiny_model("llama"))
ask(store, ids(200))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    (entry,) = entries.list_entries(tmp_path)
    assert entry.tokens == 207


def test_killed_processes_leave_nothing_wrong(tmp_path: Path) -> None:
    kills(tmp_path, 8)


@pytest.mark.slow
def test_two_hundred_killed_processes_leave_nothing_wrong(tmp_path: Path) -> None:
    kills(tmp_path, 200)


def kills(folder: Path, count: int) -> None:
    script = Path(__file__).with_name("store_kills.py")
    paths = os.pathsep.join((str(script.parent.parent), str(script.parent)))
    done = subprocess.run(
        [sys.executable, script, folder, str(count), "0"], env={**os.environ, "PYTHONPATH": paths}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_only_the_owner_may_read(model: PreTrainedModel, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "store"
    old = os.umask(0)
    try:
        store = make(folder, model)
        _, _, out = ask(store, ids(100))
        store.flush()
        ask(store, joined(out.sequences, ids(50)))
        store.close()
    finally:
        os.umask(old)
    for path in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_entries_are_listed_and_removed(model: PreTrainedModel, tmp_path: Path) -> None:
    class Tokenizer:
        def decode(self, tokens: list[int]) -> str:
            return " ".join(map(str, tokens))

    store = make(tmp_path, model, tokenizer=Tokenizer())
    document = ids(100)
    for seed in range(2):
        ask(store, joined(document, ids(30, seed)), 2)
        store.flush()
    left = next(tmp_path.glob("*/*/tokens")).parent.with_name("7" * 32)
    left.mkdir()
    (left / "part").write_bytes(b"123")
    listed = entries.list_entries(tmp_path)
    assert sorted(entry.tokens for entry in listed) == [0, 131, 131]
    assert sum(entry.own for entry in listed if not entry.tokens) == 3
    assert all(entry.own and entry.shared for entry in listed if entry.tokens)
    assert all(entry.words.startswith(" ".join(map(str, document[0, :4].tolist()))) for entry in listed if entry.tokens)
    assert all(entry.about["policy"]["name"] == "full" for entry in listed)
    with entries.locked(tmp_path, 9.0):
        entries.clean(tmp_path)
    assert len(entries.list_entries(tmp_path)) == 2
    for entry in entries.list_entries(tmp_path):
        entries.remove(entry.path)
    assert ask(make(tmp_path, model), joined(document, ids(30, 0)))[0] == 0
    assert hf_offload.PrefixStore is PrefixStore
    assert saving.FORMAT == 9
