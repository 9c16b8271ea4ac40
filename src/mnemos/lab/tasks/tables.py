"""Tables that people have, read by the library `datasets`: JSON lines, CSV, Parquet and its own saved folders."""

import contextlib
import csv
import functools
import gzip
import re
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mnemos import libraries
from mnemos.errors import near_name
from mnemos.lab.errors import SkippedRows
from mnemos.types import InputError

READERS = {
    ".jsonl": "from_json",
    ".ndjson": "from_json",
    ".csv": "from_csv",
    ".tsv": "from_csv",
    ".parquet": "from_parquet",
}
_WHOLE = 2**30  # rows of a CSV, bytes of JSON lines
ARROW = ".arrow"  # of a folder that `save_to_disk` wrote
DESCRIPTIONS = ("dataset_info.json", "dataset_dict.json", "state.json")  # files beside them


def is_table(file: Path) -> bool:
    """Whether a file is a table, by its name; .gz does not count, nor what `datasets` keeps beside a saved data set."""
    ending = _ending(file)
    return ending in READERS or (ending == ARROW and not file.name.startswith("cache-"))


def read_column(file: Path, column: str | None) -> list[str]:
    """The texts of a column, row by row, "" where there is none; None: the only column of text."""
    table = read_table(file)
    texts = [
        name for name, feature in table.features.items() if getattr(feature, "dtype", "") in ("string", "large_string")
    ]
    name = texts[0] if column is None and len(texts) == 1 else column
    if name not in texts:
        kinds = (f"{one} ({getattr(feature, 'dtype', feature)})" for one, feature in table.features.items())
        hint = f"it has {', '.join(texts) or 'no column of text, but ' + ', '.join(kinds)}"
        problem = f"none; {hint}" if column is None else f"{column!r}; {near_name(column, texts, hint)}"
        raise InputError(f"{file}: expected the name of a column of text in data.column, found {problem}")
    rows = [text or "" for text in table[name]]
    if empty := rows.count(""):
        without = f"{empty:,} of {len(rows):,} rows have no text in {name!r}"
        warnings.warn(f"{file}: {without}, and are left out", SkippedRows, stacklevel=2)
    return rows


def read_table(file: Path) -> Any:
    """The file as a `datasets.Dataset`, in memory. Raises InputError without the library, and for a damaged file."""
    if not file.is_file():
        problem = "a folder" if file.is_dir() else "no such file"
        raise InputError(f"{file}: expected a table, found {problem}; name its file (mnemos train: --data.path)")
    ending = _ending(file)
    if ending not in READERS and ending != ARROW:
        raise InputError(f"{file}: expected a table ({', '.join(READERS)}), found the ending {ending!r}; convert it")
    library = libraries.datasets()
    silent, log = library.are_progress_bars_disabled(), library.logging.get_verbosity()
    library.disable_progress_bars()  # of the conversion: this program has its own
    library.logging.set_verbosity(library.logging.CRITICAL)  # it prints an error before it raises it
    try:
        if ending == ARROW:
            return library.Dataset.from_file(str(file))
        # The types of columns are those of the whole file: of its first part, later rows might not have them.
        options: dict[str, Any] = {"chunksize": _WHOLE} if READERS[ending] != "from_parquet" else {}
        if ending == ".tsv":
            options |= {"sep": "\t"} | ({} if _is_quoted(file) else {"quoting": csv.QUOTE_NONE})
        with tempfile.TemporaryDirectory() as cache:  # the library converts a file into Arrow once, there
            read = functools.partial(
                getattr(library.Dataset, READERS[ending]), str(file), cache_dir=cache, keep_in_memory=True, **options
            )
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "Columns .* have mixed types")  # read again below
                    table = read()
            except library.exceptions.DatasetGenerationError as error:
                # pandas' fast reader infers types in parts, and Arrow cannot join what differs; the slow one does not.
                if READERS[ending] != "from_csv" or not type(error.__cause__).__name__.startswith("Arrow"):
                    raise
                read = functools.partial(read, engine="python")
                table = read()
            if READERS[ending] == "from_csv" and len(table.column_names) == 1:
                table = _with_empty_lines(table, read(skip_blank_lines=False))
        # --- first lines that are no names ---
        if READERS[ending] == "from_csv":
            names = table.column_names
            if "__index_level_0__" in names:  # of pandas, for a first value
                raise ValueError("its rows have more columns than its first line has names, as with decimal commas")
            if len(names) == 1 and (wrong := next((mark for mark in ";\t" if mark in names[0]), None)):
                raise ValueError(f"its columns are separated by {wrong!r}; save it with {options.get('sep', ',')!r}")
            # What pandas and NumPy's tables call columns, 0, 1, …, are names.
            if all(map(is_number, names)) and names != [*map(str, range(len(names)))]:
                raise ValueError("its first line has numbers where names of columns are expected; add a line of names")
        return table
    except Exception as error:  # of the library's readers
        cause = error.__cause__ or error
        problem, fix = f"it cannot be read ({' '.join(str(cause).split()):.160})", "correct the file"
        if isinstance(cause, UnicodeDecodeError):
            problem, fix = f"it is not UTF-8 ({cause.reason}: {cause.object[cause.start]:#04x})", "save it as UTF-8"
        elif "corresponds to no data" in str(cause):
            problem, fix = "it has no rows", "add some"
        raise InputError(f"{file}: expected a table ({ending}), but {problem}; {fix}") from None
    finally:
        library.logging.set_verbosity(log)
        if not silent:
            library.enable_progress_bars()


def _open(file: Path) -> Any:
    packed = file.name.lower().endswith(".gz")
    return (gzip.open if packed else open)(file, "rt", encoding="utf-8", newline="")


def _cells(file: Path, **dialect: Any) -> Iterator[list[str]]:
    """The cells of each line of a CSV or TSV, as they are written."""
    limit = csv.field_size_limit(2**31 - 1)
    try:
        with _open(file) as lines:
            yield from csv.reader(lines, delimiter="\t" if _ending(file) == ".tsv" else ",", **dialect)
    finally:
        csv.field_size_limit(limit)


def _is_quoted(file: Path) -> bool:
    """Whether quotation marks of a TSV are around cells; else, as a lone one, they are text, and each line is a row."""
    try:
        for _ in _cells(file, strict=True):
            pass
    except csv.Error as error:
        if "unexpected end of data" in str(error):
            return False
        with _open(file) as lines:
            return len({line.count("\t") for line in lines if line.strip()}) > 1
    return True


def is_written_whole(file: Path, column: int) -> bool:
    """Whether the file is a CSV or TSV whose column number `column` has whole numbers and gaps alone.

    pandas reads whole numbers with a gap among them as decimal ones, which a table then no longer tells apart.
    """
    if READERS.get(_ending(file)) != "from_csv":
        return False
    text = {"quoting": csv.QUOTE_NONE} if _ending(file) == ".tsv" and not _is_quoted(file) else {}
    rows = (row for row in _cells(file, **text) if row)
    next(rows)  # the names
    form = re.compile(r"\s*[-+]?\d+\s*|(?!\s*[-+]?inf)\D*", re.IGNORECASE)  # words: those of gaps
    return all(form.fullmatch(row[column]) for row in rows if len(row) > column)


def _with_empty_lines(table: Any, every_line: Any) -> Any:
    """A table of one column, in which an empty line between others is a row without a value, and not skipped."""
    values = every_line[every_line.column_names[0]][:]
    while values and values[-1] is None:
        values.pop()
    # Without such lines the table stays as it is: one empty line, also the last, makes integers decimal numbers.
    if None not in values or every_line.column_names != table.column_names:  # or its first line is empty
        return table
    return every_line.select(range(len(values)))


def is_number(text: str) -> bool:
    """Whether a cell holds a number, as Python writes it."""
    with contextlib.suppress(ValueError):
        float(text)
        return True
    return False


def _ending(file: Path) -> str:
    return Path(file.name.lower().removesuffix(".gz")).suffix
