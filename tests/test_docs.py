"""What README and docs say of files, knobs and options, held against these."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import typer

import hf_offload.cli
from common import command
from hf_offload import HybridCache
from hf_offload.policies import POLICIES

ROOT = Path(__file__).parent.parent
PAGES = {
    path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_whole(page: Path) -> None:
    """A row that stands behind an empty line is no row of a table."""
    lines = PAGES[page].split("\n")
    for before, line, after in zip(["", *lines[:-1]], lines, [*lines[1:], ""], strict=True):
        if line.startswith("|") and not before.startswith("|"):
            assert re.fullmatch(r"\|([ :-]+\|)+", after), line


def imported(name: str, seen: set[str]) -> set[str]:
    """The packages that a module of eval/ imports when it is loaded, and those that its own ones do."""
    path = ROOT / "eval" / name.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.exists():
        return {name.partition(".")[0]}
    if name in seen:
        return set()
    seen.add(name)
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            found |= imported(str(node.module), seen)
        elif isinstance(node, ast.Import):
            found |= {package for alias in node.names for package in imported(alias.name, seen)}
    return found


def test_the_demo_brings_what_scripts_need() -> None:
    """Scripts that the README starts in the demo's environment do without what `.[eval]` adds to it."""
    listed = re.findall(r"^\.venv/bin/python eval/(\w+)\.py", PAGES[ROOT / "README.md"], re.M)
    assert len(listed) > 12
    extra = {"datasets", "lm_eval", "nltk", "rouge_score", "scipy"}
    assert extra & imported("needle", set())
    assert not {script: found for script in listed if (found := extra & imported(script, set()))}


def test_every_result_is_told_of() -> None:
    told = "".join(PAGES.values())
    files = [path.stem for path in (ROOT / "eval" / "results").iterdir() if path.suffix in (".csv", ".json", ".md")]
    assert len(files) > 30
    assert not [file for file in files if not re.search(rf"\b{file}\b", told)]


@pytest.mark.parametrize("owner", ["HybridCache", *POLICIES])
def test_knobs_are_told_of_with_their_defaults(owner: str) -> None:
    page = "index" if owner == "HybridCache" else owner
    told = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", PAGES[ROOT / "docs" / "policies" / f"{page}.md"], re.M))
    if owner == "HybridCache":
        parameters = inspect.signature(HybridCache.__init__).parameters.values()
        wanted = {one.name: one.default for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}
    else:
        wanted = {one.name: one.default for one in dataclasses.fields(POLICIES[owner]) if one.init}
    assert {knob: ast.literal_eval(default) for knob, default in told.items()} == wanted


def commands() -> list[tuple[str, str]]:
    """Scripts and commands that the pages name with options, and these."""
    found = set()
    for text in PAGES.values():
        for name, rest in re.findall(r"(eval/\w+\.py|hf-offload [\w-]+)( [^`\n#]*)", text):
            found |= {(name, option) for option in re.findall(r"(?<= )--[a-z-]+", rest)}
    return sorted(found)


def test_options_exist() -> None:
    named = commands()
    assert len(named) > 40
    known: dict[str, set[str]] = {}
    group = typer.main.get_command(hf_offload.cli.app)
    for name in {name for name, _ in named}:
        if name.startswith("eval/"):
            script = pytest.importorskip(name[5:-3], exc_type=ImportError, reason="needs hf-offload[eval]")
            made = typer.main.get_command(command(script.main))
        else:
            made = group.commands[name.partition(" ")[2]]  # type: ignore[attr-defined]
        known[name] = {"--help"} | {option for one in made.params for option in (*one.opts, *one.secondary_opts)}
    assert not [(name, option) for name, option in named if option not in known[name]]
