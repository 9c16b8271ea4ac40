"""The commands that use a trained model, from `mnemos predict` to `export`."""

import io
import itertools
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from mnemos.errors import say


def predict(run: Path, files: list[str], *, top: int | None = None, length: int | None = None) -> int:
    """Print what a run's model says about files.

    These are the most probable classes of images, the words of recordings, the most probable continuation of texts, and
    the next steps of series or the most probable classes of their last one.

    Args:
        run: the run's folder
        files: an image, a wav file, a text or a series (.csv, .tsv, .jsonl or .parquet), as the model reads them, or a
            folder of them; - is a text from stdin
        top: classes per image, or of a series' last step (3)
        length: tokens that continue a text (200), or steps that continue a series (1)
    """
    from mnemos.lab.evaluate.predict import predict

    done = unread = 0
    for one in predict(run, files, top=top, length=length):
        done += 1
        unread += bool(one.problem)
        say(
            f"mnemos: {one.problem}" if one.problem else f"{one.file}: {one.text}",
            file=sys.stderr if one.problem else sys.stdout,
            flush=True,
        )
    return _unread_code(unread, done)


def _unread_code(unread: int, of: int) -> int:
    """The exit code where some files could not be read: 1, or 2 for wrong input where none could."""
    return 2 if 0 < unread == of else int(unread > 0)


def detect(
    run: Path,
    photos: list[str],
    *,
    out: Path | None = None,
    score: float = 0.5,
    as_json: Annotated[bool, arg(name="json")] = False,
) -> int:
    """Find objects in photos with a run's detector.

    The photos are written with boxes, masks, names and scores drawn on them, beside detections.json, which has all
    objects in COCO's result format.

    Args:
        run: the folder of a run, or of its model
        photos: a photo, or a folder of photos
        out: the folder of the results; by default RUN/detected
        score: the least score of an object; 0: all that the detector reports
        as_json: print all objects as JSON on the standard output, instead of a line for each photo
    """
    from mnemos.lab.vision.detect import Photo
    from mnemos.lab.vision.detect import detect as find_objects
    from mnemos.lab.vision.detection.results import DETECTIONS

    out = out or run / "detected"
    shown = sys.stderr.isatty() and (as_json or not sys.stdout.isatty())  # lines of photos are progress enough
    done = itertools.count(1)

    def say_photo(photo: Photo, count: int) -> None:
        if photo.problem:
            say(f"mnemos: {photo.problem}", file=sys.stderr, flush=True)
        elif not as_json:
            say(f"{photo.file}: {photo.text}", flush=True)
        if shown:
            _show_progress(next(done), count, "photos")

    every = find_objects(run, photos, score, out, say_photo)
    objects, unread = [one for photo in every for one in photo.objects], sum(bool(photo.problem) for photo in every)
    if as_json:
        say(json.dumps(objects))
    left = f"; {unread:,} of them could not be read" if unread else ""
    say(f"{out / DETECTIONS}: {len(objects):,} objects in {len(every):,} photos{left}", file=sys.stderr)
    return _unread_code(unread, len(every))


def _show_progress(done: int, whole: int, unit: str) -> None:
    print(f"\rmnemos: {done:,} of {whole:,} {unit}", end="\n" * (done == whole), file=sys.stderr, flush=True)


def sample(
    run: Path,
    *,
    count: int | None = None,
    length: int = 500,
    prompt: str | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    stop: str | None = None,
    seed: int = 0,
) -> int:
    """Generate with a run's model: images are written to RUN/sampled, text is printed.

    Args:
        run: the run's folder
        count: images (24) or texts (1)
        length: tokens of a text
        prompt: text that the model continues
        temperature: 0: the most probable token
        top_k: of the k most probable tokens (0: all)
        top_p: of the most probable tokens with this total probability
        min_p: of tokens with at least this share of the greatest probability
        stop: end a text where this text is written
        seed: random seed
    """
    from mnemos.lab.report.outputs import write_grids
    from mnemos.lab.run.trained import sample_run
    from mnemos.lab.tasks.task import Sampling

    drawn = Sampling(count, length, prompt, temperature, top_k, top_p, min_p, stop, seed)
    if (written := sample_run(run, drawn)) is not None:
        say(*write_grids(written), sep="\n")
    return 0


def translate(
    run: Path,
    file: Path | None = None,
    *,
    beams: int | None = None,
    n_best: int = 1,
    length_penalty: float | None = None,
) -> int:
    """Translate text with a run's model, line by line.

    Args:
        run: the run's folder
        file: text, a sentence per line; by default the standard input
        beams: hypotheses that are kept (as the run was scored)
        n_best: print so many of the best translations of each sentence, as NUMBER ||| TEXT ||| SCORE
        length_penalty: scores are divided by the length to this power; above 0 favours longer translations (as the run
            was scored)
    """
    from mnemos.lab.translation.parallel_text import lines_of, read_lines
    from mnemos.lab.translation.translate import TrainedTranslator

    translator = TrainedTranslator(run)
    decoding = translator.decoding(beams, n_best, length_penalty)
    name = str(file or "standard input")
    lines = list(read_lines(file) if file else lines_of(sys.stdin.buffer, name))
    progress = (lambda done, whole: _show_progress(done, whole, "sentences")) if sys.stderr.isatty() else None
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # as the input is, whatever the locale
    for number, best in enumerate(translator.translate(lines, decoding, f"{name}: line", progress)):
        for one in best:
            say(f"{number} ||| {one.text} ||| {one.score:.4f}" if n_best > 1 else one.text, flush=True)
    return 0


def score(systems: list[Path], *, samples: int = 1000) -> int:
    """Print BLEU and chrF of runs or files of translations on a test split.

    Each but the first is compared with the first: whether it differs by more than the choice of sentences (bootstrap).

    Args:
        systems: the folder of a finished run, or a file of translations, one per line; at least one run
        samples: draws of the bootstrap
    """
    from mnemos.lab.translation.translation_scores import score_systems

    score_systems(systems, samples)
    return 0


def average(run: Path, *, last: int = 10, out: Path | None = None) -> int:
    """Write the model with the averaged weights of a run's last checkpoints.

    Args:
        run: the run's folder
        last: checkpoints, the newest ones
        out: the model's folder; by default RUN/averaged-N
    """
    from mnemos.lab.run.weights import average_run

    say(average_run(run, last, out))
    return 0


def export(
    run: Path,
    *,
    to: Literal["hf", "onnx", "onnxruntime", "torch"] = "hf",
    out: Path | None = None,
) -> int:
    """Write a run's model for other programs.

    It becomes a checkpoint of Hugging Face Transformers, with its tokenizer and a model card, or programs that run
    without this library, state in and state out.

    Args:
        run: the folder of a finished run, or of its model
        to: hf: Hugging Face Transformers; onnx; onnxruntime: ONNX with ONNX Runtime's kernel of linear attention;
            torch: torch.export
        out: the new folder; by default RUN and the name of the format
    """
    from mnemos.lab.run.export import export_run, export_run_programs

    say(export_run(run, out) if to == "hf" else export_run_programs(run, to, out))
    return 0
