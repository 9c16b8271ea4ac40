"""What reproducing a claim finds: tables of our values beside the paper's, notes, pictures and runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Cell = str | float | None


@dataclass
class Table:
    """Rows of cells under columns; numbers are kept as numbers in the JSON, and rounded to be read.

    A column whose name starts with "paper" is the paper's.
    """

    title: str
    columns: list[str]
    rows: list[list[Cell]] = field(default_factory=list)

    def add(self, *cells: Cell) -> None:
        """One row more."""
        if len(cells) != len(self.columns):
            raise ValueError(f"{self.title}: {len(self.columns)} columns, {len(cells)} cells")
        self.rows.append(list(cells))


@dataclass
class Finding:
    """What a claim's function returns. `files`: pictures and pages it wrote; `runs`: folders of what it trained."""

    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    runs: list[Path] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As JSON: each row a dictionary by column."""
        tables = [
            {"title": t.title, "rows": [dict(zip(t.columns, row, strict=True)) for row in t.rows]} for t in self.tables
        ]
        return {
            "tables": tables,
            "notes": self.notes,
            "files": [str(path) for path in self.files],
            "runs": [str(path) for path in self.runs],
        }

    def show(self) -> None:
        """Print the tables and the notes."""
        from rich.console import Console
        from rich.table import Table as Rich

        # Wide enough for its columns even where the output is a file, which has no width.
        console = Console(width=max(110, Console().width), highlight=False)
        for found in self.tables:
            console.print(found.title, style="bold")
            table = Rich(box=None, pad_edge=False, header_style="italic")
            for column, cells in zip(found.columns, zip(*found.rows, strict=True), strict=True):
                words = all(isinstance(cell, str) for cell in cells)
                style = "dim" if column.startswith("paper") else None
                table.add_column(column, justify="left" if words else "right", style=style, no_wrap=words)
            for row in found.rows:
                table.add_row(*map(read, row))
            console.print(table)
            console.print()
        for note in self.notes:
            console.print(note)


def read(cell: Cell) -> str:
    """A cell to be read: four figures, a dash where there is nothing."""
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int) or abs(cell) >= 1000:
        return f"{cell:,.0f}"
    said = f"{cell:.4g}"
    return said if set(said) & set(".e") else f"{said}.0"


def spread(mean: float, std: float | None, scale: float = 100.0, digits: int = 1) -> str:
    """A mean with its standard deviation over seeds; an accuracy in percent unless `scale` says otherwise."""
    return f"{scale * mean:.{digits}f}" + ("" if std is None else f" ± {scale * std:.{digits}f}")


def listed(names: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
