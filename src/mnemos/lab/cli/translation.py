"""The commands of translation: `mnemos tokenizer`, `translate` and `score`."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path

from mnemos.errors import InputError, say

from .parsers import CommandParser


def tokenizer(arguments: list[str]) -> int:
    """Learn sub-words from text."""
    from mnemos.lab.tasks.files import first_names
    from mnemos.lab.translation.parallel_text import read_lines
    from mnemos.lab.translation.translation_vocabulary import SubWordTokens

    about = "Learn sub-words from text files by byte-pair encoding, and write them as a tokenizer.json."
    parser = CommandParser("tokenizer", about)
    parser.add_argument("files", nargs="+", metavar="FILE", help="text, a sentence per line, gzipped or not")
    parser.add_argument("--size", type=int, default=10_000, metavar="N", help="sub-words (%(default)s)")
    parser.add_argument("--lowercase", action="store_true", help="lower-case the text first")
    parser.add_argument("--out", required=True, metavar="FILE", help="the tokenizer.json")
    options = parser.parse_args(arguments)
    out = Path(options.out)
    if out.exists():
        raise InputError(f"--out {out}: expected a new file, found one; name another, or remove it")
    if not out.parent.is_dir():
        raise InputError(f"--out {out}: expected a file in a folder that exists, found no folder {out.parent}; make it")

    def lines() -> Iterator[str]:
        for file in options.files:
            yield from (" ".join(line.split()) for line in read_lines(Path(file)))

    made = SubWordTokens.train(lines(), options.size, options.lowercase, first_names(options.files), "--size")
    made.write(out)
    more = "" if options.lowercase else " (with --data.lowercase False for recipes that lower-case)"
    say(f"{out}: {made.size:,} sub-words; --data.tokenizer {out} trains a translation with them{more}")
    return 0


def translate(arguments: list[str]) -> int:
    """Translate text, line by line."""
    from mnemos.lab.translation.parallel_text import lines_of, read_lines
    from mnemos.lab.translation.translate import TrainedTranslator

    about = "Translate text, line by line, with a run's model. Reads the standard input, or FILE."
    parser = CommandParser("translate", about)
    parser.add_argument("run", help="the folder of a run, or of its model")
    parser.add_argument("file", nargs="?", metavar="FILE", help="text, a sentence per line (the standard input)")
    parser.add_argument("--beams", type=int, metavar="N", help="hypotheses that are kept (as the run was scored)")
    about = "print the N best translations of each sentence, as NUMBER ||| TEXT ||| SCORE"
    parser.add_argument("--n-best", type=int, default=1, metavar="N", help=about)
    about = (
        "scores are divided by the length to this power; above 0 favours longer translations (as the run was scored)"
    )
    parser.add_argument("--length-penalty", type=float, metavar="X", help=about)
    options = parser.parse_args(arguments)
    translator = TrainedTranslator(options.run)
    decoding = translator.decoding(options.beams, options.n_best, options.length_penalty)
    name = options.file or "standard input"
    lines = list(read_lines(Path(name)) if options.file else lines_of(iter([sys.stdin.buffer.read()]), name))
    progress = _progress if sys.stderr.isatty() else None
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # as the input is, whatever the locale
    for number, found in enumerate(translator.translate(lines, decoding, f"{name}: line", progress)):
        for one in found:
            say(f"{number} ||| {one.text} ||| {one.score:.4f}" if options.n_best > 1 else one.text, flush=True)
    return 0


def _progress(done: int, whole: int) -> None:
    print(f"\rmnemos: {done:,} of {whole:,} sentences", end="\n" if done == whole else "", file=sys.stderr, flush=True)


def score(arguments: list[str]) -> int:
    """Print BLEU and chrF of translations."""
    from mnemos.lab.run.trained import translate_test_split
    from mnemos.lab.translation.translation_scores import score_runs

    about = "Print BLEU and chrF of runs, averaged models or files of translations on a test split, and whether each "
    parser = CommandParser("score", f"{about}differs from the first by more than the choice of sentences (bootstrap).")
    about = "the folder of a finished run or of an averaged model, or a file of translations, one per line"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=about)
    parser.add_argument("--samples", type=int, default=1000, metavar="N", help="draws of the bootstrap (%(default)s)")
    options = parser.parse_args(arguments)
    for run in options.runs:
        translate_test_split(Path(run))
    score_runs(options.runs, options.samples)
    return 0
