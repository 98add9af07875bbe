"""The public names: their list, their use in README, guide and examples, and a policy in a user's file."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny import prompt
from transformers import PreTrainedModel

import hf_offload
from hf_offload import HybridCache, Policy, Window, register_policy
from hf_offload.policies.registry import POLICIES

ROOT = Path(__file__).parent.parent.parent
NAMES = {
    "ConstantPredictor", "Field", "FixedHybrid", "Fluxion", "Full", "H2O", "HGCA", "HybridCache", "InfiniGen",
    "LayerState", "LinearHandle", "Partial", "Plan", "Policy", "PrefixStore", "Quest", "Requirements", "Scout", "Stats",
    "Window", "WorkerError", "__version__", "demo_text", "disable", "enable", "enabled", "fast_linear", "hide_number",
    "load_demo_model", "register_policy",
}  # fmt: skip
OF_THE_CODE = {"architecture.md", "design-notes.md", "design-notes-methods.md", "extending.md"}


def test_names_are_frozen_and_documented() -> None:
    assert sorted(hf_offload.__all__) == sorted(NAMES)
    namespace: dict[str, Any] = {}
    exec("from hf_offload import *", namespace)
    for name in NAMES - {"__version__"}:
        docstring = namespace[name].__doc__ or ""
        # A dataclass without a docstring gets its signature for one.
        assert docstring.strip(), name
        assert not docstring.startswith(f"{name}("), name


def test_pages_and_examples_use_public_names() -> None:
    guide = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name not in OF_THE_CODE]
    examples = [path for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".ipynb")]
    used = set()
    for path in (ROOT / "README.md", *guide, *examples):
        text = path.read_text(encoding="utf-8")
        code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)) if path.suffix == ".md" else text
        imported = ", ".join(re.findall(r"from hf_offload import \(?([\w, ]+)", code))
        named = {*re.findall(r"\bhf_offload\.(\w+)", code), *filter(None, imported.split(", "))}
        assert named <= {*NAMES, "lm_eval"}, path
        used |= {path} if named else set()
    assert len(used) > 10


OWN = '''
from dataclasses import dataclass

from hf_offload import Window, register_policy


@register_policy
@dataclass(frozen=True)
class Nearest(Window):
    """The newest tokens alone."""

    name = "nearest_blocks"
    budget: int = 96
    sinks: int = 0
'''


@pytest.fixture(scope="module")
def own() -> ModuleType:
    """A user's file with a policy, imported."""
    module = sys.modules["my_policy"] = ModuleType("my_policy")  # dataclasses look up the module of a class
    exec(OWN, module.__dict__)
    return module


@torch.no_grad()
def saved_as(model: PreTrainedModel, policy: str | Policy, folder: Path, **knobs: Any) -> HybridCache:
    """A cache that holds a prompt, in a folder, too."""
    cache = HybridCache(model, policy, **knobs)
    model(prompt(1, 300)[0], past_key_values=cache)
    cache.save(folder)
    return cache


def test_a_saved_cache_needs_its_policy(model: PreTrainedModel, own: ModuleType, tmp_path: Path) -> None:
    saved_as(model, "nearest_blocks", tmp_path / "saved")
    with pytest.MonkeyPatch.context() as elsewhere:  # where nobody has imported the user's file
        elsewhere.delitem(POLICIES, "nearest_blocks")
        with pytest.raises(ValueError, match="policy='nearest_blocks' is unknown; use one of"):
            HybridCache.load(tmp_path / "saved", model)
    assert HybridCache.load(tmp_path / "saved", model).policy == own.Nearest()
    unknown = dataclass(frozen=True)(type("Unknown", (Window,), {"name": "unknown_to_all"}))
    with pytest.raises(ValueError, match=r"is not registered.*register_policy"):
        saved_as(model, unknown(budget=96), tmp_path / "unknown")
    assert not (tmp_path / "unknown").exists()


def named(name: str, kind: type = Window) -> Any:
    return dataclass(frozen=True)(type("Mine", (kind,), {"name": name}))


def test_what_cannot_be_registered(own: ModuleType) -> None:
    no_class = r"is no class that derives from hf_offload\.Policy"
    for thing, error, said in (
        (named("scout"), ValueError, "name='scout' belongs to .*; choose another name"),
        (named("sparse_fetch"), ValueError, "name='sparse_fetch' belongs to .*; choose another name"),
        (named("nearest_blocks"), ValueError, "name='nearest_blocks' belongs to .*; choose another name"),
        (named("Nearest Blocks"), ValueError, "is no lower-case identifier"),
        (type("Thawed", (Window,), {"name": "thawed"}), TypeError, r"decorate it with @dataclass\(frozen=True\)"),
        (named("other", object), TypeError, no_class), ("name", TypeError, no_class), (Window(), TypeError, no_class),
    ):  # fmt: skip
        with pytest.raises(error, match=said):
            register_policy(thing)
    assert register_policy(own.Nearest) is own.Nearest  # again is no mistake


def test_sparse_fetch_is_quest(model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, and in files of earlier versions."""
    made = HybridCache(model, "sparse_fetch", budget=64)
    assert made.policy == hf_offload.Quest(budget=64) == HybridCache(model, "quest", budget=64).policy
    with monkeypatch.context() as earlier:
        earlier.setattr(hf_offload.Quest, "name", "sparse_fetch")
        earlier.setitem(POLICIES, "sparse_fetch", hf_offload.Quest)
        saved_as(model, hf_offload.Quest(budget=64), tmp_path / "saved")
    assert b'"sparse_fetch' in (tmp_path / "saved" / "cache.safetensors").read_bytes().replace(b"\\", b"")
    assert HybridCache.load(tmp_path / "saved", model).policy == hf_offload.Quest(budget=64)
