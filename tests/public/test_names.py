"""The public names: their list, their use in README, guide and examples, and policies in a user's file."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny import prompt, tiny_model
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
MODULES = {"hf_offload.lm_eval"}
"""Modules that are started with `python -m`, or imported for what they register."""


def test_names_are_frozen() -> None:
    assert sorted(hf_offload.__all__) == sorted(NAMES)
    namespace: dict[str, Any] = {}
    exec("from hf_offload import *", namespace)
    assert namespace.keys() >= NAMES


@pytest.mark.parametrize("name", sorted(NAMES - {"__version__"}))
def test_names_are_documented(name: str) -> None:
    made = getattr(hf_offload, name)
    docstring = made.__doc__ or ""
    # A dataclass without a docstring gets its signature for one.
    assert docstring.strip()
    assert not docstring.startswith(f"{name}(")


def python_of(path: Path) -> list[str]:
    """The Python in a file: all of it, or the cells of a notebook, or the blocks of a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return [text]
    if path.suffix == ".ipynb":
        cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        return [re.sub(r"^[%!].*$", "", cell, flags=re.M) for cell in cells]
    return re.findall(r"^ *```python[^\n]*\n(.*?)^ *```", text, re.M | re.S)


def names_of(source: str) -> set[str]:
    """Dotted names under `hf_offload` that a piece of Python imports or reads."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(re.sub(r"^ {4}", "", source, flags=re.M) if source.startswith("    ") else source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    return {name for name in found if re.fullmatch(r"hf_offload(\.\w+)*", name)}


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OF_THE_CODE = {"architecture.md", "design-notes.md", "design-notes-methods.md", "extending.md"}
EXAMPLES = [path for path in sorted((ROOT / "examples").rglob("*")) if path.suffix in (".py", ".ipynb")]


def allowed(name: str) -> bool:
    """Whether a dotted name is the package, a public name (or an attribute of one), or a module that is started."""
    head = ".".join(name.split(".")[:2])
    return name == "hf_offload" or head in MODULES or head.removeprefix("hf_offload.") in NAMES


def test_what_is_allowed() -> None:
    source = "from hf_offload.policies import Window\nimport hf_offload\nhf_offload.Window.name.x().y"
    assert names_of(source) == {
        "hf_offload", "hf_offload.Window", "hf_offload.Window.name", "hf_offload.Window.name.x",
        "hf_offload.policies.Window",
    }  # fmt: skip
    assert allowed("hf_offload.Window.name")
    assert allowed("hf_offload.lm_eval")
    assert not allowed("hf_offload.policies.Window")
    assert not allowed("hf_offload.attention")


@pytest.mark.parametrize(
    "path",
    [path for path in PAGES if path.name not in OF_THE_CODE] + EXAMPLES,
    ids=lambda path: path.stem,
)
def test_pages_and_examples_use_public_names(path: Path) -> None:
    named = {name for source in python_of(path) for name in names_of(source)}
    assert not [name for name in sorted(named) if not allowed(name)]


def test_pages_and_examples_are_found() -> None:
    used = [path for path in PAGES + EXAMPLES if any(map(names_of, python_of(path)))]
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


IDS = prompt(1, 300)[0]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """A user's file with a policy, imported."""
    file = tmp_path_factory.mktemp("own") / "my_policy.py"
    file.write_text(OWN, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("my_policy", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["my_policy"] = module  # dataclasses look up the module of a class
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


def read(model: PreTrainedModel, policy: str | Policy, **knobs: Any) -> HybridCache:
    """A cache that holds a prompt of 300 tokens but for the last one."""
    cache = HybridCache(model, policy, **knobs)
    with torch.no_grad():
        model(IDS[:, :-1], past_key_values=cache)
    return cache


def decode(model: PreTrainedModel, cache: HybridCache | None) -> list[int]:
    """Twelve tokens after the prompt."""
    out = model.generate(IDS, past_key_values=cache, max_new_tokens=12, do_sample=False)
    return out[0, IDS.shape[1] :].tolist()


def test_a_policy_of_ones_own(model: PreTrainedModel, own: ModuleType, tmp_path: Path) -> None:
    cache = read(model, "nearest_blocks", budget=128)
    fork = cache.fork()
    cache.save(tmp_path / "saved")
    loaded = HybridCache.load(tmp_path / "saved", model)
    caches = (cache, fork, loaded)
    assert [each.policy for each in caches] == [own.Nearest(budget=128)] * 3
    want = decode(model, read(model, Window(budget=128, sinks=0)))
    assert [decode(model, each) for each in caches] == [want] * 3
    # A smaller window gives other tokens, so the knob matters.
    assert decode(model, read(model, "nearest_blocks", budget=32)) != want


def test_a_policy_of_ones_own_serves_an_enabled_model(model: PreTrainedModel, own: ModuleType) -> None:
    enabled = tiny_model("llama", "sdpa")
    hf_offload.enable(enabled, "nearest_blocks", budget=128)
    assert decode(enabled, None) == decode(model, HybridCache(model, Window(budget=128, sinks=0)))


def saved_as(model: PreTrainedModel, policy: str | Policy, folder: Path, **knobs: Any) -> None:
    read(model, policy, **knobs).save(folder)


def test_an_import_registers_the_attention_alone_and_a_saved_cache_needs_its_policy(
    model: PreTrainedModel, own: ModuleType, tmp_path: Path
) -> None:
    """In a process that has not imported the user's file, and then has."""
    saved_as(model, "nearest_blocks", tmp_path / "saved")
    code = """
import _thread, sys
import torch, transformers
interfaces = transformers.AttentionInterface, transformers.AttentionMaskInterface
before = [set(each._global_mapping) for each in interfaces]
threads = _thread._count(), torch.get_num_threads()
import hf_offload
for each, names in zip(interfaces, before):
    assert set(each._global_mapping) - names == {"hybrid_sparse"}
assert (_thread._count(), torch.get_num_threads()) == threads
from tiny import tiny_model
model = tiny_model("llama", "hybrid_sparse")
try:
    hf_offload.HybridCache.load(sys.argv[1], model)
except ValueError as error:
    print(error)
exec(open(sys.argv[2]).read())
print(hf_offload.HybridCache.load(sys.argv[1], model).policy)
"""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "saved"), str(own.__file__)],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    refused, made = done.stdout.splitlines() or [done.stderr, ""]
    assert "policy='nearest_blocks' is unknown; use one of" in refused
    assert made == "Nearest(budget=96, sinks=0, dense='auto')"


def test_a_policy_that_is_not_registered_cannot_be_saved(model: PreTrainedModel, tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Unknown(Window):
        name = "unknown_to_all"

    with pytest.raises(ValueError, match=r"is not registered.*register_policy"):
        saved_as(model, Unknown(budget=96), tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    with pytest.raises(ValueError, match="policy='unknown_to_all' is unknown; use one of"):
        HybridCache(model, "unknown_to_all")


def named(name: str, kind: type = Window) -> Any:
    return dataclass(frozen=True)(type("Mine", (kind,), {"name": name}))


BELONGS = "name='{}' belongs to .*; choose another name"


@pytest.mark.parametrize(
    ("thing", "error", "said"),
    [
        *((named(name), ValueError, BELONGS.format(name)) for name in ("scout", "sparse_fetch", "nearest_blocks")),
        (named("Nearest Blocks"), ValueError, "is no lower-case identifier"),
        (
            type("Thawed", (Window,), {"name": "thawed"}), TypeError,
            r"is not a frozen dataclass; decorate it with @dataclass\(frozen=True\)",
        ),
        *(
            (thing, TypeError, r"is no class that derives from hf_offload\.Policy")
            for thing in (named("other", object), "name", Window())
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_registered(own: ModuleType, thing: Any, error: type[Exception], said: str) -> None:
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
