"""README and guide: runnable code blocks, existing commands, options and links."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import typer
import yaml
from letters import letters
from tiny import tiny_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import drawings
import hf_offload
import hf_offload.cli
from common import command
from hf_offload import HybridCache
from hf_offload.policies.registry import POLICIES

ROOT = Path(__file__).parent.parent.parent
OF_THE_CODE = {"architecture.md", "design-notes.md", "design-notes-methods.md"}
GUIDE = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name not in OF_THE_CODE]
PAGES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *GUIDE)}


def name_of(page: Path) -> str:
    """A page as tests are named by it."""
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


class Block(NamedTuple):
    """A fenced block of a page."""

    line: int
    language: str
    marked: bool
    """Whether the comment `<!--no-run: gpu-->` or `<!--no-run: hub-->` stands above."""
    text: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    text = PAGES[page]
    fence = re.compile(r"^(<!--no-run: (?:gpu|hub)-->\n)?( *)```(\w*)\n(.*?)^ *```$", re.M | re.DOTALL)
    return [
        Block(text.count("\n", 0, found.start(4)) + 1, found[3], bool(found[1]), found[4])
        for found in fence.finditer(text)
    ]


RUN = {page: [block for block in blocks(page) if block.language == "python" and not block.marked] for page in PAGES}
CASES = [
    ("README.md", "tiny"),
    *(pytest.param(name_of(page), "smollm2", marks=pytest.mark.slow) for page in RUN if RUN[page]),
]


@pytest.fixture(scope="module")
def tiny() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return tiny_model("llama", "sdpa"), letters()


@pytest.mark.parametrize(("page", "size"), CASES)
def test_blocks_run(
    page: str, size: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In their order and in one namespace, as a reader who copies them would; the model's file is read once."""
    model, tokenizer = request.getfixturevalue(size)

    def load(
        name: str | None = None, *, attn_implementation: str = "sdpa", **_: Any
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        assert name is None
        model.set_attn_implementation(attn_implementation)
        return model, tokenizer

    module = ModuleType("__main__")  # dataclasses look their module up
    monkeypatch.setattr(hf_offload, "load_demo_model", load)
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.chdir(tmp_path)
    try:
        with patch.dict(POLICIES):  # a page makes one of its own known
            for block in RUN[ROOT / page]:
                code = "\n" * (block.line - 1) + block.text  # so that a traceback names the page's line
                exec(compile(code, page, "exec"), module.__dict__)
    finally:
        with contextlib.suppress(ValueError):  # no block has enabled it
            hf_offload.disable(model)
        model.set_attn_implementation("sdpa")


def test_blocks_have_a_language() -> None:
    for page in PAGES:
        for block in blocks(page):
            assert block.language in {"python", "bash", "text", ""}, f"{page.name}:{block.line}"
            if block.language == "bash":
                assert shlex.split(block.text, comments=True)
            assert block.language or not re.search(r"^(import|from|model|cache)\b", block.text, re.M), block


def test_make_targets_exist() -> None:
    rules = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = {target for text in PAGES.values() for target in re.findall(r"(?:^|`)make ([\w-]+)", text, re.M)}
    assert {"demo", "test", "docs"} <= named
    assert named <= rules


def test_commands_and_options_exist() -> None:
    """Scripts and commands that the pages name, each with the options that stand behind it."""
    named = set()
    for text in PAGES.values():
        command_lines = r"((?:eval|examples)/[a-z]\w+\.py|hf-offload (?:store )?[\w-]+)([^`\n#|]*)"
        for name, rest in re.findall(command_lines, text.replace("\\\n", "")):
            named |= {(name, option) for option in ("--help", *re.findall(r"(?<= )--[a-z-]+", rest))}
    assert len(named) > 40
    known: dict[str, set[str]] = {}
    group = typer.main.get_command(hf_offload.cli.app)
    for name in {name for name, _ in named}:
        if name.startswith("hf-offload"):
            made = group
            for part in name.split()[1:]:
                made = made.commands[part]  # type: ignore[attr-defined]
        else:
            assert (ROOT / name).exists(), name
            script = pytest.importorskip(Path(name).stem, exc_type=ImportError, reason="needs hf-offload[eval]")
            made = typer.main.get_command(command(script.main))
        known[name] = {"--help"} | {option for one in made.params for option in (*one.opts, *one.secondary_opts)}
    assert not [(name, option) for name, option in named if option not in known[name]]


def prose(page: Path) -> str:
    """A page without its blocks."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", prose(page)):
        file, _, anchor = link.partition("#")
        if file.startswith("https:"):
            continue
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert page not in GUIDE or (ROOT / "docs" in target.parents and target.name not in OF_THE_CODE), link
        assert not anchor or anchor in anchors(target), link


@every_page
def test_tables_and_lists_are_whole(page: Path) -> None:
    """A row behind an empty line is no row of a table, and every row has the columns of the first.

    Python-Markdown, unlike GitHub, wants an empty line before a list and four spaces before a nested one.
    """
    lines, columns = prose(page).split("\n"), 0
    items = re.compile(r"( *)(?:[-*]|\d+\.) ")
    for before, line, after in zip(["", *lines[:-1]], lines, [*lines[1:], ""], strict=True):
        if line.startswith("|"):
            if not before.startswith("|"):
                assert re.fullmatch(r"\|([ :-]+\|)+", after), line
                columns = line.count("|") - line.count("\\|")
            assert line.count("|") - line.count("\\|") == columns, line
        if page in GUIDE and (found := items.match(line)):
            assert not before.strip() or items.match(before) or before.startswith(" "), line
            assert len(found[1]) % 4 == 0, line


@every_page
def test_no_page_is_long(page: Path) -> None:
    limit = 10 if page.name == "README.md" else 12
    read = re.sub(r"<!--.*?-->", "", PAGES[page], flags=re.DOTALL)
    assert len(read.encode()) <= limit * 1024


def test_the_site_has_every_page_and_the_reference_every_name() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    listed = re.findall(r"[\w/-]+\.md", str(nav))
    assert sorted(listed) == sorted(str(path.relative_to(ROOT / "docs")) for path in GUIDE)
    listed = re.findall(r"^::: hf_offload\.(?:enable\.|fast_linear\.)?(\w+)$", PAGES[ROOT / "docs" / "api.md"], re.M)
    assert sorted([*listed, "__version__"]) == sorted(hf_offload.__all__)


@pytest.mark.parametrize("owner", ["HybridCache", *POLICIES])
def test_knobs_are_listed_with_their_defaults(owner: str) -> None:
    page = "index" if owner == "HybridCache" else owner
    listed = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", PAGES[ROOT / "docs" / "policies" / f"{page}.md"], re.M))
    if owner == "HybridCache":
        parameters = inspect.signature(HybridCache.__init__).parameters.values()
        wanted = {one.name: one.default for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}
    else:
        wanted = {one.name: one.default for one in dataclasses.fields(POLICIES[owner]) if one.init}
    assert {knob: ast.literal_eval(default) for knob, default in listed.items()} == wanted


def test_the_drawings_are_what_the_script_draws() -> None:
    for name, draw in drawings.DRAWINGS.items():
        assert (ROOT / "docs" / "img" / f"{name}.svg").read_text(encoding="utf-8") == str(draw()), name
