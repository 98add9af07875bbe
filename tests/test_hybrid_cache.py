"""`HybridCache` as a drop-in: registration, refusals, hooks, `generate()`, its own methods."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from pools import used_blocks
from test_exactness import decode_logits
from tiny import DEVICE, FAMILIES, prompt, tiny_model
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, RoFormerConfig, T5Config

from hf_offload import ConstantPredictor, HybridCache, Scout

BLOCK = 16
COVERING: dict[str, Any] = {"budget": 512, "sinks": 16, "recent": 0, "block_size": BLOCK, "lookahead": "off"}
TIERS = {"one": {"tier": "one"}, "split": {"tier": "split", "resident": 4 * BLOCK}}


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def stock() -> PreTrainedModel:
    return tiny_model("llama", "sdpa")


def hooks_on(model: PreTrainedModel) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


# --- registration and fall back ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_hybrid_cache_it_is_sdpa_bit_for_bit(family: str) -> None:
    ours, theirs = tiny_model(family), tiny_model(family, "sdpa")
    ids, mask = prompt(3, 40)
    for padding in (None, mask):
        with torch.no_grad():
            assert torch.equal(ours(ids, attention_mask=padding).logits, theirs(ids, attention_mask=padding).logits)
    knobs: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "attention_mask": mask}
    static = {"cache_implementation": "static", "disable_compile": True}  # on a GPU it would be, whole and in pieces
    for cache in ({}, static, {"num_beams": 2}):
        assert torch.equal(ours.generate(ids, **knobs, **cache), theirs.generate(ids, **knobs, **cache))
    losses = []
    for model in (ours, theirs):
        model.train()
        loss = model(ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        losses.append((loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]))
    assert torch.equal(losses[0][0], losses[1][0])
    assert all(torch.equal(a, b) for a, b in zip(losses[0][1], losses[1][1], strict=True))


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "knobs", "named"),
    [
        (
            "scuot",
            {},
            "policy='scuot' is unknown; use one of fixed_hybrid, .* quest, scout, window",
        ),
        ("scout", {"bugdet": 5}, "bugdet: not a knob.*budget"),
        ("scout", {"budget": -1}, "budget=-1"),
        ("scout", {"budget": 64}, "budget=64 is less than"),
        ("scout", {"digest": "median"}, "digest='median' is not known; use one of submean, quest, mean"),
        ("scout", {"lookahead": "yes"}, "lookahead='yes'"),
        ("scout", {"join": "sum"}, "join='sum'"),
        ("scout", {"threshold": 2.0}, "threshold=2.0"),
        ("scout", {"recall": -3}, "recall=-3"),
        ("scout", {"recall": "nowhere.json"}, "nowhere.json.*hf-offload profile"),
        ("scout", {"synchronous_layers": (-1,)}, "synchronous_layers"),
        ("scout", {"block_size": 33}, "block_size=33"),
        ("scout", {"tier": "three"}, "tier='three'"),
        ("scout", {"resident": 32}, "resident=32"),
        ("scout", {"resident": 65536}, "resident=65536 .* use an integer of at most 32768 .* or a larger block_size"),
        ("scout", {"prefill_tile": 4}, "prefill_tile=4"),
        ("scout", {"threads": 0}, "threads=0"),
        ("window", {"sinks": -1}, "sinks=-1"),
        ("full", {"budget": 10}, "budget: not a knob"),
        ("full", {"host": "cpu"}, "host='cpu' is not known; use one of attend, fetch"),
        ("infinigen", {"alpha": 0}, "alpha=0 is not a distance of scores"),
        ("infinigen", {"partial": 1.5}, "partial=1.5 is not a share; use a number above 0 and of at most 1"),
        ("infinigen", {"lookahead": "off"}, "lookahead='off' is not True or False"),
        ("h2o", {"heavy": 1.5}, "heavy=1.5 is not a share of the cached tokens"),
        ("h2o", {"recent": True}, "recent=True is not a share of the cached tokens"),
        ("h2o", {"prompt_queries": 0}, "prompt_queries=0 is not a number of tokens"),
        ("h2o", {"cuda_graph": True}, "in a step of policy 'h2o' the host decides"),
        ("quest", {"budget": 8}, "budget=8 is less than the 16 tokens"),
        ("quest", {"digest": "median"}, "digest='median' is not known; use one of mean, quest, submean"),
        ("quest", {"join": "sum"}, "join='sum' is not known; use one of max, mean, raw"),
        ("quest", {"recent": -1}, "recent=-1"),
        (
            "fixed_hybrid",
            {"budget": 1.5},
            "budget=1.5 is not a share of the host's tokens; use a number of at least 0 and of at most 1",
        ),
        ("fixed_hybrid", {"digest": "median"}, "digest='median' is not known; use one of mean, quest, submean"),
        ("fixed_hybrid", {"local": -1}, "local=-1"),
        ("fixed_hybrid", {"cuda_graph": True}, "in a step of policy 'fixed_hybrid' the host decides"),
        ("fluxion", {}, "fluxion needs a predictor: predictor=PATH"),
        ("fluxion", {"predictor": ConstantPredictor(), "tau": 0.2}, "tau=0.2: the predictor is for tau=0.1; use that"),
        ("fluxion", {"predictor": ConstantPredictor(), "digest": "quest"}, "budgets are for 'submean'; use that"),
        ("fluxion", {"predictor": ConstantPredictor(), "block_size": 32}, "block_size=32: fluxion chooses runs"),
        ("hgca", {"window": 0}, "window=0 is not a number of tokens"),
        ("hgca", {"window": 64, "gpu_ratio": 0.5}, "window=64 and gpu_ratio=0.5 say the same"),
        (
            "hgca",
            {"gpu_ratio": 1.5},
            "gpu_ratio=1.5 is not a share of the tokens; use a number above 0 and of at most 1",
        ),
        ("hgca", {"beta": -1.0}, "beta=-1.0 is not a threshold"),
        ("hgca", {"beta": float("nan")}, "beta=nan is not a threshold"),
        ("hgca", {"alpha": 0.0}, "alpha=0.0 is not a share of a step"),
        ("hgca", {"beta": "1"}, "beta='1' is not a threshold"),
        ("hgca", {"gpu_ratio": "half"}, "gpu_ratio='half' is not a share of the tokens"),
        ("hgca", {"reevaluate": "no"}, "reevaluate='no' is not True or False"),
        ("hgca", {"group": "all"}, "group='all' is not known; use one of any, mean"),
        ("hgca", {"append": "last"}, "append='last' is not known; use one of max, mean"),
        ("hgca", {"append_queries": 0}, "append_queries=0 is not a number of tokens"),
        ("hgca", {"prompt_queries": 2.5}, "prompt_queries=2.5 is not a number of tokens"),
        ("hgca", {"sinks": -4}, "sinks=-4"),
        ("hgca", {"window": 64, "resident": 128}, "resident=128: what is resident is the window .* leave it out"),
        ("hgca", {"window": 99999}, "the window of 99999 tokens takes 3126 blocks of 32 .* more than 1024"),
        ("hgca", {"cuda_graph": True}, "in a step of policy 'hgca' the host decides"),
        (Scout(), {"budget": 10}, "budget: knobs belong into Scout"),
    ],
)
def test_wrong_knobs_are_named(llama: PreTrainedModel, policy: Any, knobs: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        HybridCache(llama, policy, **knobs)


def test_a_model_with_another_attention_is_refused(stock: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="set_attn_implementation"):
        HybridCache(stock)


def test_not_a_model_is_refused() -> None:
    with pytest.raises(TypeError, match="Transformers model"):
        HybridCache("gpt2")  # type: ignore[arg-type]


def test_an_attention_that_is_changed_later_is_noticed(llama: PreTrainedModel) -> None:
    model = tiny_model("llama")
    cache = HybridCache(model, **COVERING)
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), pytest.raises(RuntimeError, match="did not reach the 'hybrid_sparse'"):
        model(prompt(1, 20)[0], past_key_values=cache)


def test_a_family_that_ignores_the_setting_is_refused_or_noticed() -> None:
    config = RoFormerConfig(
        vocab_size=160,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        is_decoder=True,
    )

    def use() -> None:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="hybrid_sparse").eval().to(DEVICE)
        with torch.no_grad():
            model(prompt(1, 20)[0], past_key_values=HybridCache(model, **COVERING))

    with pytest.raises((ValueError, RuntimeError), match=r"hybrid_sparse|attn_implementation"):
        use()


def test_an_encoder_decoder_model_is_refused() -> None:
    from transformers import T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16, vocab_size=50))
    with pytest.raises(ValueError, match="encoder-decoder"):
        HybridCache(model)


def test_another_model_under_a_cache_is_noticed_and_nothing_is_lost(llama: PreTrainedModel) -> None:
    cache = HybridCache(llama, **COVERING)
    ids, _ = prompt(1, 40)
    with torch.no_grad():
        want = llama(ids, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
        with pytest.raises(ValueError, match="a model other than the one"):
            tiny_model("llama", seed=5)(want, past_key_values=cache)
        assert cache.get_seq_length() == 40
        got = llama(want, past_key_values=cache).logits
        again = HybridCache(llama, **COVERING)
        llama(ids, past_key_values=again)
        assert torch.equal(got, llama(want, past_key_values=again).logits)


def test_another_batch_is_refused_until_reset(llama: PreTrainedModel) -> None:
    cache = HybridCache(llama, **COVERING)
    with torch.no_grad():
        llama(prompt(1, 20)[0], past_key_values=cache)
        with pytest.raises(ValueError, match="reset"):
            llama(prompt(2, 20)[0], past_key_values=cache)
        cache.reset()
        assert cache.get_seq_length() == 0
        llama(prompt(2, 20)[0], past_key_values=cache)
    assert cache.get_seq_length() == 20


def test_gradients_are_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="no_grad"):
        llama(prompt(1, 20)[0], past_key_values=HybridCache(llama, **COVERING))


# --- hooks ------------------------------------------------------------------------------------------------------------


def test_hooks_are_shared_and_gone_with_the_last_cache() -> None:
    model = tiny_model("llama")
    assert hooks_on(model) == 0
    first = HybridCache(model, **COVERING)
    count = hooks_on(model)
    assert count > 0
    second = HybridCache(model, "full")
    assert hooks_on(model) == count
    del first
    gc.collect()
    assert hooks_on(model) == count
    del second
    gc.collect()
    assert hooks_on(model) == 0


def test_hooks_keep_neither_model_nor_cache_alive() -> None:
    import weakref

    model = tiny_model("llama")
    cache = HybridCache(model, **COVERING)
    with torch.no_grad():
        model(prompt(1, 20)[0], past_key_values=cache)
    gone = weakref.ref(model), weakref.ref(cache)
    del model, cache
    gc.collect()
    assert gone[0]() is None
    assert gone[1]() is None


# --- generate() -------------------------------------------------------------------------------------------------------

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.7},
    "beams": {"num_beams": 3},
    "beam sampling": {"num_beams": 3, "do_sample": True},
    "sequences": {"do_sample": True, "num_return_sequences": 2},
    "chunked prefill": {"prefill_chunk_size": 19},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(
    ("mode", "batch"),
    [
        pytest.param(mode, batch, marks=() if (batch == 1) == (mode == "prompt lookup") else pytest.mark.slow)
        for mode in MODES
        for batch in (1, 3)
        if batch == 1 or mode != "prompt lookup"  # which takes one row
    ],
)
def test_generate_gives_the_tokens_of_dynamic_cache(
    llama: PreTrainedModel, stock: PreTrainedModel, mode: str, batch: int, tier: str
) -> None:
    ids, mask = prompt(batch, 60)
    ids[:, 40:] = ids[:, 20:40]
    knobs: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "attention_mask": mask, **MODES[mode]}
    torch.manual_seed(0)
    want = stock.generate(ids, past_key_values=DynamicCache(config=stock.config), **knobs)
    torch.manual_seed(0)
    cache = HybridCache(llama, **COVERING, **TIERS[tier])
    got = llama.generate(ids, past_key_values=cache, **knobs)
    assert torch.equal(got, want)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_second_turn(llama: PreTrainedModel, stock: PreTrainedModel, batch: int, tier: str) -> None:
    ids, mask = prompt(batch, 50)
    turns = []
    for model, cache in (
        (stock, DynamicCache(config=stock.config)),
        (llama, HybridCache(llama, **COVERING, **TIERS[tier])),
    ):
        out, seen = ids, mask
        for turn in range(3):
            out = model.generate(out, attention_mask=seen, past_key_values=cache, max_new_tokens=9, do_sample=False)
            more = prompt(batch, 7, seed=turn + 5)[0].clamp(min=3)
            seen = torch.cat([seen, seen.new_ones(batch, out.shape[1] - seen.shape[1] + 7)], 1)
            out = torch.cat([out, more], 1)
        turns.append(out)
    assert torch.equal(*turns)


@pytest.mark.slow
def test_two_caches_of_one_model_do_not_meet(llama: PreTrainedModel) -> None:
    ids = prompt(1, 50)[0], prompt(1, 44, seed=9)[0]
    knobs: dict[str, Any] = {
        "tier": "split",
        "resident": 64,
        "budget": 96,
        "sinks": 16,
        "recent": 0,
        "block_size": BLOCK,
    }

    def run(interleaved: bool) -> list[list[int]]:
        caches = [HybridCache(llama, "scout", lookahead="attend", **knobs) for _ in ids]
        tokens: list[list[int]] = [[], []]
        with torch.no_grad():
            logits = [llama(x, past_key_values=c).logits[:, -1] for x, c in zip(ids, caches, strict=True)]
            order = [i for _ in range(20) for i in (0, 1)] if interleaved else [0] * 20 + [1] * 20
            for i in order:
                token = logits[i].argmax(-1, keepdim=True)
                tokens[i].append(int(token))
                logits[i] = llama(token, past_key_values=caches[i]).logits[:, -1]
        return tokens

    assert run(True) == run(False)


@pytest.mark.parametrize(
    "lookahead", [*(pytest.param(how, marks=pytest.mark.slow) for how in ("off", "select")), "attend"]
)
def test_the_same_inputs_give_the_same_tokens(llama: PreTrainedModel, lookahead: str) -> None:
    ids, mask = prompt(3, 150)
    runs = []
    for delay in (0.0, 0.002):
        knobs: dict[str, Any] = {"budget": 96, "sinks": 16, "recent": 16, "resident": 112, "tier": "split"}
        cache = HybridCache(
            llama, "scout", block_size=BLOCK, lookahead=lookahead, synchronous_layers=(0,), recall=2, **knobs
        )
        cache.settings.worker.delay = delay
        runs.append(decode_logits(llama, cache, ids, mask, None, steps=40))
        assert cache.stats().as_dict()["recalls"] > 0
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])


# --- the cache's own methods ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("drop", [1, 5, 16, 40])
def test_crop_forgets_exactly_the_last_tokens(llama: PreTrainedModel, tier: str, drop: int) -> None:
    ids, mask = prompt(2, 90)
    with torch.no_grad():
        cache = HybridCache(llama, **COVERING, **TIERS[tier])
        llama(ids[:, :80], attention_mask=mask[:, :80], past_key_values=cache)
        for i in range(80, 90):
            llama(ids[:, i : i + 1], attention_mask=mask[:, : i + 1], past_key_values=cache)
        cache.crop(0)
        cache.crop(-drop)
        assert cache.get_seq_length() == 90 - drop
        with pytest.raises(ValueError, match="positive"):
            cache.crop(3)
        other = prompt(2, 1, seed=4)[0]
        seen = torch.cat([mask[:, : 90 - drop], torch.ones_like(other)], 1)
        got = llama(other, attention_mask=seen, past_key_values=cache).logits
        fresh = HybridCache(llama, "full", block_size=BLOCK)
        llama(ids[:, : 90 - drop], attention_mask=mask[:, : 90 - drop], past_key_values=fresh)
        want = llama(other, attention_mask=seen, past_key_values=fresh).logits
    assert torch.allclose(got, want, atol=5e-5)


@pytest.mark.parametrize("tier", TIERS)
def test_rows_share_host_blocks_until_they_part(llama: PreTrainedModel, tier: str) -> None:
    ids, _ = prompt(1, 70)
    with torch.no_grad():
        cache = HybridCache(llama, **COVERING, **TIERS[tier])
        llama(ids, past_key_values=cache)
        token = torch.tensor([[7]], device=DEVICE)
        llama(token, past_key_values=cache)
        store = cache.layers[0].store
        before = used_blocks(store.pool)
        cache.batch_repeat_interleave(3)
        assert used_blocks(store.pool) == before
        tokens = torch.tensor([[5], [6], [7]], device=DEVICE)
        got = llama(tokens, past_key_values=cache).logits
        assert used_blocks(store.pool) <= before + 2  # two rows got a tail of their own
        cache.batch_select_indices(torch.tensor([2, 0]))
        got = torch.cat([got[[2, 0]], llama(tokens[:2], past_key_values=cache).logits], 1)
        for row, path in enumerate(([7, 5], [5, 6])):
            whole = torch.cat([ids, token, torch.tensor([path], device=DEVICE)], 1)
            want = llama(whole).logits[0, -2:]
            assert torch.allclose(got[row], want, atol=5e-5)


def test_statistics_are_a_table_and_a_dict(llama: PreTrainedModel) -> None:
    cache = HybridCache(llama, "scout", tier="split", resident=64, budget=64, sinks=16, recent=0, block_size=BLOCK)
    ids, _ = prompt(1, 200)
    llama.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False)
    total = cache.stats().as_dict()
    assert total["steps"] == 5
    assert 0 < total["cpu_ratio"] <= 1
    assert len(total["layers"][1]["cpu_ratio_by_step"]) == 5
    layer = cache.layers[0].store
    assert total["host_bytes"] == 4 * 13 * layer.pool.block_bytes
    assert total["resident_bytes"] == 4 * 2 * 64 * 2 * 16 * 4
    assert total["digest_bytes"] > 0
    text = cache.stats().table()
    assert "CPU ratio" in text
    assert "all" in text
    assert "missed" not in text  # nothing was checked
    line = str(cache.stats())
    assert line.startswith(f"HybridCache: 5 decode steps; {total['host_bytes'] / 2**20:.1f} MiB in host memory; ")
    assert "\n" not in line


def test_sink_and_softcap_follow_the_model(llama: PreTrainedModel) -> None:
    """Extra logits (attention sinks) and a softcap, as GPT-OSS and Gemma 2 pass them, in prompt and decode."""
    from hf_offload.attention.interface import hybrid_sparse_attention

    cache = HybridCache(llama, "full", tier="split", block_size=BLOCK, resident=64)
    layer = cache.layers[0]
    module = llama.model.layers[0].self_attn
    generator = torch.Generator().manual_seed(0)
    q, k, v = ((torch.randn(2, heads, 50, 16, generator=generator) * 2).to(DEVICE) for heads in (4, 2, 2))
    extra = torch.randn(4, generator=generator).to(DEVICE)
    got = []
    for start, stop in ((0, 30), (30, 44), *((i, i + 1) for i in range(44, 50))):
        tagged = layer.update(k[:, :, start:stop], v[:, :, start:stop])
        out = hybrid_sparse_attention(
            module, q[:, :, start:stop], *tagged, None, scaling=0.3, softcap=3.0, s_aux=extra, dropout=0.0
        )[0]
        got.append(out)
    scores = torch.einsum("bhgqd,bhkd->bhgqk", q.view(2, 2, 2, 50, 16), k).reshape(2, 4, 50, 50) * 0.3
    scores = (torch.tanh(scores / 3.0) * 3.0).masked_fill(
        ~torch.ones(50, 50, device=DEVICE).tril().bool(), float("-inf")
    )
    scores = torch.cat([scores, extra.view(1, 4, 1, 1).expand(2, -1, 50, 1)], -1).softmax(-1)[..., :-1]
    want = (scores.view(2, 2, 2, 50, 50) @ v[:, :, None]).view(2, 4, 50, 16).transpose(1, 2)
    assert torch.allclose(torch.cat(got, 1), want, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", ["off", "select", "attend"])
@pytest.mark.parametrize("length", [1000, 1024])
def test_growth_past_the_first_reservation(llama: PreTrainedModel, length: int, lookahead: str) -> None:
    cache = HybridCache(
        llama,
        "scout",
        synchronous_layers=(0,),
        **TIERS["one" if lookahead == "off" else "split"],
        **(COVERING | {"budget": 2048, "lookahead": lookahead}),
    )
    with torch.no_grad():
        ids = prompt(1, length + 40)[0]
        llama(ids[:, :length], past_key_values=cache)
        for i in range(length, length + 40):
            llama(ids[:, i : i + 1], past_key_values=cache)
    assert cache.get_seq_length() == length + 40


def test_a_failed_forward_leaves_no_token_behind(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = HybridCache(llama, **COVERING)
    ids, _ = prompt(1, 31)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("no room")

    with torch.no_grad():
        llama(ids[:, :30], past_key_values=cache)
        for module in (llama.model.layers[1].mlp, llama.model.norm):
            with monkeypatch.context() as patch:
                patch.setattr(module, "forward", fail)
                with pytest.raises(MemoryError):
                    llama(ids[:, 30:], past_key_values=cache)
            assert {layer.get_seq_length() for layer in cache.layers} == {30}
        got = llama(ids[:, 30:], past_key_values=cache).logits
        assert torch.allclose(got[:, -1], llama(ids).logits[:, -1], atol=5e-5)


def test_sliding_layers_that_cannot_undo_a_failure_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gemma3")
    cache = HybridCache(model, **COVERING)
    ids, _ = prompt(1, 31)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("no room")

    with torch.no_grad():
        model(ids[:, :30], past_key_values=cache)
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[0].mlp, "forward", fail)
            with pytest.raises(MemoryError):
                model(ids[:, 30:], past_key_values=cache)
        with pytest.raises(RuntimeError, match="reset"):
            model(ids[:, 30:], past_key_values=cache)
        cache.reset()
        model(ids, past_key_values=cache)


def test_dense_masks_of_single_tokens(llama: PreTrainedModel, stock: PreTrainedModel) -> None:
    ids, _ = prompt(2, 33)
    step = torch.ones(2, 1, 1, 31, dtype=torch.bool, device=DEVICE)
    step[0, ..., 4:9] = False
    step[1, ..., 20] = False
    hidden = torch.rand(2, 1, 1, 32) > 0.7
    additive = torch.zeros(2, 1, 1, 32).masked_fill_(hidden, torch.finfo(torch.float32).min).to(DEVICE)
    logits = []
    for model, cache in ((stock, DynamicCache()), (llama, HybridCache(llama, **COVERING))):
        with torch.no_grad():
            model(ids[:, :30], past_key_values=cache)
            masks = (step, additive, None)
            logits.append(
                [
                    model(ids[:, i : i + 1], attention_mask=mask, past_key_values=cache).logits
                    for i, mask in zip((30, 31, 32), masks, strict=True)
                ]
            )
            if model is llama:
                with pytest.raises(ValueError, match="bool mask"):
                    model(
                        ids[:, :1], attention_mask=torch.full((2, 1, 1, 34), -1.0, device=DEVICE), past_key_values=cache
                    )
                assert cache.get_seq_length() == 33
    assert all(torch.allclose(a, b, atol=5e-5) for a, b in zip(*logits, strict=True))


@pytest.mark.parametrize("tier", TIERS)
def test_a_mask_that_says_nothing_of_some_keys(llama: PreTrainedModel, stock: PreTrainedModel, tier: str) -> None:
    """Transformers masks what a short mask does not cover; so does the cache."""
    ids, _ = prompt(2, 40)
    short = torch.ones(2, 35, dtype=torch.long, device=DEVICE)
    for model, cache in ((stock, DynamicCache()), (llama, HybridCache(llama, **COVERING, **TIERS[tier]))):
        with torch.no_grad():
            logits = model(ids, attention_mask=short, past_key_values=cache).logits[:, :35]
            follow = model(ids[:, :1], attention_mask=short, past_key_values=cache).logits
            logits = torch.cat([logits, follow], 1)
        if model is stock:
            want = logits
    assert torch.allclose(logits, want, atol=5e-5)
