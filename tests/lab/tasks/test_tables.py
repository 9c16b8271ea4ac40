"""Texts in tables: JSON lines, CSV, Parquet and saved data sets."""

import sys

import pytest
from refusals import refuses

from mnemos.lab.errors import SkippedRows
from mnemos.lab.tasks.tables import read_table
from mnemos.lab.tasks.text import TextConfig

datasets = pytest.importorskip("datasets")
ROWS = {"id": [*range(40)], "body": [f'number {i}, "quoted"\nand more of it: ü ' * 6 for i in range(40)]}


def write(folder, ending, rows=ROWS, name="data"):
    folder.mkdir(exist_ok=True, parents=True)
    table = datasets.Dataset.from_dict(rows)
    path = folder / f"{name}{ending}"
    if ending == ".saved":
        table.save_to_disk(path)
    else:
        write = {"jsonl": table.to_json, "csv": table.to_csv, "parquet": table.to_parquet}[ending.split(".")[1]]
        write(path)
    return path


def documents(task, split):
    return {bytes(text.tolist()).decode() for text in task._splits[split]}


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet", ".jsonl.gz", ".saved"])
def test_each_row_is_a_document(tmp_path, ending):
    path = write(tmp_path, ending)
    task = TextConfig(str(path), segment=16, held_out=0.2).build()
    texts = [documents(task, split) for split in ("train", "valid", "test")]
    assert [len(one) for one in texts] == [24, 8, 8]
    assert set.union(*texts) == {*ROWS["body"]}
    assert "24 documents" in task.about[0]
    scored = TextConfig(str(path), column="body").build_to_score("test", task.preprocessing())
    assert documents(scored, "test") == {*ROWS["body"]}
    assert all(file.is_file() for file in TextConfig(str(path)).files())


def test_rows_without_text_are_left_out(tmp_path):
    path = write(tmp_path, ".parquet", {"body": [None, "", "words " * 200] * 9})
    with pytest.warns(SkippedRows, match=r"data.parquet: 18 of 27 rows have no text in 'body', and are left out"):
        splits = TextConfig(str(path)).build()._splits
    assert sum(map(len, splits.values())) == 9


def test_a_folder_of_tables_gives_its_splits(tmp_path):
    for split, first in (("train", 0), ("validation", 20), ("test", 30)):
        write(tmp_path / "files", ".jsonl", {"body": ROWS["body"][first : first + 10]}, split)
    one = TextConfig(str(tmp_path / "files"), segment=16).build()
    assert [documents(one, "valid"), documents(one, "test")] == [{*ROWS["body"][20:30]}, {*ROWS["body"][30:]}]
    parts = {"train": ROWS["body"][:30], "test": ROWS["body"][30:]}
    tables = {name: datasets.Dataset.from_dict({"body": rows}) for name, rows in parts.items()}
    datasets.DatasetDict(tables).save_to_disk(tmp_path / "saved")
    two = TextConfig(str(tmp_path / "saved"), segment=16, held_out=0.3).build()
    assert documents(two, "test") == {*parts["test"]}
    assert documents(two, "train") | documents(two, "valid") == {*parts["train"]}
    assert not any("left out" in line for line in two.about), "what datasets keeps beside the rows is no text"
    # A table beside texts is left out, unless its column is named.
    (tmp_path / "files" / "notes.txt").write_text("words " * 9000)
    assert TextConfig(str(tmp_path / "files")).files() == [tmp_path / "files" / "notes.txt"]
    assert len(TextConfig(str(tmp_path / "files"), column="body").files()) == 3


@pytest.mark.parametrize(
    ("column", "found"),
    [(None, "none; it has body, title"), ("id", "'id'; it has body"), ("boddy", r"'boddy'; did you mean 'body'\?")],
)
def test_a_column_that_is_not_there_is_named_with_the_candidates(tmp_path, column, found):
    path = write(tmp_path, ".csv", {**ROWS, "title": ["a"] * 40})
    refuses(rf"data.csv: .*data.column, found {found}", TextConfig(str(path), column=column).build)
    (tmp_path / "data.csv").write_text("n,empty\n" + "1,\n" * 20)
    refuses(r"n \(int64\), empty \(\w+\); `mnemos train series`", TextConfig(str(tmp_path / "data.csv")).build)


def test_a_column_without_a_table_is_refused_but_not_where_a_text_is_scored(tmp_path):
    (tmp_path / "r.json").write_text('{"review": "words"}\n' * 2000)
    for path in (tmp_path / "r.json", tmp_path):
        refuses(r"data.column: .*\(.jsonl.* found none", TextConfig(str(path), column="review").build)
    assert TextConfig(str(tmp_path / "r.json"), column="review").build_to_score("test").has_test


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.parquet", b"PAR1 and more", r"a.parquet: expected a table \(.parquet\), but it cannot be read"),
        ("c.csv", b"1.5,2\n2.5,3\n", r"c\.csv: .* found numbers \(1.5, 2\); add a line of names"),
        ("e.csv", "a,b\n1,café\n".encode("latin-1"), r"offset 9: .* found the byte 0xe9; save it as UTF-8"),
        ("f.csv", b"a,b\n", "but it has no rows; add some"),
        ("s.csv", b"id;body\n" + b"1;some words\n" * 40, "separated by commas, found ';'; save it with commas"),
        ("comma.csv", b"a;b\n1,5;2\n", r"cannot be read \(CSV parse error: Expected 1 columns, got 2: 1,5;2\)"),
        ("twice.csv", b"a,a\n1,2\n", "expected each column once, found 'a' again"),
        ("array.jsonl", b'[{"a": 1}]', "expected an object on each line, found one array; save it as JSON lines"),
        ("m.jsonl", b'{"a": 1}\n{"a": "b"}\n', "changed from number to string"),
        ("notes.txt", b"a,b\n1,2\n", "expected a table.*, found the ending '.txt'; "),
    ],
)
def test_damaged_tables_are_one_line(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    refuses(words, read_table, tmp_path / name)


def test_without_the_library_tables_are_refused(tmp_path, monkeypatch):
    (tmp_path / "b.jsonl").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refuses(r"library pyarrow, .*not installed; run: pip install", read_table, tmp_path / "b.jsonl")


def test_what_datasets_keeps_beside_a_saved_data_set_is_no_text(tmp_path):
    path = write(tmp_path, ".saved")
    saved = datasets.load_from_disk(path)
    saved.map(lambda row: {"body": row["body"].upper()})
    saved.shuffle(seed=0)
    assert len(list(path.glob("cache-*.arrow"))) == 2
    assert len(TextConfig(str(path)).files()) == 1
    task = TextConfig(str(path), segment=16, held_out=0.2).build()
    assert sum(map(len, task._splits.values())) == 40


def test_the_type_of_a_column_is_that_of_all_its_rows(tmp_path):
    """And a whole number stays one beside a gap: it is a class of a series."""
    for last, types in (("1,.5", ["int64", "double"]), ("1,words", ["int64", "string"]), (",0", ["int64", "int64"])):
        (tmp_path / "t.csv").write_text("\n".join(["a,b", *["1,0"] * 300_000, last]) + "\n")
        assert [str(field.type) for field in read_table(tmp_path / "t.csv").schema] == types
    (tmp_path / "t.csv").write_text("0,1\n2.5,3\n")  # as pandas writes a table without names
    assert read_table(tmp_path / "t.csv").column_names == ["0", "1"]


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ('1\t"one\n2\ttwo, "2"\n', ['"one', 'two, "2"']),
        ('1\t"so" he said\n2\t5" wide\n', ['"so" he said', '5" wide']),
        ('"1"\t"a ""b"" c"\n"2"\t"tab\t and\nline"', ['a "b" c', "tab\t and\nline"]),  # as pandas writes them
    ],
)
def test_quotation_marks_of_a_tsv_are_text_unless_all_enclose_cells(tmp_path, content, texts):
    (tmp_path / "t.tsv").write_text("id\ttext\n" + content)
    assert read_table(tmp_path / "t.tsv").to_pydict() == {"id": [1, 2], "text": texts}


def test_gaps_are_read_as_pandas_writes_them(tmp_path):
    """In a file of one column an empty line is a gap: without it later steps of a series would move."""
    (tmp_path / "t.csv").write_text("a,b\n1,x\n\nNone,y\n<NA>,None\n,NA\n")
    assert read_table(tmp_path / "t.csv").to_pydict() == {"a": [1, None, None, None], "b": ["x", "y", None, None]}
    for end in ("\n", "\r\n"):
        (tmp_path / "t.csv").write_bytes(end.join(["", "a", "1", "", "3", "", ""]).encode())
        assert read_table(tmp_path / "t.csv").to_pydict() == {"a": [1, None, 3]}


def test_an_array_of_json_objects_is_no_text(tmp_path):
    path = tmp_path / "r.json"
    path.write_text('[\n {"review": "words"},\n {"review": "more"}\n]\n' * 2000)
    refuses(r"r.json: expected text, found an array of JSON objects, .* JSON lines", TextConfig(str(path)).build)
    path.write_text("[1, 2, 3]\n" * 2000)
    TextConfig(str(path)).build()
