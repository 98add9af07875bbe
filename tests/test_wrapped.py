"""Wrapped or changed models: adapters, packed weights, autocast, train mode, wrong calls."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
from model.test_lookahead import check_predictions
from test_hybrid_cache import COVERING, TIERS
from tiny import DEVICE, feed, prompt, tiny_model
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from hf_offload import HybridCache, disable, enable
from hf_offload.cpu.kernels.prefill import faster_than_torch
from hf_offload.model.hooks import find_layers

AHEAD: dict[str, Any] = {
    **COVERING, **TIERS["split"], "lookahead": "attend", "synchronous_layers": (0,), "sinks": 0, "recent": 0,
    "block_size": 8, "resident": 32,
}  # fmt: skip
SELECT = AHEAD | {"lookahead": "select"}


def run(model: Any, cache: Any, batch: int = 2, **arguments: Any) -> Any:
    ids, mask = prompt(batch, 40)
    arguments = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True} | arguments
    return model.generate(ids, attention_mask=mask, past_key_values=cache, output_logits=True, **arguments)


class Packed(nn.Linear):
    """A projection as bitsandbytes makes them: a Linear whose weight is codes, which only its forward understands."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, plain.bias is not None, device=plain.weight.device)
        scale = plain.weight.detach().abs().amax(1, keepdim=True) / 127
        codes = (plain.weight.detach() / scale).round().to(torch.int8)
        self.register_buffer("scale", scale)
        self.weight = nn.Parameter(codes.view(-1, 1), requires_grad=False)
        self.bias = plain.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.weight.view(self.out_features, self.in_features) * self.scale
        return nn.functional.linear(hidden, weight, self.bias)


def pack(model: PreTrainedModel) -> PreTrainedModel:
    for layer in find_layers(model)[1]:
        for name, module in list(layer.named_modules()):
            if isinstance(module, nn.Linear):
                layer.set_submodule(name, Packed(module))
    return model


def lora(model: PreTrainedModel) -> Any:
    torch.manual_seed(5)
    targets = ["query_key_value"] if model.config.model_type == "gpt_neox" else ["q_proj", "v_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config).eval()


@pytest.mark.parametrize(
    ("family", "wrap"),
    [
        ("llama", lora),
        ("gpt_neox", pack),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (("llama", pack), ("gpt_neox", lora))),
    ],
)
def test_queries_are_predicted_by_the_wrapped_projections(family: str, wrap: Any) -> None:
    plain = run(tiny_model(family, "sdpa"), None)
    want = run(wrap(tiny_model(family, "sdpa")), None)
    assert not torch.equal(plain.logits[0], want.logits[0])  # the wrapping changes something
    inner = tiny_model(family)
    wrapped = wrap(inner)
    for owner in (inner, wrapped):
        cache = HybridCache(owner, **SELECT)
        assert torch.equal(run(wrapped, cache).sequences, want.sequences)
        assert cache.stats().as_dict()["selection_overlap"] > 0  # queries were predicted
    check_predictions(inner, DynamicCache(config=inner.config), adapter=family != "gpt_neox")


def test_adapters_come_and_go_under_an_enabled_model() -> None:
    inner = tiny_model("llama", "sdpa")
    want = [run(inner, None).sequences]
    enable(inner, **SELECT)
    wrapped = lora(inner)
    with_adapter = run(wrapped, None)
    assert type(with_adapter.past_key_values) is HybridCache
    with wrapped.disable_adapter():
        check_predictions(inner, DynamicCache(config=inner.config), adapter=True)
    check_predictions(inner, DynamicCache(config=inner.config), adapter=True)
    disable(wrapped)
    want.append(run(wrapped, None).sequences)
    assert torch.equal(with_adapter.sequences, want[1])
    assert not torch.equal(*want)
    merged = wrapped.merge_and_unload()
    enable(merged, **COVERING)
    assert torch.equal(run(merged, None).sequences, want[1])


def test_prompt_tuning_works_and_prefix_tuning_is_refused() -> None:
    options = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
    tuned = peft.get_peft_model(tiny_model("llama", "sdpa"), peft.PromptTuningConfig(**options)).eval()
    want = run(tuned, None, 1).sequences
    enable(tuned, **COVERING)
    got = run(tuned, None, 1)
    assert type(got.past_key_values) is HybridCache
    assert torch.equal(got.sequences, want)
    for attempt in (enable, HybridCache):
        with pytest.raises(ValueError, match="prefix tuning"):
            attempt(peft.get_peft_model(tiny_model("llama"), peft.PrefixTuningConfig(**options)))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_is_what_it_is_without(family: str, dtype: torch.dtype) -> None:
    """Against float32 it deviates no more than stock attention functions do under autocast."""
    ours, ids, mask = tiny_model(family), *prompt(2, 45)

    def decoded_logits(model: PreTrainedModel, cache: Any, autocast: bool) -> torch.Tensor:
        with torch.autocast(DEVICE, dtype, enabled=autocast):
            parts = feed(model, cache, ids, mask, (0, *range(40, 46)))
        return torch.stack([part[:, -1].float() for part in parts])

    def stock(attention: str, autocast: bool) -> torch.Tensor:
        model = tiny_model(family, attention)
        return decoded_logits(model, DynamicCache(config=model.config), autocast)

    exact, sdpa = stock("sdpa", False), stock("sdpa", True)
    rounding = max((other - exact).norm().item() for other in (sdpa, stock("eager", True)))
    for tier in TIERS.values():
        cache = HybridCache(ours, **COVERING, **tier)
        logits = decoded_logits(ours, cache, True)
        if DEVICE != "cpu" or not faster_than_torch(dtype):  # else prompts have a kernel of their own
            assert torch.equal(logits[0], sdpa[0])
        assert (logits - exact).norm() <= 1.25 * rounding
        assert cache.layers[-1].dtype == dtype
        if tier == TIERS["one"]:
            with torch.no_grad(), pytest.raises(ValueError, match="holds torch"):
                ours(ids[:, :1], past_key_values=cache)


def test_attention_weights_are_refused_and_hidden_states_given() -> None:
    model = tiny_model("llama")
    cache = HybridCache(model, **COVERING)
    with pytest.raises(ValueError, match="output_attentions"):
        run(model, cache, output_attentions=True)
    cache.reset()
    assert len(run(model, cache, output_hidden_states=True).hidden_states) == 8


@pytest.mark.parametrize(
    ("trained", "tokens"), [("", 20), ("model.layers.3.self_attn.q_proj", 1), ("model.layers.0.self_attn.v_proj", 20)]
)
def test_gradients_are_refused_wherever_they_begin(trained: str, tokens: int) -> None:
    model = tiny_model("llama").requires_grad_(False)
    model.get_submodule(trained).requires_grad_(True)
    cache = HybridCache(model, **COVERING)
    ids, _ = prompt(1, 40 + tokens)
    with torch.no_grad():
        model(ids[:, :40], past_key_values=cache)
    with pytest.raises(ValueError, match=r"torch\.no_grad\(\)"):
        model(ids[:, 40:], past_key_values=cache)
    assert cache.get_seq_length() == 40


def test_train_mode() -> None:
    """Without dropout train mode is eval mode; gradient checkpointing keeps caches away and is refused."""
    model = tiny_model("llama")
    want = run(model, DynamicCache(config=model.config)).sequences
    model.train()
    assert torch.equal(run(model, HybridCache(model, **COVERING)).sequences, want)
    model.gradient_checkpointing_enable()
    cache = HybridCache(model, **COVERING)
    with pytest.raises(ValueError, match="gradient checkpointing"):
        run(model, cache)
    model.eval()
    assert torch.equal(run(model, cache).sequences, want)


COMPILED = {
    "model.compile()": lambda model: model.compile(backend="eager"),
    "model.forward": lambda model: vars(model).update(forward=torch.compile(model.forward, backend="eager")),
    "the stack": lambda model: setattr(model, "model", torch.compile(model.model, backend="eager")),
    "layers": lambda model: [
        model.model.layers.__setitem__(i, torch.compile(layer, backend="eager"))
        for i, layer in enumerate(list(model.model.layers))
    ],
    "layers in place": lambda model: [layer.compile(backend="eager") for layer in model.model.layers],
    "parts": lambda model: [
        part.compile(backend="aot_eager")
        for layer in model.model.layers
        for part in (layer.input_layernorm, layer.self_attn.q_proj, layer.mlp)
    ],
}


@pytest.mark.parametrize(
    "compiled", ["parts", *(pytest.param(name, marks=pytest.mark.slow) for name in COMPILED if name != "parts")]
)
def test_what_is_compiled_gives_the_same_tokens(compiled: str) -> None:
    torch.compiler.reset()
    model = tiny_model("llama")
    caches = [HybridCache(model, **AHEAD)]
    want = run(model, caches[0], max_new_tokens=5)
    COMPILED[compiled](model)
    caches.append(HybridCache(model, **AHEAD))
    assert torch.equal(run(model, caches[1], max_new_tokens=5).sequences, want.sequences)
    first, second = (cache.stats().as_dict()["query_cosine"] for cache in caches)
    assert second == pytest.approx(first, abs=1e-6)


def filled(model: Any, inner: PreTrainedModel) -> HybridCache:
    cache = HybridCache(inner, "full")
    with torch.no_grad():
        model(prompt(1, 40)[0], past_key_values=cache)
    return cache


def test_a_cache_is_loaded_under_the_adapters_that_it_was_saved_with(tmp_path: Path) -> None:
    model = lora(tiny_model("llama"))
    model.add_adapter("other", model.peft_config["default"])
    inner = model.get_base_model()
    states: dict[str, Any] = {
        "default": lambda: model.set_adapter("default"),
        "other": lambda: model.set_adapter("other"),
        "none active": model.base_model.disable_adapter_layers,
        "merged": lambda: (model.base_model.enable_adapter_layers(), model.merge_adapter(["default"])),
    }
    for state, change in states.items():
        change()
        for other in [path.name for path in tmp_path.iterdir()]:
            with pytest.raises(ValueError, match=f"its adapters were .*{other}.*, here they are .*{state}"):
                HybridCache.load(tmp_path / other, inner)
        filled(model, inner).save(tmp_path / state)
        HybridCache.load(tmp_path / state, inner)


def test_offloaded_weights_are_compared_where_they_are(tmp_path: Path) -> None:
    model = tiny_model("llama")
    filled(model, model).save(tmp_path / "cache")
    for seed in (0, 1):
        other = tiny_model("llama", seed=seed)
        accelerate.disk_offload(other, tmp_path / f"weights {seed}", execution_device=torch.device(DEVICE))
        assert other.model.layers[0].mlp.up_proj.weight.is_meta
        with pytest.raises(ValueError, match="has other values") if seed else nullcontext():
            HybridCache.load(tmp_path / "cache", other)
