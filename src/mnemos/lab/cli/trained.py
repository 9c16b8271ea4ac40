"""Commands for trained runs: `mnemos eval`, `predict`, `detect`, `sample`, `average`, `export` and `report`."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from mnemos.errors import InputError, say

from .parsers import CommandParser

if TYPE_CHECKING:
    from mnemos.lab.vision.detection.scenes import Annotation


def evaluate(arguments: list[str]) -> int:
    """Score a run's model, with and without its memory."""
    from mnemos.lab.run.trained import evaluate_run

    about = "Evaluate a run's model, as trained and with its memory emptied, exchanged, frozen and closed."
    more = "--data.FIELD value changes a setting of the data. --data.path OTHER (photos: --data.folder) scores a "
    more += "file or folder: the test split if it has splits of its own, else the whole of it. --model.FIELD value "
    more += "changes how far the model reads, such as --model.attention.memory 640; it changes no weights."
    parser = CommandParser(
        "eval",
        about,
        usage="mnemos eval RUN [--split SPLIT] [--rows N] [--data.FIELD value ...] [--model.FIELD value ...]",
        epilog=more,
    )
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--split", choices=("valid", "test"), default="test", help="the split (%(default)s)")
    parser.add_argument("--rows", type=int, default=0, metavar="N", help="score N rows, in whole batches (all)")
    options, fields = parser.parse_known_args(arguments)
    evaluate_run(Path(options.run), options.split, fields, options.rows)
    return 0


def predict(arguments: list[str]) -> int:
    """Print what a run's model says about files."""
    from mnemos.lab.evaluate.predict import predict

    about = "Print what a run's model says about files: the most probable classes of images, the words of recordings, "
    parser = CommandParser("predict", f"{about}or the most probable continuation of texts.")
    parser.add_argument("run", help="the run's folder")
    about = "an image, a wav file or a text, as the model reads them, or a folder of them; - is a text from stdin"
    parser.add_argument("files", nargs="+", metavar="FILE", help=about)
    parser.add_argument("--top", type=int, metavar="N", help="classes per image (3)")
    parser.add_argument("--length", type=int, metavar="N", help="tokens that continue a text (200)")
    options = parser.parse_args(arguments)
    done = unread = 0
    for found in predict(options.run, options.files, top=options.top, length=options.length):
        done += 1
        unread += bool(found.problem)
        if found.problem:
            say(f"mnemos: {found.problem}", file=sys.stderr, flush=True)
        else:
            say(f"{found.file}: {found.text}", flush=True)
    return _unread_code(unread, done)


def _unread_code(unread: int, of: int) -> int:
    """The exit code where some files could not be read: 1, or 2 for wrong input where none could."""
    return 2 if 0 < unread == of else int(unread > 0)


def detect(arguments: list[str]) -> int:
    """Find objects in photos."""
    from mnemos.lab.vision.detect import TrainedDetector
    from mnemos.lab.vision.detection.detections import DETECTIONS

    about = "Find objects in photos with a run's detector. The photos are written with boxes, masks, names and scores "
    about += "drawn on them, beside detections.json, which has all objects in COCO's result format."
    parser = CommandParser("detect", about)
    parser.add_argument("run", help="the folder of a run, or of its model")
    parser.add_argument("photos", nargs="+", metavar="PHOTO", help="a photo, or a folder of photos")
    parser.add_argument("--out", metavar="DIR", help="the folder of the results; by default RUN/detected")
    about = "the least score of an object (%(default)s); 0: all that the detector reports"
    parser.add_argument("--score", type=float, default=0.5, metavar="S", help=about)
    about = "print all objects as JSON on the standard output, instead of a line for each photo"
    parser.add_argument("--json", action="store_true", help=about)
    options = parser.parse_args(arguments)
    out = Path(options.out or Path(options.run) / "detected")
    detector = TrainedDetector(options.run)
    lines = not options.json
    shown = sys.stderr.isatty() and not (lines and sys.stdout.isatty())  # lines of photos are progress enough
    every: list[Annotation] = []
    done = unread = 0
    for photo, count in detector.detect(options.photos, options.score, out):
        done += 1
        every += photo.objects
        if photo.problem:
            unread += 1
            say(f"mnemos: {photo.problem}", file=sys.stderr, flush=True)
        elif lines:
            say(f"{photo.file}: {photo.text}", flush=True)
        if shown:
            print(f"\rmnemos: {done:,} of {count:,} photos", end="\n" * (done == count), file=sys.stderr, flush=True)
    if options.json:
        say(json.dumps(every))
    left = f"; {unread:,} of {done:,} photos could not be read" if unread else ""
    say(f"{out / DETECTIONS}: {len(every):,} objects in {_pictures(every):,} photos{left}", file=sys.stderr)
    return _unread_code(unread, done)


def _pictures(objects: Iterable["Annotation"]) -> int:
    return len({one["image_id"] for one in objects})


def sample(arguments: list[str]) -> int:
    """Generate images or text."""
    from mnemos.lab.report.image_grids import write_grids
    from mnemos.lab.run.trained import sample_run
    from mnemos.lab.tasks.task import Sampling

    default = Sampling()
    parser = CommandParser("sample", "Generate with a run's model: images are written to RUN/sampled, text is printed.")
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--count", type=int, help="number of images (24), texts (1) or rows (4)")
    parser.add_argument("--length", type=int, default=default.length, help="tokens of a text (%(default)s)")
    parser.add_argument("--prompt", help="text that the model continues")
    parser.add_argument(
        "--temperature", type=float, default=default.temperature, help="0: the most probable token (%(default)s)"
    )
    parser.add_argument("--top-k", type=int, default=default.top_k, help="sample from the k most probable (0: all)")
    about = "sample from the most probable tokens of this total probability"
    parser.add_argument("--top-p", type=float, default=default.top_p, help=about)
    parser.add_argument("--min-p", type=float, default=default.min_p, help="least share of the greatest probability")
    parser.add_argument("--stop", metavar="TEXT", help="end a text where this text is written")
    parser.add_argument("--seed", type=int, default=default.seed, help="random seed (%(default)s)")
    fields = vars(parser.parse_args(arguments))
    folder = Path(fields.pop("run"))

    if (written := sample_run(folder, Sampling(**fields))) is not None:
        say(*write_grids(written), sep="\n")
    return 0


def average(arguments: list[str]) -> int:
    """Average the weights of a run's last checkpoints."""
    from mnemos.lab.run.weights import average_run

    parser = CommandParser("average", "Write the model with the averaged weights of a run's last checkpoints.")
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--last", type=int, default=10, metavar="N", help="checkpoints, the newest ones (%(default)s)")
    parser.add_argument("--out", metavar="DIR", help="the model's folder; by default RUN/averaged-N")
    options = parser.parse_args(arguments)
    say(average_run(options.run, options.last, options.out))
    return 0


def export(arguments: list[str]) -> int:
    """Write a run's model for other programs."""
    from mnemos.lab.run.export import HF, export_run, export_run_programs, push
    from mnemos.programs.export import TARGETS

    about = (
        "Write a run's model as a checkpoint of Hugging Face Transformers, with its tokenizer and a model card, or as "
    )
    parser = CommandParser(
        "export",
        f"{about}programs that run without this library, state in and state out.",
    )
    parser.add_argument("run", help="the folder of a finished run, or of its model")
    about = "hf: Hugging Face Transformers; onnx; onnxruntime: ONNX with ONNX Runtime's kernel of linear attention; "
    about += "torch: torch.export (%(default)s)"
    parser.add_argument("--to", choices=(HF, *TARGETS), default=HF, help=about)
    parser.add_argument("--out", metavar="DIR", help="the new folder; by default RUN and the name of the format")
    about = "with --to hf: also upload the folder to this repository of the Hub"
    parser.add_argument("--push", metavar="REPOSITORY", help=about)
    options = parser.parse_args(arguments)
    if options.to != HF:
        if options.push:
            raise InputError(f"--push: expected --to {HF} beside it, found --to {options.to}; leave one out")
        say(export_run_programs(options.run, options.to, options.out))
        return 0
    out = export_run(options.run, options.out)
    say(out)
    if options.push:
        say(push(out, options.push))
    return 0


def report(arguments: list[str]) -> int:
    """Write a page about runs, or serve it while they are trained."""
    parser = CommandParser("report", "Write an HTML page about runs or a comparison.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run or of a comparison")
    parser.add_argument("--out", metavar="FILE", help="the page; by default report.html in the first folder")
    about = "serve the page of runs that are being trained, to this machine alone, until Ctrl-C"
    parser.add_argument("--watch", action="store_true", help=about)
    options = parser.parse_args(arguments)
    runs = [Path(run) for run in options.runs]
    if options.watch:
        if options.out:
            raise InputError("--watch: expected no --out, found one; leave one of them out")
        from mnemos.lab.report.watch import watch

        watch(runs)
        return 0
    from mnemos.lab.report.page import write_report

    page, first = write_report(runs, Path(options.out) if options.out else None)
    say(page)
    say(f"Open {page.resolve().as_uri()} in a browser.\n{first}")
    return 0
