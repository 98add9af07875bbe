"""`PrefixStore`: what prompts find again, in memory and on disk, and what they must not find."""

from __future__ import annotations

import atexit
import os
import select
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from forks import exit_status, forked, in_fork
from pools import used_bytes
from test_killed_save import counted_calls
from tiny import DEVICE, SIZES, tiny_model
from transformers import AutoConfig, LlamaConfig, PreTrainedModel

from hf_offload import HybridCache, PrefixStore, prefix_store
from hf_offload.files import entries, segments, tensor_file
from hf_offload.model.hooks import cache_argument

Models = dict[str, PreTrainedModel]

SIZE = 16
LINEAR = {"num_key_heads": 2, "num_value_heads": 2, "key_head_dim": 16, "value_head_dim": 16}
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "hgca": ("hgca", {"window": 32}),
    "h2o": ("h2o", {"heavy": 0.3, "recent": 0.1}),
    "int8": ("full", {"host_dtype": "int8"}),
    "split": ("scout", {"budget": 64, "sinks": 16, "recent": 16, "tier": "split"}),
}
Make = Callable[..., PrefixStore]


@pytest.fixture(scope="module")
def models() -> Models:
    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
    linear = {f"linear_{name}": size for name, size in LINEAR.items()}
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    config = AutoConfig.for_model("qwen3_5_text", **sizes, **linear, layer_types=kinds)
    return {"llama": tiny_model("llama"), "gemma3": tiny_model("gemma3"), "qwen3_5": tiny_model(config)}


@pytest.fixture
def model(models: Models) -> PreTrainedModel:
    return models["llama"]


@pytest.fixture
def make(model: PreTrainedModel, tmp_path: Path) -> Iterator[Make]:
    """Makes stores of one folder, of the Llama unless another model is given."""
    made = []

    def make(policy: str = "full", model: Any = model, folder: Path = tmp_path, **options: Any) -> PrefixStore:
        name, knobs = POLICIES[policy]
        made.append(PrefixStore(folder, model, name, block_size=SIZE, **{"min_seconds": 0, **knobs, **options}))
        return made[-1]

    yield make
    for store in made:
        store._held.clear()  # what is not saved yet stays so
        store._urgent.clear()
        store.close()


def ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 160, (1, count), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def joined(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts, 1)


def generate(model: PreTrainedModel, prompt: torch.Tensor, cache: Any, count: int = 8, **options: Any) -> Any:
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False, output_scores=True,
        return_dict_in_generate=True, pad_token_id=0, **cache_argument(model, cache), **options,
    )  # fmt: skip


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


def saved(folder: Path) -> list[int]:
    """The lengths of the entries on disk."""
    return sorted(entry.tokens for entry in entries.list_entries(folder))


def disk_bytes(folder: Path) -> int:
    return entries.used_bytes(*folder.glob("*"))


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_and_disk_go_on_bit_for_bit_alike(make: Make, model: PreTrainedModel, policy: str) -> None:
    store, first = make(policy), ids(300)
    tokens, source, out = ask(store, first)
    assert (tokens, source) == (0, None)
    second = joined(out.sequences, ids(20, 1))
    store.flush()
    store._min_seconds = 1000  # nothing more is saved
    answers = []
    for again, source in ((store, "ram"), (make(policy), "disk")):
        tokens, where, out = ask(again, second, keep=False)
        assert (tokens, where) == (307, source)
        answers.append(out)
    assert torch.equal(*(torch.stack(out.scores) for out in answers))
    if policy == "full":
        assert torch.equal(answers[0].sequences, plain(model, second))


def test_knobs_of_a_run_are_those_of_the_store(make: Make) -> None:
    with make("split", device_budget="64 blocks") as store:
        ask(store, ids(200))
    with make("split", tier="one").open(ids(200)) as found:
        assert (found.tokens, found.source) == (198, "disk")
        assert not found.cache.layers[0].two_memories


def test_tenants_of_one_store_share_its_memory_and_no_prefix(make: Make) -> None:
    prompt, store = ids(100), make()
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
    with make(tenant="one").open(prompt) as found:
        assert (found.tokens, found.source) == (98, "disk")


def test_the_longest_common_prefix_is_found_and_two_tokens_are_left(make: Make, model: PreTrainedModel) -> None:
    document, store = ids(200), make()
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
        tokens, source, out = ask(store, prompt, keep=False)
        assert (tokens, source) == (want, "ram" if want else None)
        assert torch.equal(out.sequences, plain(model, prompt))


@pytest.mark.parametrize(("family", "again"), [("gemma3", "disk"), ("qwen3_5", "ram"), ("qwen3_5", "disk")])
def test_models_that_cannot_crop_continue_from_whole_entries(
    make: Make, models: Models, family: str, again: str
) -> None:
    model, first = models[family], ids(300)
    store = make(model=model)
    _, _, out = ask(store, first)
    for answer, want in ((out.sequences[:, 300:], 307), (ids(6, 5), 300)):  # as it was; rendered otherwise
        second = joined(first, answer, ids(7, 1))
        if again == "disk":
            store.close()
            store = make(model=model)
        tokens, source, got = ask(store, second, keep=False)
        assert (tokens, source) == (want, again if want == 307 or again == "ram" else source)
        assert torch.equal(plain(model, second), got.sequences)


def test_a_model_that_cannot_crop_finds_what_was_read_and_eight_turns(
    make: Make, models: Models, tmp_path: Path
) -> None:
    store, prompt = make(model=models["gemma3"]), ids(100)
    with store.open(prompt) as found:
        found.read(stop=80, chunk=64)  # the end of the last user's message
        generate(models["gemma3"], prompt, found.cache)
    assert ask(store, joined(prompt[:, :80], ids(20, 3)))[0] == 80
    with store.open(prompt) as found:
        assert found.tokens == 80  # the whole prompt leaves nothing to append
        found.read()
    with store.open(prompt) as found:
        assert found.tokens == 98
    store = make(model=models["gemma3"], folder=tmp_path / "chat")
    for turn in range(9):
        tokens, _, out = ask(store, prompt, 3)
        assert tokens == (prompt.shape[1] - 5 if turn else 0)
        prompt = joined(out.sequences, ids(4, turn))
        store.flush()
    assert len(store._held) == prefix_store.MOST_CHECKPOINTS
    assert len(saved(tmp_path / "chat")) <= prefix_store.MOST_CHECKPOINTS


@pytest.mark.parametrize("chunk", [2, 3, 37, 38, 39, 500])
def test_read_leaves_two_tokens_and_never_feeds_a_single_one(make: Make, model: PreTrainedModel, chunk: int) -> None:
    fed: list[int] = []
    handle = model.register_forward_pre_hook(lambda module, args: fed.append(args[0].shape[1]))
    with make().open(ids(40)) as found:
        found.read(chunk=chunk)
    handle.remove()
    assert sum(fed) == 38
    assert min(fed) > 1
    assert max(fed) <= chunk + 1


def test_chats_of_one_document_share_it_and_their_turns_write_what_is_new(make: Make, tmp_path: Path) -> None:
    document, store = ids(700), make("split")
    with store.open(document) as found:
        found.read()
    store.flush()
    pool = store._held[0].cache.layers[0].store.pool
    one, bytes_of_one = used_bytes(pool), disk_bytes(tmp_path)
    for chat in range(8):
        ask(store, joined(document, ids(10, chat)), 3)
    store.flush()
    assert len(store._held) == 8
    assert used_bytes(pool) < 1.5 * one  # two blocks of 44 each, which are its own
    assert {id(entry.cache.layers[0].store.pool) for entry in store._held} == {id(pool)}
    assert disk_bytes(tmp_path) < 2 * bytes_of_one  # tables are large beside a tiny model's keys
    linked = {path.stat().st_nlink for path in tmp_path.glob("*/*/segment-*")}
    assert max(linked) == 8
    written, prompt, before = dict[int, int](), document, disk_bytes(tmp_path)
    for turn in range(4):
        prompt = joined(ask(store, prompt, 5)[2].sequences, ids(20, turn))
        store.flush()
        written |= {path.stat().st_ino: path.stat().st_size for path in tmp_path.glob("*/*/segment-*")}
    assert sum(written.values()) < before + 4 * (2 * 4 * pool.block_bytes + 2 * 4096)  # two blocks, and headers


def test_limits_hold_within_one_entry_and_the_newest_stay(make: Make, tmp_path: Path) -> None:
    store = make()
    ask(store, ids(300))
    store.flush()
    for path in tmp_path.glob("*/*/tokens"):
        os.utime(path, (4e9, 4e9))  # before the clock went back
    memory, disk = store.ram_bytes, disk_bytes(tmp_path)
    store = make(max_ram=3 * memory, max_bytes=3 * disk + disk // 2)
    for seed in range(1, 6):
        ask(store, ids(300, seed))
        store.flush()
        assert store.ram_bytes <= 3 * memory
        assert disk_bytes(tmp_path) <= 3 * disk + disk // 2
    for seed, tokens in ((5, 300), (4, 300), (1, 0)):
        assert ask(store, joined(ids(300, seed), ids(5, 9)))[0] == tokens
    assert {entry.users for entry in store._held} == {0}


def test_what_is_in_use_is_not_evicted(make: Make, model: PreTrainedModel) -> None:
    store = make(max_ram=1, max_bytes=1)
    second = joined(ask(store, ids(300))[2].sequences, ids(5))
    store.flush()
    (durable,) = store._disk
    with store.open(second) as found:
        assert found.tokens == 307
        for seed in range(3):
            ask(store, ids(100, 5 + seed))
            store.flush()
            assert durable.exists()
        got = generate(model, second, found.cache)
    assert torch.equal(got.sequences, plain(model, second))


def test_short_work_is_not_saved_and_long_work_at_once(
    make: Make, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_store, "IDLE", 0.2)
    store = make(min_seconds=1000)
    ask(store, ids(300))
    store.close()
    assert saved(tmp_path) == []
    store = make()
    with store.open(ids(300)) as found:
        generate(model, ids(300), found.cache, 1)
        wait_for(lambda: saved(tmp_path) == [300])  # before the block ends
    ask(store, ids(200, 1))
    wait_for(lambda: saved(tmp_path) == [207, 300])  # when idle
    store.close()
    store, now = make(min_seconds=1), [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for seed, count in ((5, 2), (6, 3)):
        with store.open(ids(100, seed)) as found:
            now[0] += 1.1
            if seed == 5:
                found.resume()  # time between turns is no work
            found.read()
        store.flush()
        assert len(saved(tmp_path)) == count


def test_short_prompts_push_no_chat_out(make: Make, tmp_path: Path) -> None:
    """Titles and tags, about the chat."""
    store, prompt = make(), ids(400)
    ask(store, prompt)
    store.flush()
    store = make(max_ram=int(1.3 * store.ram_bytes), max_bytes=int(1.3 * disk_bytes(tmp_path)))
    for turn in range(6):
        tokens, _, out = ask(store, prompt)
        assert turn == 0 or tokens >= 390
        ask(store, ids(20, 50 + turn))
        store.flush()
        prompt = joined(out.sequences[:, :-3], ids(2, turn))
    store = make(folder=tmp_path / "other")
    ask(store, prompt)
    store.flush()
    store._max_ram, store._min_seconds = int(1.2 * store.ram_bytes), 1000
    for seed in range(3):
        ask(store, ids(300, 50 + seed))
        assert store.ram_bytes <= store._max_ram
    assert ask(store, prompt)[1] == "ram"


# --- what must not be found -------------------------------------------------------------------------------------------


def lora() -> Any:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(tiny_model("llama"), config).eval()


def test_other_models_policies_and_tenants_find_nothing(make: Make) -> None:
    prompt = ids(200)
    with make() as store:
        ask(store, prompt)
    others: list[dict[str, Any]] = [
        {"model": tiny_model("llama", seed=1)},
        {"model": lora()},
        {"policy": "int8"},
        {"policy": "hgca"},
        {"tenant": "another"},
    ]
    for other in others:
        with make(**other) as store:
            assert [ask(store, prompt, 1)[0] for _ in range(2)] == [0, 198], other
    # Of another dtype: to generate with it would compile kernels that no other test uses.
    with make(model=tiny_model("llama").bfloat16()) as store, store.open(prompt) as found:
        assert found.tokens == 0
    assert ask(make(), prompt)[0] == 198


def test_an_adapter_that_is_switched_off_finds_nothing_of_it(make: Make) -> None:
    adapted = lora()
    store, prompt, other = make(model=adapted), ids(100), ids(100, 1)
    assert ask(store, prompt)[0] == 0
    with adapted.disable_adapter():
        assert [ask(store, prompt)[0] for _ in range(2)] == [0, 98]
    assert ask(store, prompt)[0] == 98
    with store.open(other) as found, adapted.disable_adapter():
        generate(adapted, other, found.cache)  # by another model than that which `open` saw
    assert ask(store, other)[0] == 0


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        ("tokens", "flipped"), ("tokens", "empty"), ("cache", "cut"), ("segment", "flipped"), ("segment", "gone"),
        ("tail", "gone"), ("tail", "empty"),
    ],
)  # fmt: skip
def test_damaged_entries_are_missed_and_removed(make: Make, tmp_path: Path, kind: str, damage: str) -> None:
    prompt = ids(200)
    with make() as store:
        want = ask(store, prompt)[2]
    (path,) = tmp_path.glob(f"*/*/{kind}*")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"flipped": bytes(data), "cut": bytes(data[:-3]), "empty": b""}[damage])
    for found in ((0, 198), (198,)):  # saved again
        with make() as store:
            tokens, _, out = ask(store, prompt)
        assert tokens in found
        assert torch.equal(out.sequences, want.sequences)
    assert kind == "tokens" or len([tokens for tokens in saved(tmp_path) if tokens]) == 1


def test_rows_and_padding_are_not_kept(make: Make, model: PreTrainedModel) -> None:
    store, prompt = make(), ids(60)
    with store.open(prompt) as found:
        generate(model, prompt, found.cache, num_beams=2)
    mask = torch.ones_like(prompt)
    mask[:, :5] = 0
    with store.open(prompt) as found:
        assert found.tokens == 0
        model.generate(prompt, attention_mask=mask, max_new_tokens=2, **cache_argument(model, found.cache))
    assert ask(store, prompt)[0] == 0


def test_wrong_input_is_refused(make: Make, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make()
    monkeypatch.setattr(model.config, "image_token_id", 77, raising=False)
    for wrong, error, words in (
        (torch.zeros(2, 5, dtype=torch.long), ValueError, "one row without padding"),
        ([], ValueError, "no token"),
        (torch.zeros(1, 4), TypeError, "integers"),
        (torch.tensor([[1, -7]]), ValueError, "no token ids"),
        ([5, 77, 6], ValueError, "image_token_id 77"),
    ):
        with pytest.raises(error, match=words), store.open(wrong):
            pass
    with store.open([5, 7, 6]) as found:
        for attempt, words in (
            (lambda: found.keep([[5, 7, 8, 9]]), "begin otherwise"),
            (lambda: found.read(stop=-1), "stop=-1"),
            (lambda: found.read(chunk=1), "chunk=1"),
        ):
            with pytest.raises(ValueError, match=words):
                attempt()
        out = generate(model, torch.tensor([[5, 7, 6]]), found.cache)
        with pytest.raises(ValueError, match="give all that"):
            found.keep([[5, 7, 6]])
    for late in (lambda: found.keep(out), found.read):
        with pytest.raises(RuntimeError, match="before the block"):
            late()
    store.close()
    with pytest.raises(RuntimeError, match="closed"), store.open([1, 2, 3]):
        pass
    for knobs in ({"max_ram": "much"}, {"max_bytes": -1}, {"min_seconds": -1}, {"segment_tokens": 0}, {"budgets": 5}):
        with pytest.raises((ValueError, TypeError)):
            make(**knobs)


def test_a_prefix_whose_keys_depend_on_the_prompts_length_is_refused(tmp_path: Path) -> None:
    for kind, more in (("dynamic", {}), ("longrope", {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8})):
        rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64, **more}
        config = LlamaConfig(**SIZES, num_key_value_heads=2, head_dim=16, rope_parameters=rope)
        model = tiny_model(config)
        with pytest.raises(ValueError, match=f"rope_type='{kind}'"):
            PrefixStore(tmp_path, model)


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_told_and_memory_serves(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, prompt = make(), ids(200)

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
        wait_for(lambda: not list(tmp_path.glob("*/*/*")))
    with suppress(OSError):  # of a save that the store's thread had begun
        store.flush()
    store.flush()
    assert len(saved(tmp_path)) == 1


def test_an_interrupted_prompt_goes_on_where_it_was(make: Make, model: PreTrainedModel) -> None:
    store, prompt = make(), ids(300)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def read() -> None:
        with store.open(prompt) as found:
            found.read(stop=128, chunk=64)
            with model.model.layers[2].register_forward_pre_hook(interrupt):
                found.read(chunk=64)

    with pytest.raises(KeyboardInterrupt):
        read()
    tokens, _, out = ask(store, prompt)
    assert tokens == 128
    assert torch.equal(out.sequences, plain(model, prompt))


def test_the_folder_of_something_else_is_left_alone(make: Make, tmp_path: Path) -> None:
    text = tmp_path / "thesis" / "chapters" / "one.tex"
    text.parent.mkdir(parents=True)
    text.write_text("years of work")
    with pytest.raises(ValueError, match="is no PrefixStore"):
        make()
    (tmp_path / "lock").touch()  # as if the thesis had been put into a store
    store = make(max_bytes=1)
    ask(store, ids(100))
    store.flush()
    with entries.locked(tmp_path, 9.0):
        entries.clean(tmp_path)
    assert text.read_text() == "years of work"
    assert all("thesis" not in str(entry.path) for entry in entries.list_entries(tmp_path))


def test_blocks_that_end_early_raise_what_the_user_raised(make: Make, models: Models) -> None:
    for model in models.values():
        store = make(model=model)
        with store.open(ids(30)):
            pass
        with pytest.raises(KeyError, match="mine"), store.open(ids(30)):
            raise KeyError("mine")
        assert store._held == []


def test_a_child_process_has_no_part_in_the_store(make: Make, tmp_path: Path) -> None:
    """It neither waits for the lock to save, nor holds it, nor opens; the parent goes on while the child lives."""
    store = make()
    ask(store, ids(50))
    (closed, tell_parent), (flushed, tell_child) = os.pipe(), os.pipe()

    def in_child() -> None:
        store.close()
        os.write(tell_parent, b"!")
        with pytest.raises(RuntimeError, match="forked"), store.open(ids(50)):
            pass
        assert select.select([flushed], [], [], 60)[0]

    with entries.locked(tmp_path, 9.0):
        child = forked(in_child)
        assert select.select([closed], [], [], 60)[0]
    store.flush()
    os.write(tell_child, b"!")
    assert exit_status(child) == 0
    for end in (closed, tell_parent, flushed, tell_child):
        os.close(end)


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors as Linux shows them")
def test_mapped_files_hold_no_descriptors(make: Make) -> None:
    with make(segment_tokens=32) as store:
        for seed in range(4):
            with store.open(ids(300, seed)) as found:
                found.read(chunk=32)
    before, store = len(os.listdir("/proc/self/fd")), make()
    for seed in range(4):
        assert ask(store, ids(300, seed), keep=False)[0] == 298
    assert len(os.listdir("/proc/self/fd")) < before + 8


def test_many_threads_ask_at_once(make: Make, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_store, "IDLE", 0.01)
    store, document, wrong = make(max_ram=700_000, max_bytes=900_000), ids(300), []

    def chat(number: int) -> None:
        try:
            for turn in range(3):
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


def test_processes_that_evict_each_others_entries(make: Make, model: PreTrainedModel, tmp_path: Path) -> None:
    with torch.no_grad():
        want = [plain(model, ids(200, seed)) for seed in range(6)]

    def work(process: int) -> None:
        store, hits = make(max_bytes=400_000, max_ram=300_000), 0
        for each in torch.randperm(24, generator=torch.Generator().manual_seed(process)).tolist():
            tokens, _, out = ask(store, ids(200, each % 6))
            hits += tokens > 0
            store.flush()
            assert torch.equal(out.sequences, want[each % 6])
        assert hits

    children = [forked(lambda process=process: work(process)) for process in range(3)]
    assert [exit_status(child) for child in children] == [0, 0, 0]
    assert all(saved(tmp_path))


def test_the_end_of_the_process_saves(make: Make, tmp_path: Path) -> None:
    def work() -> None:
        ask(make(), ids(200))
        atexit._run_exitfuncs()

    assert in_fork(work) == 0
    assert saved(tmp_path) == [207]


def test_a_process_that_is_killed_leaves_nothing_wrong_and_loses_one_segment(
    make: Make, model: PreTrainedModel, tmp_path: Path
) -> None:
    """Before any of its system calls, some of which are tried; the next process goes on from what it has left."""
    prompt, n, ended = ids(300), 1, -1
    want, progress = plain(model, prompt), os.open(tmp_path / "progress", os.O_CREAT | os.O_RDWR)

    def use() -> None:
        with (
            counted_calls(n, lambda: os._exit(9)),
            make(folder=tmp_path / "store", segment_tokens=64) as store,
            store.open(prompt) as found,
        ):
            kept = found.cache.after_forward
            assert kept is not None

            def told() -> None:
                os.pwrite(progress, found.cache.get_seq_length().to_bytes(4, "little"), 0)
                kept()

            found.cache.after_forward = told
            found.read(chunk=32)
            found.keep(generate(model, prompt, found.cache))

    while ended != 0:
        ended = in_fork(use)
        assert ended in (0, 9)
        store, damaged = make(folder=tmp_path / "store"), list[Path]()
        store._discard = damaged.append  # type: ignore[method-assign]
        tokens, _, out = ask(store, prompt, keep=False)
        assert not damaged
        assert tokens >= min(int.from_bytes(os.pread(progress, 4, 0), "little"), 298) - 64 - 32
        assert torch.equal(out.sequences, want)
        store._held.clear()  # what was computed here stays unsaved
        n += 3
    os.close(progress)


def test_the_tokens_of_one_entry_under_the_name_of_another_are_missed(make: Make, tmp_path: Path) -> None:
    store = make()
    ask(store, ids(100))
    ask(store, ids(100, 1))
    store.close()
    one, other = (path for path in tmp_path.glob("*/*") if path.is_dir())
    shutil.copy(one / "tokens", other / "tokens")
    store = make()
    assert sorted((ask(store, ids(100))[0], ask(store, ids(100, 1))[0])) == [0, 98]


def test_a_folder_that_cannot_be_written_is_read(make: Make, tmp_path: Path) -> None:
    store = make()
    ask(store, ids(200))
    store.close()
    if subprocess.run(["mount", "--bind", "-o", "ro", str(tmp_path), str(tmp_path)], capture_output=True).returncode:
        pytest.skip("may not mount")
    try:
        store = make()
        assert ask(store, ids(200))[:2] == (198, "disk")
        ask(store, ids(150, 1))
        with pytest.raises(OSError, match="Read-only"):
            store.close()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_an_entry_that_is_being_saved_is_found_when_it_is_there(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, prompt = make(min_seconds=99), make(min_seconds=99), ids(200)
    real, looked = tensor_file.write, []

    def slow(*given: Any) -> None:
        if not looked:
            looked.append(ask(other, ids(50, 77), keep=False)[0])
        real(*given)

    ask(one, prompt)
    one._min_seconds = 0
    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "write", slow)
        one.flush()
    assert looked == [0]
    assert ask(other, prompt, keep=False)[:2] == (198, "disk")


@pytest.mark.slow
def test_two_hundred_killed_processes_leave_nothing_wrong(tmp_path: Path) -> None:
    script = Path(__file__).with_name("store_kills.py")
    paths = os.pathsep.join((str(script.parent.parent), str(script.parent)))
    done = subprocess.run(
        [sys.executable, script, tmp_path, "200", "0"], env={**os.environ, "PYTHONPATH": paths}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_only_the_owner_may_read(make: Make, tmp_path: Path) -> None:
    folder, old = tmp_path / "new" / "store", os.umask(0)
    try:
        with make(folder=folder) as store:
            out = ask(store, ids(100))[2]
            store.flush()
            ask(store, joined(out.sequences, ids(50)))
    finally:
        os.umask(old)
    for path in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_entries_are_listed_and_removed(make: Make, tmp_path: Path) -> None:
    class Tokenizer:
        def decode(self, tokens: list[int]) -> str:
            return " ".join(map(str, tokens))

    store, document = make(tokenizer=Tokenizer()), ids(100)
    for seed in range(2):
        ask(store, joined(document, ids(30, seed)), 2)
        store.flush()
    left = next(tmp_path.glob("*/*/tokens")).parent.with_name("7" * 32)
    left.mkdir()
    (left / "part").write_bytes(b"123")
    nothing, *listed = sorted(entries.list_entries(tmp_path), key=lambda entry: entry.tokens)
    assert (nothing.tokens, nothing.own) == (0, 3)
    for entry in listed:
        assert (entry.tokens, entry.about["policy"]["name"]) == (131, "full")
        assert min(entry.own, entry.shared) > 0
        assert entry.words.startswith(" ".join(map(str, document[0, :4].tolist())))
    with entries.locked(tmp_path, 9.0):
        entries.clean(tmp_path)
    assert saved(tmp_path) == [131, 131]
    for entry in entries.list_entries(tmp_path):
        entries.remove(entry.path)
    assert ask(make(), joined(document, ids(30, 0)))[0] == 0
