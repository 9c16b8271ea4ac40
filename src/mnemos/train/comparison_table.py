"""Print a comparison as a table."""

from mnemos.types import JSONObject


def show(comparison: JSONObject) -> None:
    """Print a comparison as a table."""
    from rich.console import Console
    from rich.table import Table

    def score(row: JSONObject) -> str:
        spread = "" if row["std"] is None else f" ± {row['std']:.4f}"
        return f"{row['mean']:.4f}{spread}"

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", comparison["metric"], "seeds", "parameters", "MFLOP/sample", "state KiB", "seconds", "peak MiB"):
        table.add_column(column, justify="left" if not column else "right")
    for row in comparison["rows"]:
        state = "–" if row["state_bytes"] is None else f"{row['state_bytes'] / 2**10:,.1f}"
        costs = (f"{row['flops'] / 1e6:.2f}", state, f"{row['seconds']:.1f}", f"{row['peak_bytes'] / 2**20:.0f}")
        table.add_row(row["name"], score(row), str(row["seeds"]), f"{row['parameters']:,}", *costs)
        for control in comparison["controls"]:
            if control["name"] == row["name"]:
                table.add_row(f"  cache {control['control']}", score(control), str(control["seeds"]))
    if comparison["majority"] is not None:
        table.add_row("majority class", f"{comparison['majority']:.4f}")
    # A file has no width; this one is enough for all columns.
    console = Console(width=max(100, Console().width))
    console.print(table)
    rows = [row for row in comparison["rows"] if row.get("along")]
    if rows:
        first = rows[0]["along"]
        reach = Table(box=None, pad_edge=False, header_style="bold", title=f"{first['metric']} by {first['x']}")
        reach.add_column("")
        for one in first["values"]:
            reach.add_column(f"{one['x']:g}", justify="right")
        for row in rows:
            reach.add_row(row["name"], *(score(one) for one in row["along"]["values"]))
        console.print(reach)
