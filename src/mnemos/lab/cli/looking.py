"""The command `mnemos look`: the page of what a model's memories hold."""

from pathlib import Path

from mnemos.errors import say

from .parsers import CommandParser


def look(arguments: list[str]) -> int:
    """Write the page of what the memories of trained models hold while they read a document."""
    from mnemos.lab.look.viewer import SEGMENTS, TOKENS, look_at_runs

    about = (
        "Write a page on which one looks, segment by segment, at what the memories of trained models hold: what was "
    )
    about += "written and read, what a prediction used, and what is lost when a part is emptied."
    more = "Of a run of images, the page has the two branches of each cached layer and the slots that answered."
    parser = CommandParser("look", about, epilog=more)
    said = "the folder of a run or of a comparison (one run of each recipe), or a decoder of Transformers with --text"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=said)
    parser.add_argument("--text", metavar="FILE", help="a text that the models read (a document of the test split)")
    said = "which document of the test split, from 0 (the first; of rows that ask a question, one told far back whose "
    parser.add_argument("--document", type=int, metavar="N", help=f"{said}answer the models do not guess)")
    said = f"segments at most (%(default)s), and at most {TOKENS:,} tokens of all models together"
    parser.add_argument("--segments", type=int, default=SEGMENTS, metavar="N", help=said)
    parser.add_argument("--out", metavar="FILE", help="the page; by default look.html in the first folder")
    options = parser.parse_args(arguments)
    runs = [Path(run) for run in options.runs]
    say(look_at_runs(runs, options.text, options.out, options.document, options.segments))
    return 0
