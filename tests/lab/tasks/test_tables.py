"""Texts in tables: JSON lines, CSV, Parquet and saved data sets."""

import sys

import pytest

from mnemos.lab.errors import SkippedFile
from mnemos.lab.tasks.tables import read_table
from mnemos.lab.tasks.text import TextConfig
from mnemos.types import InputError

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
    with pytest.warns(SkippedFile, match=r"data.parquet: 18 of 27 rows have no text in 'body', and are left out"):
        splits = TextConfig(str(path)).build()._splits
    assert sum(map(len, splits.values())) == 9


def test_an_empty_line_is_a_row_unless_nothing_follows(tmp_path):
    for text, a in (("a\n1\n\n3\n\n\n", [1, None, 3]), ("a,b\n1,2\n\n3,4\n\n", [1, None, 3]), ("a\n1\n", [1])):
        (tmp_path / "t.csv").write_text(text)
        assert read_table(tmp_path / "t.csv")["a"][:] == a
    for text in ("\na,b\n1,2\n", "\na\n1\n"):
        (tmp_path / "t.csv").write_text(text)
        with pytest.raises(InputError, match="its first line is empty; remove it"):
            read_table(tmp_path / "t.csv")


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
    # A table beside texts is left out, unless its column is named.
    (tmp_path / "files" / "notes.txt").write_text("words " * 9000)
    assert TextConfig(str(tmp_path / "files")).files() == [tmp_path / "files" / "notes.txt"]
    assert len(TextConfig(str(tmp_path / "files"), column="body").files()) == 3


def test_a_column_that_is_not_there_is_named_with_the_candidates(tmp_path):
    path = write(tmp_path, ".csv", {**ROWS, "title": ["a"] * 40})
    for column, found in ((None, "none"), ("text", "'text'"), ("id", "'id'")):
        with pytest.raises(InputError, match=rf"data.csv: .*data.column, found {found}; it has body, title") as error:
            TextConfig(str(path), column=column).build()
        assert "\n" not in str(error.value)


def test_a_column_without_a_table_is_refused_but_not_where_a_text_is_scored(tmp_path):
    (tmp_path / "r.json").write_text('{"review": "words"}\n' * 2000)
    for path in (tmp_path / "r.json", tmp_path):
        with pytest.raises(InputError, match=r"data.column: expected a table \(.jsonl.* found none in .*; leave"):
            TextConfig(str(path), column="review").build()
    assert TextConfig(str(tmp_path / "r.json"), column="review").build_to_score("test").has_test


def test_columns_between_semicolons_are_said(tmp_path):
    (tmp_path / "s.csv").write_text("id;body\n" + "1;some words\n" * 40)
    with pytest.raises(InputError, match=r"its columns are separated by ';'; save it with ','"):
        TextConfig(str(tmp_path / "s.csv")).build()


def test_damaged_tables_and_a_missing_library_are_one_line(tmp_path, monkeypatch, capfd):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and more")
    (tmp_path / "b.jsonl").write_text('{"text": \n')
    for path in tmp_path.iterdir():
        with pytest.raises(InputError, match=rf"{path.name}: expected a table") as error:
            read_table(path)
        assert "\n" not in str(error.value)
    (tmp_path / "notes.txt").write_text("a,b\n1,2\n")
    for name, found in (("", "a folder"), ("absent.csv", "no such file"), ("notes.txt", "the ending '.txt'")):
        with pytest.raises(InputError, match=f"expected a table.*, found {found}; "):
            read_table(tmp_path / name)
    (tmp_path / "c.csv").write_text("1.5,2\n2.5,3\n")
    with pytest.raises(InputError, match=r"c\.csv: .* add a line of names"):
        read_table(tmp_path / "c.csv")
    (tmp_path / "d.csv").write_text("0,1\n2.5,3\n")  # as pandas writes a table without names
    assert read_table(tmp_path / "d.csv").column_names == ["0", "1"]
    (tmp_path / "e.csv").write_bytes("a,b\n1,café\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"e\.csv: .* it is no UTF-8: .* 0xe9; save it as UTF-8"):
        read_table(tmp_path / "e.csv")
    assert capfd.readouterr() == ("", ""), "what the library prints before it raises"
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"library datasets, .*not installed; run: pip install"):
        read_table(tmp_path / "b.jsonl")


def test_what_datasets_keeps_beside_a_saved_data_set_is_no_text(tmp_path):
    path = write(tmp_path, ".saved")
    saved = datasets.load_from_disk(path)
    saved.map(lambda row: {"body": row["body"].upper()})
    saved.shuffle(seed=0)
    assert len(list(path.glob("cache-*.arrow"))) == 2
    assert len(TextConfig(str(path)).files()) == 1
    task = TextConfig(str(path), segment=16, held_out=0.2).build()
    assert sum(map(len, task._splits.values())) == 40


def test_a_column_whose_name_is_nearly_right_is_suggested(tmp_path):
    path = write(tmp_path, ".csv", {"title": ["a"] * 40, "review": ["words"] * 40})
    with pytest.raises(InputError, match=r"data.column, found 'reviw'; did you mean 'review'\?"):
        TextConfig(str(path), column="reviw").build()
