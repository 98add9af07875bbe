"""The import rules of `docs/architecture.md`, and the names of files in docs and docstrings."""

from __future__ import annotations

import ast
import graphlib
import re
from pathlib import Path

import drawings
import hf_offload
from hf_offload.policies.registry import POLICIES

PACKAGE = Path(hf_offload.__file__).parent
CONTRACT = {"policies.base"}
MAY_IMPORT = {
    "cpu": {"cpu"},
    "gpu": {"gpu"},
    "blocks": {"blocks", "cpu", "gpu"},
    "cache": {"cache", "blocks", "cpu", "gpu", *CONTRACT},
    "files": {"files", "cache", "blocks", "cpu"},
    "policies": {"policies", "blocks.digests"},
    "policies/fluxion": {
        "policies.base", "policies.fluxion", "cache", "blocks", "cpu", "gpu", "files.fingerprint", "files.tensor_file",
        "attention.host_partial", "attention.merge",
    },
    "policies/hgca": {
        "policies.base", "policies.hgca", "cache", "blocks", "cpu", "gpu", "attention.draw", "attention.host_partial",
    },
    "attention": {"attention", "model", "cache", "blocks", "cpu", "gpu", *CONTRACT},
    "model": {"model", "attention.decode", "cache", "blocks", *CONTRACT},
    "graph": {"graph", "attention", "model", "cache", "blocks", "cpu", "gpu", *CONTRACT},
    "serving": {"serving", "prefix_store", "model.hooks"},
    "tools/training": {
        "tools", "policies.fluxion", "attention.merge", "model.hooks", "blocks.digests", "files.fingerprint",
        "files.tensor_file", "hybrid_cache",
    },
    "tools": {
        "tools", "hybrid_cache", "enable", "model", "graph", "cache", "blocks", *CONTRACT, "policies.registry",
        "policies.fluxion.predictor",
    },
}  # fmt: skip
ALL_MAY_IMPORT = {"fields", "knobs", "scores"}
"""The checks of what files hold and of users' values, and what a model's scores are: they import nothing else of the
package."""

CORE = ("attention", "model", "graph", "cache", "blocks", "files", "cpu", "gpu")
TOP = {"policies.base", "policies.registry"}
"""Modules of policies that those outside all folders may import."""
GIVEN = {"__init__": {"policies.fluxion.predictor"}}
"""And these: users give such predictors."""
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


def test_imports_follow_the_rules() -> None:
    """In the core what is imported for type checkers alone counts, too."""
    wrong = []
    for path in sorted(PACKAGE.glob("*/**/*.py")):
        parts = path.relative_to(PACKAGE).parts
        folders = ["/".join(parts[:depth]) for depth in range(len(parts) - 1, 0, -1)]
        allowed = next(MAY_IMPORT[folder] for folder in folders if folder in MAY_IMPORT) | ALL_MAY_IMPORT
        for module in imports_of(path) if parts[0] in CORE else own_imports(path):
            if not any(module == rule or module.startswith(rule + ".") for rule in allowed):
                wrong.append(("/".join(parts), module))
    assert not wrong


def test_modules_outside_the_folders_know_no_method() -> None:
    for path in sorted(PACKAGE.glob("*.py")):
        found = {module for module in imports_of(path) if module.split(".")[0] == "policies"}
        assert found <= TOP | GIVEN.get(path.stem, set()), path.name


def kinds(cls: type) -> set[str]:
    """Names of the classes below a class."""
    return {cls.__name__ for cls in cls.__subclasses__()}.union(*map(kinds, cls.__subclasses__()))


def asks_for_a_method(call: ast.Call | ast.Compare, methods: set[str]) -> bool:
    """Whether an expression depends on which policy or state there is: by its type, name or attributes."""
    if isinstance(call, ast.Compare):
        sides = map(ast.unparse, (call.left, *call.comparators))
        return any(re.search(r"(policy|state)(\.|\)\.__)name", side) for side in sides)
    asked = getattr(call.func, "id", "")
    if asked in ("getattr", "hasattr"):
        return re.search(r"(policy|state)$", ast.unparse(call.args[0])) is not None
    named = {getattr(node, "id", getattr(node, "attr", "")) for arg in call.args[1:] for node in ast.walk(arg)}
    return asked in ("isinstance", "issubclass") and bool(named & methods)


def test_nobody_outside_policies_asks_which_method_it_is() -> None:
    methods = {cls.__name__ for cls in POLICIES.values()} | kinds(hf_offload.LayerState)
    assert {"Scout", "HGCA", "TokenMass", "FluxionState"} <= methods

    def asking(source: str) -> list[int]:
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call | ast.Compare)]
        return [node.lineno for node in nodes if asks_for_a_method(node, methods)]

    for source in (
        "isinstance(a, x.Scout)",
        "hasattr(a.state, 'b')",
        "a.policy.name == 'b'",
        "type(state).__name__ == b",
    ):
        assert asking(source)
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] != "policies" and path.name != "__init__.py":
            assert not asking(path.read_text(encoding="utf-8")), path.name


ROOT = PACKAGE.parent
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "README.md"]


def test_pages_name_files_and_folders_that_exist() -> None:
    """Paths may be those from any folder on: `blocks/digests.py`, `digests.py`."""
    paths = ["/hf_offload_cli.py"] + [
        "/" + str(path.relative_to(ROOT)) + "/" * path.is_dir()
        for folder in ("docs", "examples", "hf_offload", "tests", "eval")
        for path in (ROOT / folder, *(ROOT / folder).rglob("*"))
    ]
    texts = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
    for page, text in texts.items():
        named = set(map("".join, re.findall(r"`((?:[\w.-]+/)*\w+\.py)[`:]|`((?:\w+/)+)`", text)))
        assert not [name for name in named if not any(path.endswith("/" + name) for path in paths)], page
        assert page != "docs/architecture.md" or len(named) > 40
    rooms = [path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]
    assert [room for room in rooms if f"`{room}/`" not in texts["docs/architecture.md"]] == []


def test_docstrings_name_modules_that_exist() -> None:
    modules = {".".join(file.relative_to(PACKAGE).with_suffix("").parts) for file in PACKAGE.rglob("*.py")}
    stale = []
    for file in PACKAGE.rglob("*.py"):
        for name in re.findall(
            r"`((?:attention|model|graph|cache|blocks|files|tools|cpu|gpu|policies)(?:\.\w+)+)`",
            file.read_text(encoding="utf-8"),
        ):
            parts = name.split(".")
            if not any(".".join(parts[:depth]) in modules for depth in range(2, len(parts) + 1)):
                stale.append(f"{file.name}: {name}")
    assert not stale
