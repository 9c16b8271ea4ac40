"""ListOps as text: expressions evaluated and written without the code that generates them."""

from mnemos.lab.tasks.listops import VOCABULARY


def evaluate(source):
    """The value (0 to 9) of a ListOps text."""
    open_lists = [[]]
    for word in source.split():
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


def to_text(tokens):
    """The text of one sample's tokens [T]."""
    return " ".join(VOCABULARY[token] for token in tokens)
