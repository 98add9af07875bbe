"""The import rules of `docs/architecture.md`, and the names of files in docs and docstrings."""

from __future__ import annotations

import ast
import graphlib
import re
from pathlib import Path

import pytest

import drawings
import hf_offload
from hf_offload.policies.registry import POLICIES

PACKAGE = Path(hf_offload.__file__).parent
CONTRACT = {"policies.base"}
MAY_IMPORT = {
    "cpu": {"cpu"},
    "gpu": {"gpu"},
    "cache": {"cache", "cpu", "gpu", *CONTRACT},
    "policies": {"policies", "cache.digests"},
    "policies/fluxion": {
        "policies.base",
        "policies.fluxion",
        "cache",
        "cpu",
        "gpu",
        "attention.cpu_partial",
        "attention.merge",
    },
    "policies/fluxion/training": {"policies.fluxion", "attention", "cache", "assets", "hybrid_cache"},
    "policies/hgca": {"policies.base", "policies.hgca", "cache", "cpu", "gpu", "attention.cpu_partial"},
    "attention": {"attention", "cache", "cpu", "gpu", *CONTRACT},
}
ALL_MAY_IMPORT = {"fields", "knobs", "scores"}
"""The checks of what files hold and of users' values, and what a model's scores are: they import nothing else of the
package."""


NAMED = {("policies.base", "attention.step"), ("policies.base", "cache.layer")}
"""For type checkers alone: the contract names what a policy is given."""


def imports_of(path: Path) -> dict[str, bool]:
    """Modules of this package that a file imports, and whether for type checkers alone."""
    return {name.replace("/", "."): types for name, types in drawings.imports_of(path).items()}


def own_imports(path: Path) -> set[str]:
    """Modules of this package that a file imports when it runs."""
    return {name for name, types in imports_of(path).items() if not types}


def test_no_circle_of_modules() -> None:
    """What is imported for type checkers alone counts, too."""
    files = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    below = {name: {found for found in imports_of(path) if (name, found) not in NAMED} for name, path in files.items()}
    assert len(list(graphlib.TopologicalSorter(below).static_order())) >= len(files)  # or CycleError
    assert all(imports_of(files[name])[found] for name, found in NAMED)


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_rules(path: Path) -> None:
    parts = path.relative_to(PACKAGE).parts
    folders = ["/".join(parts[:depth]) for depth in range(len(parts) - 1, 0, -1)]
    allowed = next(MAY_IMPORT[folder] for folder in folders if folder in MAY_IMPORT) | ALL_MAY_IMPORT
    for module in own_imports(path):
        assert any(module == rule or module.startswith(rule + ".") for rule in allowed), module


def test_nobody_outside_policies_asks_for_the_type_of_a_policy() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] == "policies" or path.name == "__init__.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                names = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
                assert not names & {cls.__name__ for cls in POLICIES.values()}, f"{path.name}:{node.lineno}"


@pytest.mark.parametrize("page", ["architecture.md", "design-notes.md"])
def test_the_pages_name_files_that_exist(page: str) -> None:
    text = (PACKAGE.parent / "docs" / page).read_text(encoding="utf-8")
    files = [
        file for folder in ("docs", "hf_offload", "tests", "eval") for file in (PACKAGE.parent / folder).rglob("*.py")
    ]
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    assert len(named) > 40
    assert not [name for name in named if not any(str(file).endswith("/" + name) for file in files)]


def test_docstrings_name_modules_that_exist() -> None:
    modules = {".".join(file.relative_to(PACKAGE).with_suffix("").parts) for file in PACKAGE.rglob("*.py")}
    stale = []
    for file in PACKAGE.rglob("*.py"):
        for name in re.findall(r"`((?:attention|cache|cpu|gpu|policies)(?:\.\w+)+)`", file.read_text(encoding="utf-8")):
            parts = name.split(".")
            if not any(".".join(parts[:depth]) in modules for depth in range(2, len(parts) + 1)):
                stale.append(f"{file.name}: {name}")
    assert not stale
