"""Tables that the command line prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table


def make_table(title: str, rows: Sequence[Mapping[str, str]]) -> Table:
    """Return a table of texts by the names of their columns, the same in every row; the first column is a name."""
    table = Table(title=title)
    for number, column in enumerate(rows[0]):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row.values())
    return table
