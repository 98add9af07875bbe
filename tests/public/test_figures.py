"""Measured numbers in README.md and docs/ against the CSVs in eval/results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import figures
from figures import FIELD, MARK, ROOT, pages, write

OTHERS = {"architecture.md", "design-notes.md", "design-notes-methods.md", "models.md"}
PAGES = [page for page in pages() if page.name not in OTHERS]
"""The first three of the others are no pages of the guide; models.md depends on the installed Transformers."""
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
UNITS = re.compile(
    r"[\d.,]*\d(?: ?(?:ms|µs|s|×|%|[KMG]i?B(?:/s)?)(?![\w/])| (?:seconds|minutes)\b)|\bKL (?:of )?0\.\d+"
)
NOT_MEASURED = {
    "choosing.md": ["95 %", "144 KiB", "18 GiB", "18 GiB", "432 MiB", "1.8 GiB"],  # the memory of a shape
    "evaluating.md": ["95 %"],
    "papers.md": ["20 %", "20 %", "80 GB", "48 GB", "99 %", "80 GB"],
    "fluxion.md": ["5 %"],
    "h2o.md": ["20 %"],
    "results.md": ["95 %"],
    "limits.md": [".7 s"],  # `serving/turns.py`
    "server.md": ["20GiB", "4GiB", "32 MiB", ".7 s"],  # defaults
    "gpu-results.md": ["16 GiB", "13.4 ms"],  # a setting of gpu_check; what eval/gpu/model.py predicts
    "device-memory.md": ["80 %", "512 MiB", "640 MiB", "24 GB"],
}
"""Numbers with a unit that pages write by hand: settings, levels of confidence, the papers' machines, arithmetic."""


def prose(text: str) -> str:
    """A page without figures, code, and what tables say of the papers' own numbers."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", MARK.sub("", text), flags=re.DOTALL)
    lines, column = [], None
    for line in text.split("\n"):
        cells = line.split("|")
        if not line.startswith("|"):
            column = None
        elif column is None:
            titles = [cell.strip() for cell in cells]
            column = titles.index("the paper's number") if "the paper's number" in titles else 0
        lines.append("|".join(cell for index, cell in enumerate(cells) if not column or index != column))
    return "\n".join(lines)


@every_page
def test_a_page_agrees_with_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert write(text) == text, "run `python eval/figures.py`"


def test_every_mark_is_closed_and_every_function_used() -> None:
    used = Path(figures.__file__).read_text(encoding="utf-8")
    for page in pages():
        text = page.read_text(encoding="utf-8")
        marks = MARK.findall(text)
        assert text.count("<!--fig:") == text.count("<!--/fig-->") == len(marks), page
        assert not re.findall(r"^[ \-*]*<!--fig:[^\n]*<!--/fig-->", text, re.M), f"{page}: Markdown ends at such a line"
        assert all(FIELD.search(mark[1]) for mark in marks), f"{page}: a figure that nothing makes"
        assert not any(UNITS.search(FIELD.sub("", mark[1])) for mark in marks), f"{page}: a number that is typed"
        assert not any("--" in mark[1] for mark in marks), f"{page}: Markdown ends at such a comment"
        assert not any("|" in mark[1] for mark in marks if not mark[2].startswith("\n")), f"{page}: a cell ends there"
        used += "".join(mark[1] for mark in marks)
    named = [name for name, value in vars(figures).items() if callable(value) and not isinstance(value, type)]
    assert [name for name in named if len(re.findall(rf"\b{name}\b", used)) < 2] == []


@every_page
def test_measured_numbers_come_from_the_results(page: Path) -> None:
    found = [mark.group() for mark in UNITS.finditer(prose(page.read_text(encoding="utf-8")))]
    assert found == NOT_MEASURED.get(page.name, []), "let eval/figures.py write it, or list it above"


def test_a_number_that_is_typed_is_found() -> None:
    text = "It takes 35 ms, 1.5 × as long, at KL 0.02 and 3 MiB/s. `9 ms` <!--fig:{x}-->7 ms<!--/fig-->"
    assert UNITS.findall(prose(text)) == ["35 ms", "1.5 ×", "KL 0.02", "3 MiB/s"]
