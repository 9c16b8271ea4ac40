import csv

import numpy as np
import pytest

from mnemos.lab.tasks.arrays import Rows
from mnemos.lab.tasks.listops import evaluate, generate, read_tsv, to_text, write_tsv
from mnemos.lab.tasks.listops_generate import Rules
from mnemos.types import InputError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("( ( ( [MAX 2 ) 9 ) ] )", 9),
        ("[MIN 4 7 ]", 4),
        ("[SM 9 9 9 ]", 7),
        ("[MED 1 2 ]", 1),
        ("[MED 1 9 2 ]", 2),
        ("[MED 8 0 7 3 ]", 5),
        ("[MED 4 9 ]", 6),
        ("[SM [MED 3 4 ] [MAX 5 [MIN 9 8 ] ] 1 ]", 2),
        ("(([SM 1) 2) ]", 3),
    ],
)
def test_evaluate(text, value):
    assert evaluate(text) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "found 0 operators"),
        ("[MAX 1 2", "found 1 operators"),
        ("[MAX ]", "word 1: .*operator"),
        ("]", "word 0: .*operator"),
        ("1 2", "word 1: .*found '2'"),
        ("[MAX 1 12 ]", "word 2: .*found '12'"),
        ("[AVG 1 2 ]", r"word 0: .*found '\[AVG'"),
    ],
)
def test_evaluate_refuses(text, words):
    with pytest.raises(InputError, match=words) as error:
        evaluate(text)
    assert "\n" not in str(error.value)


def test_the_parentheses_are_long_range_arenas():
    tokens = np.array([12, 3, 11, 5, 8, 15, 10, 15], np.uint8)  # [MAX 2 [MIN 4 7 ] 9 ]
    assert to_text(tokens, parentheses=False) == "[MAX 2 [MIN 4 7 ] 9 ]"
    assert to_text(tokens) == "( ( ( ( [MAX 2 ) ( ( ( [MIN 4 ) 7 ) ] ) ) 9 ) ] )"
    assert to_text(tokens[1:2]) == "2"


@pytest.mark.parametrize("rules", [Rules(0, 30, 4, 4, 0.5), Rules()])
def test_round_trip(tmp_path, rules):
    rows = generate(rules, 5, 200)
    path = tmp_path / "basic_train.tsv"
    write_tsv(path, rows)
    back = read_tsv(path)
    assert np.array_equal(back.tokens, rows.tokens)
    assert np.array_equal(back.starts, rows.starts)
    assert np.array_equal(back.labels, rows.labels)
    assert [file.name for file in tmp_path.iterdir()] == ["basic_train.tsv"]
    with path.open(newline="") as file:
        read = list(csv.reader(file, delimiter="\t"))
    assert read[0] == ["Source", "Target"]
    assert [evaluate(source) for source, _ in read[1:]] == [int(target) for _, target in read[1:]] == list(rows.labels)


@pytest.mark.parametrize(
    "content",
    [
        "Source\tTarget\r\n( ( ( [MAX 2 ) 9 ) ] )\t9\r\n3\t3\r\n",
        "Source\tTarget\n[MAX 2 9 ]\t9\n3\t3",
        "Source\tTarget\n((([MAX 2) 9) ])\t 9 \n 3 \t3\n",
    ],
)
def test_reads_every_dress_of_the_format(tmp_path, content):
    path = tmp_path / "x.tsv"
    path.write_text(content, newline="")
    rows = read_tsv(path)
    assert [rows.row(i).tolist() for i in range(2)] == [[12, 3, 10, 15], [4]]
    assert rows.labels.tolist() == [9, 3]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("", "line 1: .*header.*found ''"),
        ("[MAX 2 9 ]\t9\n", "line 1: .*header"),
        ("Source\tTarget\n", "samples.*header"),
        ("Source\tTarget\n1\t1\n\n2\t2\n", "line 3: .*Source and Target.*found 1"),
        ("Source\tTarget\n1\t1\n[MAX 2 9 ]", "line 3: .*found 1"),
        ("Source\tTarget\n1\t1\n[MAX 2 9 \t9\n", "line 3: .*brackets"),
        ("Source\tTarget\n1\t1\n1 2\t9\n", "line 3: .*brackets"),
        ("Source\tTarget\n] [MAX\t9\n", "line 2: .*brackets"),
        ("Source\tTarget\n[MAX ]\t9\n", "line 2: .*empty list"),
        ("Source\tTarget\n\t9\n", "line 2: .*before the tab"),
        ("Source\tTarget\n[MAX 2 9 ]\t10\n", "line 2: .*label.*found '10'"),
        ("Source\tTarget\n[MAX 2 9 ]\t-1\n", "line 2: .*label.*found '-1'"),
        ("Source\tTarget\n[MAX 2 9 ]\t\n", "line 2: .*label.*found ''"),
        ("Source\tTarget\n[MAX 2 19 ]\t9\n", "line 2: .*found '19'"),
        ("Source\tTarget\n[FIRST 2 1 ]\t2\n", r"line 2: .*found '\[FIRST'"),
    ],
)
def test_refuses_by_file_and_line(tmp_path, content, words):
    path = tmp_path / "x.tsv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=words) as error:
        read_tsv(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.tsv"
    path.write_text("old")
    broken = Rows.ragged(np.array([15], np.uint8), np.array([1]), np.array([0], np.uint8))  # "]" alone has no text
    with pytest.raises(IndexError):
        write_tsv(path, broken)
    assert path.read_text() == "old"
