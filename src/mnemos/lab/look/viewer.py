"""`mnemos look RUN` and `mnemos.look(stream)`: the page of what a model's memories hold."""

import contextlib
import html
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mnemos.atomic import check_output_file, write_text
from mnemos.errors import say
from mnemos.generate.stream import Stream
from mnemos.lab.evaluate.write_attention import documents
from mnemos.lab.hosted.hub import is_source
from mnemos.lab.run.checkpoint import steps
from mnemos.lab.run.files import Result
from mnemos.lab.run.recipe import Recipe
from mnemos.lab.run.recipe_files import is_model
from mnemos.lab.run.trained import open_run
from mnemos.lab.run.weights import final_checkpoint
from mnemos.lab.tasks.files import check_text, read_bytes
from mnemos.lab.tasks.metrics import GUESS
from mnemos.lab.tasks.task import Task
from mnemos.modes import evaluating
from mnemos.types import InputError, describe, reset

from .effects import KNOWN, LOST, log_probabilities, read_segments
from .page import page
from .record import Document, Recording, record, segment_length, shown_words

PAGE = "look.html"
SEGMENTS = 200  # at most, unless the caller says
TOKENS = 40_000  # of all models together, at most, for a page below 5 MB
ROWS = 64  # of a task whose rows ask a question, among which one is chosen


class Look:
    """What `look` returns: its recordings, and the page as `html`, which a notebook shows."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self.recordings, self.html = list(recordings), page(recordings)

    def write(self, path: str | Path) -> Path:
        out = Path(path)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, self.html)
        return out

    def _repr_html_(self) -> str:
        style, page = "width:100%;height:48rem;border:0", html.escape(self.html, quote=True)
        return f'<iframe title="What the memory holds" style="{style}" srcdoc="{page}"></iframe>'


def look(
    model: Stream | nn.Module,
    tokens: Sequence[int] | Tensor | None = None,
    *,
    words: Callable[[Sequence[int]], Sequence[tuple[str, int]] | None] | None = None,
    name: str = "",
    segment: int = 0,
) -> Look:
    """A page of what the memories of a model do while it reads tokens.

        mnemos.look(stream, tokens)                           # goes on from the stream's state, which stays as it is
        mnemos.look(model, tokens, words=task.words)          # from the beginning of a row
        mnemos.look(stream)                                   # what the state holds now, as the last token reads it

    model: y, state = model(x, state), or a `Stream` of one row. tokens: [T] ids. words: groups tokens into words (text,
    number of tokens); by default the tokens' numbers. segment: its tokens, by default the model's own. A notebook shows
    the result; `.write(path)` writes it. Raises InputError for tokens of several rows or that are no integers, for a
    stream of several rows or without a token, and for a model without a causal state.
    """
    ids = [] if tokens is None else _ids(tokens)
    state = None
    if isinstance(model, Stream):
        if model.last is None or model.rows != 1:
            found = "none" if model.last is None else f"{model.rows} rows"
            raise InputError(f"look: expected a stream of one row that has read, found {found}; prefill or select")
        state, ids, model = model.state, [int(model.last), *ids], model.model
    document = Document.of_text(ids, words or (lambda tokens: None))
    return Look([record(model, document, name or type(model).__name__, length=segment, state=state)])


def _ids(tokens: Sequence[int] | Tensor) -> list[int]:
    x: Tensor | None = None
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # a text, or rows of several lengths
        x = torch.as_tensor(tokens)
    # Rows must not be joined to one: the state would go on from each to the next.
    if x is None or (x.dim() and x.numel() != x.shape[-1]) or (x.numel() and x.is_floating_point()):
        found = type(tokens).__name__ if x is None else describe(x)
        raise InputError(f"look: expected the token ids of one row, [T] integers, found {found}; pass one row")
    return [int(token) for token in x.flatten()]


class Opened(NamedTuple):
    """A model that is looked at."""

    name: str
    about: str  # the run, and how far it was trained
    model: nn.Module
    task: Task  # says what its tokens mean
    data: object  # settings, or the tokenizer's vocabulary: models with the same ones read the same tokens
    length: int  # tokens of a segment
    folder: Path = Path()  # what errors name

    def record(self, document: Document) -> Recording:
        try:
            return record(self.model, document, self.name, self.about, self.length)
        except InputError as error:
            raise InputError(f"{self.folder}: {str(error).removeprefix('look: ')}") from None


def look_at_runs(
    folders: Sequence[str | Path],
    text: str | Path | None = None,
    out: str | Path | None = None,
    number: int | None = None,
    segments: int = SEGMENTS,
) -> Path:
    """Write the page of some runs of one task, each a run's folder or a comparison's; returns its path.

    text: a file that the models read, as a decoder of Transformers must; None: a document of the test split. number:
    which, from 0; None: the first, or of rows that ask a question the one that `choose_row` chooses. segments: at most,
    and at most `TOKENS` tokens of all models together. Raises InputError for runs of different data or of data that are
    no tokens, for the folder of a run's model, and for numbers out of range.
    """
    if segments < 1 or (number or 0) < 0:
        raise InputError(f"--segments, --document: expected at least 1 and 0, found {segments} and {number}; raise it")
    target = Path(folders[0]) / PAGE if out is None else Path(out)
    if out is not None:
        check_output_file(target)
    opened = [_open(run, text) for folder in folders for run in find_runs(Path(folder))]
    if other := next((one for one in opened if one.data != opened[0].data), None):
        raise InputError(
            f"look: expected runs with the same data, found others for {opened[0].name} and {other.name}; look at one "
            "at a time"
        )
    # A model that reads no tokens, such as that of the numbers of a series, has no words to show; a classifier predicts
    # none.
    if not isinstance(opened[0].task, DecoderText):
        inputs = getattr(opened[0].task.example(), "inputs", None)
        tokens = isinstance(inputs, Tensor) and inputs.dim() == 2 and not inputs.is_floating_point()
        if not tokens or not all(getattr(one.model, "autoregressive", False) for one in opened):
            does = "predicts something else" if tokens else "reads other inputs"
            raise InputError(
                f"{folders[0]}: expected a run whose model reads tokens and predicts the next one, found one that "
                f"{does}, which look does not show; mnemos report {folders[0]} shows what its memory is worth"
            )
    document = document_of(opened, max(one.length for one in opened), text, number, segments)
    return Look([one.record(document) for one in opened]).write(target)


def _open(folder: Path, text: str | Path | None) -> Opened:
    """A run, or a decoder of Transformers. Of a run that is not finished, `final_checkpoint` is opened."""
    if is_model(folder):
        run = folder.parent
        if any((run / name).is_file() for name in ("recipe.json", "linearised.json")):
            raise InputError(f"{folder}: expected the folder of a run, found its model; name {run}")
    linearised = (folder / "linearised.json").is_file()
    source = folder / "model" if linearised else folder
    if linearised and not is_source(str(source)):
        raise InputError(
            f"{folder}: expected a finished run of mnemos linearise, found no model in it; end it with the same "
            "command, or look at the decoder that it started from"
        )
    if not (folder / "recipe.json").is_file() and is_source(str(source)):
        if text is None:
            raise InputError(f"{folder}: expected --text FILE beside a decoder of Transformers, found none; add it")
        from mnemos.hugging_face import functional
        from mnemos.lab.hosted.hub import language_model

        model, tokenizer = language_model(str(source))
        step = functional(model)
        data, length = tokenizer.get_vocab(), segment_length(step)
        return Opened(folder.name, "", step, DecoderText(tokenizer), data, length, folder)
    recipe, task, model = open_run(folder)
    about = [f"run {'/'.join(folder.resolve().parts[-2:])}", trained(folder, recipe, task)]
    # The segments in which the run was trained and scored: a memory is emptied where it passes from one to the next.
    cut = recipe.train.rollout.segment_length or (task.max_length if task.carries_state else 0)
    about_run, length = " · ".join(filter(None, about)), segment_length(model, cut)
    return Opened(recipe.name, about_run, model, task, recipe.data, length, folder)


def trained(run: Path, recipe: Recipe, task: Task) -> str:
    """How far a run was trained, and its score; a line on the terminal if it is not finished."""
    if Result.exists(run):
        result, metric = Result.read(run), task.metrics[0]
        split, scores = ("validation", result.valid) if result.test is None else ("test", result.test)
        parts = [f"trained with {result.steps:,} updates" if result.steps else "trained"]
        parts += [f"{metric.text(scores[metric.name])} on the {split} split"] if metric.name in scores else []
        without = result.controls.get("emptied", {})
        parts += [f"{metric.text(without[metric.name])} with the caches emptied"] if metric.name in without else []
        return ", ".join(parts)
    if not steps(run / "checkpoints") and not steps(run / "checkpoints", "best"):
        return ""
    unfinished = f"not finished: {final_checkpoint(run)[0]} of {recipe.train.steps:,}"
    say(f"mnemos: warning: {run}: {unfinished}", file=sys.stderr)
    return unfinished


class DecoderText(Task):
    """The text of a decoder of Transformers: its tokenizer's tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer)

    def words(self, tokens: Sequence[int]) -> list[tuple[str, int]]:
        return [(self.tokenizer.decode([token]), 1) for token in tokens]

    def encode(self, text: bytes, where: str) -> list[int]:
        return [int(token) for token in self.tokenizer(text.decode(errors="replace"))["input_ids"]]


def find_runs(folder: Path) -> list[Path]:
    """The runs of a comparison, the first seed of each; or the folder itself."""
    if not folder.is_dir() or (folder / "recipe.json").is_file() or (folder / "config.json").is_file():
        return [folder]
    rows = [row for row in sorted(folder.iterdir()) if row.is_dir()]
    first = [seed for row in rows for seed in sorted(one for one in row.iterdir() if one.is_dir())[:1]]
    return [run for run in first if is_model(run) or (run / "recipe.json").is_file()] or [folder]


def document_of(
    opened: Sequence[Opened], length: int, text: str | Path | None, number: int | None, segments: int
) -> Document:
    """What `look_at_runs` lets the models read, in segments of `length` tokens."""
    segments, task = min(segments, max(1, TOKENS // (length * len(opened)))), opened[0].task
    most = length * segments

    # --- a text of the user's, or a document of the test split ---
    if text is not None:
        tokens = task.encode(check_text(read_bytes(text), str(text)), str(text))[:most]
        if not tokens:
            raise InputError(f"{text}: expected a text of at least one word, found none; name another file")
        return Document.of_text(tokens, task.words, Path(text).name, task.other)
    if task.carries_state:
        row = number or 0
        rows, valid = documents(task, length, row + 1, segments)
        if row >= len(rows):
            raise InputError(f"--document: expected a number below {len(rows)}, found {row}; lower it")
        tokens = rows[row][valid[row]].tolist()
        about = f"document {row} of the test split" + ("" if number is not None else ", the first")
        return Document.of_text(tokens, task.words, about, task.other)

    # --- a row, which may ask a question ---
    batch = next(iter(task.batches("test", max(ROWS, (number or 0) + 1))))
    models = [(one.model, one.length) for one in opened]
    row, why = choose_row(task, models, batch) if number is None else (number, "")
    if row >= len(batch.inputs):
        raise InputError(f"--document: expected a number below {len(batch.inputs)}, found {row}; lower it")
    valid = torch.ones_like(batch.inputs[row], dtype=torch.bool) if batch.mask is None else batch.mask[row]
    tokens, targets = batch.inputs[row][valid].tolist()[:most], batch.targets[row][valid].tolist()[:most]
    return Document(
        *(tuple(tokens), shown_words(tokens, task.words), tuple(targets)),
        about=f"row {row} of the test split" + (f", {why}" if why else ""),
        question=task.question(tokens),
        name=lambda token: shown_words([token], task.words)[0][0],
        guess=task.reference.get(GUESS),
        other=task.other,
    )


@torch.no_grad()
def choose_row(task: Task, models: Sequence[tuple[nn.Module, int]], batch: Any) -> tuple[int, str]:
    """Of rows that ask a question: the first of those told farthest back whose answer needs the state; else row 0; and
    why.

    models: each with the tokens of its segments. An answer needs the state if no model that knows it gives it half of
    that probability without its state. Of these rows, one is taken whose answer is not the likeliest token of a model
    that does not know it, if there is one.
    """
    questions = [task.question(row.tolist()) for row in batch.inputs]
    apart = [-1 if one is None else batch.inputs.shape[1] - len(one.ask) - one.fact[1] for one in questions]
    if (far := max(apart)) < 0:
        return 0, "the first"
    rows = [i for i, words in enumerate(apart) if words == far]
    why = f"the first of those told {far:,} tokens before the question"
    inputs, targets = batch.inputs[rows], batch.targets[rows, -1]
    heard = max(one.fact[1] for i, one in enumerate(questions) if one is not None and i in rows)
    fits, unlikely, needed = torch.ones(len(rows), dtype=torch.bool), torch.ones(len(rows), dtype=torch.bool), False
    for model, length in models:
        if not (cut := (inputs.shape[1] - 1) // length * length):  # one segment has the whole row: no state is needed
            return rows[0], why
        begin = min(cut, -(-heard // length) * length)
        with evaluating(model):
            _, state = read_segments(model, inputs[:, :cut], None, length)
            fresh = reset(state, torch.ones(len(rows), dtype=torch.bool))
            # Guessed: with the state emptied before the question, or so early that the rest of the text was read again.
            answers = [
                log_probabilities(model, read_segments(model, inputs[:, first:], one, length)[0][:, -1])
                for first, one in ((cut, state), (cut, fresh), (begin, fresh))
            ]
        known, late, early = (one.gather(1, targets[:, None])[:, 0].exp() for one in answers)
        unlikely &= (known >= KNOWN) | (answers[0].argmax(-1) != targets)
        if (known >= KNOWN).any():
            fits &= (known >= KNOWN) & (torch.maximum(late, early) < LOST * known)
            needed = True
    if not (needed and fits.any()):
        return rows[0], why
    why += " whose answer is known with the state and not guessed without it"
    if (best := fits & unlikely).any():
        return rows[int(best.nonzero()[0])], why
    return rows[int(fits.nonzero()[0])], f"{why}, but the likeliest token of a model that does not know it"
