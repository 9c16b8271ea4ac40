"""The command of detection: `mnemos detect RUN PHOTO ...`."""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mnemos.lab.vision.detection.scenes import Annotation

ABOUT = (
    "Find objects in photos with a run's detector. The photos are written with boxes, masks, names and scores drawn on "
    "them, beside detections.json, which has all objects in COCO's result format."
)


def detect(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    """Run the command: 1 if a photo could not be read, else 0. parser: of the command, without arguments."""
    from mnemos.lab.vision.detect import TrainedDetector
    from mnemos.lab.vision.detection.detections import DETECTIONS

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
            print(f"mnemos: {photo.problem}", file=sys.stderr, flush=True)
        elif lines:
            print(f"{photo.file}: {photo.text}", flush=True)
        if shown:
            print(f"\rmnemos: {done:,} of {count:,} photos", end="\n" * (done == count), file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps(every))
    left = f"; {unread:,} of {done:,} photos could not be read" if unread else ""
    print(f"{out / DETECTIONS}: {len(every):,} objects in {_pictures(every):,} photos{left}", file=sys.stderr)
    return int(unread > 0)


def _pictures(objects: Iterable["Annotation"]) -> int:
    return len({one["image_id"] for one in objects})
