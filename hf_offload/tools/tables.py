"""Tables that the command line prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table


def make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of texts: the first column is aligned to the left, all others to the right."""
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table
