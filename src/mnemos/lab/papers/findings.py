"""The result of reproducing a claim: tables of our values next to the paper's, notes, figures and runs."""

from dataclasses import dataclass, field
from pathlib import Path

from mnemos.types import JSONObject

Cell = str | float | None


@dataclass
class Table:
    """A table. Numbers stay numbers in the JSON file and are rounded when they are printed.

    A column whose name starts with "paper" holds values of the paper.
    """

    title: str
    columns: list[str]
    rows: list[list[Cell]] = field(default_factory=list)

    def add(self, *cells: Cell) -> None:
        self.rows.append(list(cells))


@dataclass
class Finding:
    """The result of a claim's function. `files`: images that it wrote; `runs`: folders of training runs."""

    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    runs: list[Path] = field(default_factory=list)

    def table(self, title: str, columns: list[str]) -> Table:
        """A new table, the last of the finding."""
        self.tables.append(Table(title, columns))
        return self.tables[-1]

    def to_dict(self) -> JSONObject:
        """The finding as JSON values; each row is a dictionary with the columns as keys."""
        tables = [
            {"title": t.title, "rows": [dict(zip(t.columns, row, strict=True)) for row in t.rows]} for t in self.tables
        ]
        files, runs = map(str, self.files), map(str, self.runs)
        return {"tables": tables, "notes": self.notes, "files": list(files), "runs": list(runs)}

    def show(self) -> None:
        from rich.console import Console
        from rich.table import Table as Rich

        # At least 110 columns: a file or pipe has no width of its own.
        console = Console(width=max(110, Console().width), highlight=False, markup=False)
        for table in self.tables:
            console.print(table.title, style="bold")
            rich = Rich(box=None, pad_edge=False, header_style="italic")
            for column, cells in zip(table.columns, zip(*table.rows, strict=True), strict=True):
                is_text = all(isinstance(cell, str) for cell in cells)
                style = "dim" if column.startswith("paper") else None
                rich.add_column(column, justify="left" if is_text else "right", style=style, no_wrap=is_text)
            for row in table.rows:
                rich.add_row(*map(cell_text, row))
            console.print(rich)
            console.print()
        for note in self.notes:
            console.print(note)


def cell_text(cell: Cell) -> str:
    """A cell as printed text: numbers with four significant digits, None as a dash."""
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int) or abs(cell) >= 1000:
        return f"{cell:,.0f}"
    text = f"{cell:.4g}"
    return text if set(text) & set(".en") else f"{text}.0"  # n: of nan, which a run that diverged may have


def spread(mean: float, std: float | None, scale: float = 100.0, digits: int = 1) -> str:
    """Text of a mean and its standard deviation over seeds, times `scale`; the default turns shares into percent."""
    return f"{scale * mean:.{digits}f}" + ("" if std is None else f" ± {scale * std:.{digits}f}")
