"""`hf-offload plan`: planned memory against a cache's."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tiny import prompt, tiny_model
from transformers import DeepseekV3Config, MambaConfig, T5Config
from typer.testing import CliRunner

from hf_offload import ConstantPredictor, HybridCache
from hf_offload.blocks.memory import available_bytes, size_text
from hf_offload.tools import assets
from hf_offload.tools.plan import memory_of, most_context, most_rows, parse_setting, plan_table, shape_of
from hf_offload_cli import app

SMALL: dict[str, Any] = {"budget": 96, "sinks": 16}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {"resident": 64, "block_size": 16}),
    "window": ("window", {"budget": 128}),
    "scout": ("scout", {**SMALL, "recent": 16, "block_size": 16}),
    "scout, int8": ("scout", {**SMALL, "recent": 16, "block_size": 16, "host_dtype": "int8", "prefill_tile": 64}),
    "scout, budget in bytes": ("scout", {**SMALL, "recent": 0, "block_size": 16, "device_budget": "600KiB"}),
    "policy quest": ("quest", {"budget": 64}),
    "infinigen": ("infinigen", {"partial": 0.5}),
    "h2o": ("h2o", {"block_size": 16, "heavy": 0.2}),
    "hgca": ("hgca", {"window": 60, "block_size": 16}),
    "hgca, a share": ("hgca", {"gpu_ratio": 0.3, "block_size": 16}),
    "fixed_hybrid": ("fixed_hybrid", {"sinks": 16, "local": 32}),
    "fluxion": ("fluxion", {"predictor": ConstantPredictor(sinks=16, local=32)}),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("family", "setting", "rows", "length"),
    [
        *(("llama", setting, 2, 301) for setting in SETTINGS),
        ("gemma3", "scout", 3, 43),
        pytest.param("opt", "scout, int8", 1, 1001, marks=pytest.mark.slow),
        ("gpt_neox", "hgca", 1, 1003),
    ],
)
def test_a_cache_takes_what_was_planned(family: str, setting: str, rows: int, length: int) -> None:
    model = tiny_model(family)
    policy, options = SETTINGS[setting]
    planned = memory_of(shape_of(model.config, torch.float32), policy, options, context=length, batch=rows)
    # A job that weighs a prompt compiles its kernels first, which takes minutes where hardly any CPU is left.
    cache = HybridCache(model, policy, tier="split", timeout=600.0, **options)
    ids = prompt(rows, length)[0]
    with torch.no_grad():
        model(ids, past_key_values=cache)
        before = cache.stats().as_dict()
        model(ids[:, :1], past_key_values=cache)  # within the last block
    after = cache.stats().as_dict()
    assert (before["host_bytes"], before["digest_bytes"]) == (planned.host_bytes, planned.digest_bytes)
    assert (after["resident_bytes"], after["salience_bytes"]) == (planned.resident_bytes, planned.salience_bytes)
    assert after["device_bytes"] == planned.device


def test_one_memory_has_all_on_the_host() -> None:
    model = tiny_model("llama")
    shape, cache = shape_of(model.config, torch.float32), HybridCache(model, "scout", tier="one")
    found = memory_of(shape, "scout", {}, context=300, batch=1, two_memories=False)
    with torch.no_grad():
        model(prompt(1, 300)[0], past_key_values=cache)
    assert found.device == found.tile_bytes == 0
    assert found.host == cache.stats().as_dict()["device_bytes"]
    table = plan_table(shape, [("scout", {})], context=300, batch=1, device=None)
    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert cells["keys and values"][1] == size_text(found.host_bytes + found.stock_bytes)
    assert cells["with weights"][1] == size_text(found.host + shape.weights)


def test_rows_that_fit() -> None:
    shape, setting = shape_of(tiny_model("llama").config, torch.float32), ("scout", {"budget": 256})

    def taken(rows: int) -> int:
        found = memory_of(shape, *setting, context=900, batch=rows)
        return shape.weights + found.device + found.tile_bytes

    assert most_rows(shape, setting, 900, taken(37)) == 37
    assert most_rows(shape, setting, 900, taken(37) - 1) == 36
    assert most_rows(shape, setting, 900, shape.weights) == 0
    few = ("scout", {"budget": 256, "device_budget": "1MiB"})  # its share is too small from some rows on
    assert 0 < most_rows(shape, few, 900, 1 << 40) < 8


def test_settings_are_read() -> None:
    assert parse_setting("full") == ("full", {})
    text = "scout:budget=1024, gpu_ratio=0.1,reevaluate=False,digest=quest,device_budget=2GiB"
    knobs = {"budget": 1024, "gpu_ratio": 0.1, "reevaluate": False, "digest": "quest", "device_budget": "2GiB"}
    assert parse_setting(text) == ("scout", knobs)
    for wrong in ("scout:1024", "scout:budget", "scout:=3"):
        with pytest.raises(ValueError, match="write it like scout:budget=1024,recall=8"):
            parse_setting(wrong)


def test_models_that_are_not_served() -> None:
    for config, told in (
        (T5Config(), "single stacks"),
        (DeepseekV3Config(), "keys and values are compressed"),
        (MambaConfig(num_hidden_layers=2), "no layer is plain full attention"),
    ):
        with pytest.raises(ValueError, match=told):
            shape_of(config, torch.float32)


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*words: str) -> str:
        result = CliRunner().invoke(app, ["plan", *words], env={"COLUMNS": "200"})
        return re.sub(r"[\s│]+", " ", result.output)

    monkeypatch.setattr(assets, "load_config", lambda name: tiny_model("llama").config)
    said = run("--context", "1k", "--batch", "2", "--policy", "scout:budget=256", "--device-memory", "4MiB")
    assert "2 rows of 1,024 tokens" in said
    kv = 2 * 1024 * 4 * 2 * 2 * 16 * 4  # rows, tokens, layers, K and V, heads, channels, bytes
    assert f"DynamicCache all {kv / 2**20:.1f} MiB" in said
    assert "scout:budget=256 384 " in said
    device = "--device-memory=4MiB"
    assert "resident=400: what is resident is the window" in run("--policy", "hgca:gpu_ratio=0.1,resident=400", device)
    assert "fixed_hybrid:digest=submean takes" in run("--policy", "fluxion:predictor=there.safetensors", device)


def test_what_no_cache_takes_is_not_planned() -> None:
    shape = shape_of(tiny_model("llama").config, torch.float32)
    for setting, told in (
        ("full:block_size=24", "block_size=24 is not supported"),
        ("full:host_dtype=int4", "host_dtype='int4' is not supported"),
        ("full:prefill_tile=many", "prefill_tile='many' is not a number of tokens"),
        ("scout:tier=one,threads=2", "threads, tier: not part of a plan; leave it out"),
        ("scout:tiers=one", "tiers: not a knob of policy 'scout'"),
    ):
        with pytest.raises(ValueError, match=told):
            memory_of(shape, *parse_setting(setting), context=64, batch=1)
    options = {"predictor": ConstantPredictor(), "schedule": "length"}
    assert memory_of(shape, "fluxion", options, context=64, batch=1).device > 0
    with pytest.raises(ValueError, match="schedule='length' shares work with a device"):
        memory_of(shape, "fluxion", options, context=64, batch=1, two_memories=False)


def test_the_largest_context_that_fits() -> None:
    config, setting, memory = assets.load_config(), ("scout", {"host_dtype": "int8"}), 1 << 30
    shape, most = shape_of(config, torch.float32), most_context(config, torch.float32, setting, memory)
    sizes = [memory_of(shape, *setting, context=n, batch=1, two_memories=False).host for n in (most, most + 1)]
    assert sizes[0] <= memory < sizes[1]
    assert most_context(config, torch.float32, setting, 0) == 0
    assert most_context(MambaConfig(), torch.float32, setting, 0) == 2**31 - 1
    assert 0 < available_bytes() <= 1 << 60
