"""ListOps as text: evaluate expressions, and read and write the files of Long Range Arena.

A file is tab-separated, with the header "Source<TAB>Target" and lines that end in CR LF, as Python's csv module writes
them. It applies operators to one argument at a time, each application in parentheses: [MAX 2 9 ] is written
"( ( ( [MAX 2 ) 9 ) ] )". Parentheses have no meaning and are dropped when a file is read.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mnemos.atomic import replacing
from mnemos.types import InputError

from .arrays import Rows
from .files import special
from .listops_generate import CLOSE, MIN, VOCABULARY

HEADER = "Source\tTarget"
_IDS = {text.encode(): token for token, text in enumerate(VOCABULARY) if token}
_SPACES = bytes.maketrans(b"()", b"  ")
_DEPTH = np.array([0] * MIN + [1] * (CLOSE - MIN) + [-1], np.int32)  # how a token changes the nesting depth


def evaluate(source: str) -> int:
    """The value (0 to 9) of a ListOps text, with or without parentheses. Raises InputError if it is malformed.

    It shares no code with the generator, so that tests can compare its values with the generator's labels.
    """
    open_lists: list[list[str]] = []
    value: str | None = None  # of the whole expression, once it is complete
    for place, word in enumerate(source.replace("(", " ").replace(")", " ").split()):
        if value is not None:
            raise InputError(
                f"listops: word {place}: expected the end after a complete expression, found {word!r}; remove it"
            )
        if word in ("[MIN", "[MAX", "[MED", "[SM"):
            open_lists.append([word])
            continue
        if word == "]":
            if not open_lists or len(open_lists[-1]) < 2:
                raise InputError(
                    f"listops: word {place}: expected an operator with arguments before ']', found none; remove it"
                )
            operator, *arguments = open_lists.pop()
            word = str(_apply(operator, sorted(map(int, arguments))))
        elif len(word) != 1 or word not in "0123456789":
            raise InputError(
                f"listops: word {place}: expected a digit, ], [MIN, [MAX, [MED or [SM, found {word!r}; correct it"
            )
        if open_lists:
            open_lists[-1].append(word)
        else:
            value = word
    if value is None:
        raise InputError(
            f"listops: expected a complete expression, found {len(open_lists)} operators not closed; complete the text"
        )
    return int(value)


def _apply(operator: str, ordered: list[int]) -> int:
    if operator == "[MIN":
        return ordered[0]
    if operator == "[MAX":
        return ordered[-1]
    if operator == "[SM":
        return sum(ordered) % 10
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) // 2


def to_text(tokens: NDArray[np.uint8], parentheses: bool = True) -> str:
    """The text of one sample's tokens [T], with or without Long Range Arena's parentheses."""
    if not parentheses:
        return " ".join(VOCABULARY[token] for token in tokens)
    words: list[str] = []
    open_lists: list[list[int]] = []  # the operator's index in words, and its number of arguments so far
    for token in tokens.tolist():
        if MIN <= token < CLOSE:
            open_lists.append([len(words), 0])
            words.append(VOCABULARY[token])
            continue
        words.append(VOCABULARY[token])
        if token == CLOSE:
            place, arguments = open_lists.pop()
            words[place] = "( " * (arguments + 1) + words[place]
            words.append(")")
        if open_lists:
            open_lists[-1][1] += 1
            words.append(")")
    return " ".join(words)


def write_tsv(path: str | Path, rows: Rows) -> None:
    """Write samples in Long Range Arena's format. The file is written atomically."""
    with replacing(path) as temporary, temporary.open("w", newline="") as file:
        file.write(HEADER + "\r\n")
        for i in range(len(rows)):
            file.write(f"{to_text(rows.row(i))}\t{rows.labels[i]}\r\n")


def read_tsv(path: str | Path) -> Rows:
    """The samples of a Long Range Arena file, with or without parentheses.

    Raises InputError, with the line, for a file that is missing, empty, truncated or malformed, for a word that is
    not in the vocabulary and for a label that is not a digit. Labels are not checked against the text; see `evaluate`.
    Cost: about 60 µs per sample of 1,000 tokens.
    """
    path = Path(path)
    if kind := special(path):
        raise InputError(f"{path}: expected a ListOps file, found {kind}; write its content to a file")
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(
            f"{path}: expected a ListOps file, but it cannot be opened ({error.strerror}); check the path"
        ) from None
    samples: list[bytes] = []
    labels = bytearray()
    with file:
        header = file.readline().strip().decode(errors="replace")
        if header != HEADER:
            raise InputError(f"{path}: line 1: expected the header {HEADER!r}, found {header[:40]!r}; check the file")
        for number, line in enumerate(file, 2):
            where = f"{path}: line {number}"
            fields = line.rstrip(b"\r\n").split(b"\t")
            if len(fields) != 2:
                raise InputError(
                    f"{where}: expected 2 fields, Source and Target, separated by a tab, found {len(fields)}; check "
                    "the file"
                )
            label = fields[1].strip()
            if len(label) != 1 or not label.isdigit():
                raise InputError(
                    f"{where}: expected a label from 0 to 9, found {label[:20].decode(errors='replace')!r}; correct it"
                )
            samples.append(_encode(fields[0], where))
            labels += label
    if not samples:
        raise InputError(f"{path}: expected samples after the header, found none; check the file")
    return Rows.ragged(
        np.frombuffer(b"".join(samples), np.uint8),
        np.array([len(sample) for sample in samples]),
        np.frombuffer(bytes(labels), np.uint8) - ord("0"),
    )


def _encode(source: bytes, where: str) -> bytes:
    """The tokens of a source, one byte each. Raises InputError unless they form one complete expression."""
    words = source.translate(_SPACES).split()
    try:
        encoded = bytes([_IDS[word] for word in words])
    except KeyError as error:
        word = error.args[0][:20].decode(errors="replace")
        raise InputError(f"{where}: expected digits, ], [MIN, [MAX, [MED or [SM, found {word!r}; correct it") from None
    if not encoded:
        raise InputError(f"{where}: expected an expression before the tab, found none; check the file")
    tokens = np.frombuffer(encoded, np.uint8)
    nesting = np.cumsum(_DEPTH[tokens])
    if nesting[-1] != 0 or (nesting[:-1] <= 0).any():
        raise InputError(f"{where}: expected one complete expression, found brackets that do not match; check the file")
    if ((tokens[:-1] >= MIN) & (tokens[:-1] < CLOSE) & (tokens[1:] == CLOSE)).any():
        raise InputError(f"{where}: expected an argument after every operator, found an empty list; check the file")
    return encoded
