"""ListOps as text: expressions evaluated and written without the code that generates and reads them."""

from mnemos.lab.tasks.listops import CLOSE, HEADER, MIN, VOCABULARY


def evaluate(source):
    """The value (0 to 9) of a ListOps text, with or without parentheses."""
    open_lists = [[]]
    for word in source.replace("(", " ").replace(")", " ").split():
        if word.startswith("["):
            open_lists.append([word])
            continue
        if word == "]":
            operator, *arguments = open_lists.pop()
            word = apply(operator, sorted(arguments))
        open_lists[-1].append(int(word))
    ((value,),) = open_lists
    return value


def apply(operator, ordered):
    if operator == "[SM":
        return sum(ordered) % 10
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) // 2
    return {"[MIN": ordered[0], "[MAX": ordered[-1], "[MED": median}[operator]


def to_text(tokens, parentheses=True):
    """The text of one sample's tokens [T], with or without Long Range Arena's parentheses."""
    words = [VOCABULARY[token] for token in tokens]
    if not parentheses:
        return " ".join(words)
    open_lists = []  # the operator's index in words, and its number of arguments so far
    for i, token in enumerate(tokens):
        if MIN <= token < CLOSE:
            open_lists.append([i, 0])
            continue
        if token == CLOSE:
            place, arguments = open_lists.pop()
            words[place] = "( " * (arguments + 1) + words[place]
            words[i] += " )"
        if open_lists:
            open_lists[-1][1] += 1
            words[i] += " )"
    return " ".join(words)


def write_tsv(path, rows):
    """Samples in Long Range Arena's format."""
    lines = [f"{to_text(rows.row(i))}\t{rows.labels[i]}" for i in range(len(rows))]
    path.write_text("\r\n".join([HEADER, *lines, ""]), newline="")
