"""Tables that people have, read by pyarrow: JSON lines, CSV, Parquet and what the library `datasets` saves."""

import re
import warnings
from pathlib import Path
from typing import Any

from mnemos import libraries
from mnemos.errors import near_name
from mnemos.lab.errors import SkippedRows
from mnemos.types import InputError

from .files import read_bytes

ENDINGS = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
ARROW = ".arrow"  # of a folder that `save_to_disk` wrote
DESCRIPTIONS = ("dataset_info.json", "dataset_dict.json", "state.json")  # files beside them
_BLOCK = 2**30  # bytes
# The cells of a TSV if those that begin with a quotation mark also end with one.
_QUOTED_TSV = re.compile(rb'(?:(?:"(?:[^"]|"")*+"|[^"\t\r\n][^\t\r\n]*+)?+(?:[\t\r\n]|\Z))*+')


def is_table(file: Path) -> bool:
    """Whether a file is a table, by its name; .gz does not count, nor what `datasets` keeps beside a saved data set."""
    ending = _ending(file)
    return ending in ENDINGS or (ending == ARROW and not file.name.startswith("cache-"))


def read_column(file: Path, column: str | None) -> list[str]:
    """The texts of a column, row by row, "" where there is none; None: the only column of text."""
    table = read_table(file)
    types = {field.name: str(field.type) for field in table.schema}
    texts = [name for name, own in types.items() if own in ("string", "large_string")]
    name = texts[0] if column is None and len(texts) == 1 else column
    if name not in texts:
        others = ", ".join(f"{one} ({own})" for one, own in types.items())
        hint = f"it has {', '.join(texts) or f'no column of text, but {others}; `mnemos train series` reads numbers'}"
        problem = f"none; {hint}" if column is None else f"{column!r}; {near_name(column, texts, hint)}"
        raise InputError(f"{file}: expected the name of a column of text in data.column, found {problem}")
    rows = [text or "" for text in table[name].to_pylist()]
    if empty := rows.count(""):
        without = f"{empty:,} of {len(rows):,} rows have no text in {name!r}"
        warnings.warn(f"{file}: {without}, and are left out", SkippedRows, stacklevel=2)
    return rows


def read_table(file: Path) -> Any:
    """The file as a `pyarrow.Table`, in memory. Raises InputError without the library, and for a damaged file."""
    ending = _ending(file)
    if file.is_dir() or ending not in (*ENDINGS, ARROW):
        problem = "a folder; name a file" if file.is_dir() else f"the ending {ending!r}; convert it"
        raise InputError(f"{file}: expected a table ({', '.join(ENDINGS)}), found {problem}")
    arrow = libraries.pyarrow()
    from pyarrow import csv, ipc, json, parquet

    data = read_bytes(file)
    source = arrow.BufferReader(data)
    block = min(len(data) + 1, _BLOCK)  # the type of a column is that of the whole file, not of its beginning
    try:
        if ending == ".parquet":
            table = parquet.read_table(source)
        elif ending == ARROW:
            table = ipc.open_stream(source).read_all()
        elif ending in (".jsonl", ".ndjson"):
            data.decode()
            if data.lstrip()[:1] == b"[":
                raise InputError(f"{file}: expected an object on each line, found one array; save it as JSON lines")
            table = json.read_json(source, read_options=json.ReadOptions(block_size=block))
        else:
            data.decode()
            # A TSV with a mark that nothing closes, as of inches, has its marks as text, and a row on each line.
            quoted = ending == ".csv" or _QUOTED_TSV.fullmatch(data) is not None
            form = csv.ParseOptions(
                delimiter="," if ending == ".csv" else "\t",
                quote_char='"' if quoted else False,
                newlines_in_values=True,
            )
            options: dict[str, Any] = {
                "read_options": csv.ReadOptions(block_size=block),
                "parse_options": form,
                "convert_options": csv.ConvertOptions(
                    strings_can_be_null=True, null_values=[*csv.ConvertOptions().null_values, "None", "<NA>"]
                ),
            }
            table = csv.read_csv(source, **options)
            if len(table.column_names) == 1:  # of which an empty line between others is a row without a value
                form.ignore_empty_lines = False
                table = csv.read_csv(arrow.BufferReader(data.strip(b"\r\n")), **options)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{file}: offset {error.start}: expected UTF-8, found the byte 0x{data[error.start]:02x}; save it as UTF-8"
        ) from None
    except (arrow.ArrowException, OSError) as error:
        problem = f"it cannot be read ({' '.join(str(error).split()):.160})"
        raise InputError(f"{file}: expected a table ({ending}), but {problem}; correct the file") from None
    # --- what reads well and is no table of named columns ---
    names = table.column_names
    if not len(table):
        raise InputError(f"{file}: expected a table ({ending}), but it has no rows; add some")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"{file}: expected each column once, found {twice!r} again; rename one")
    if len(names) == 1 and (mark := next((mark for mark in ";\t" if mark in names[0]), None)):
        raise InputError(f"{file}: expected columns separated by commas, found {mark!r}; save it with commas")
    # What pandas and NumPy's tables call columns, 0, 1, …, are names.
    if all(map(is_number, names)) and names != [*map(str, range(len(names)))]:
        raise InputError(
            f"{file}: expected names of columns in the first line, found numbers ({', '.join(names):.60}); add a line "
            "of names"
        )
    return table


def is_number(text: str) -> bool:
    """Whether a cell holds a number, as Python writes it."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _ending(file: Path) -> str:
    return Path(file.name.lower().removesuffix(".gz")).suffix
