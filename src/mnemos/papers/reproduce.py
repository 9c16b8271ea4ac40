"""`mnemos reproduce PAPER[/CLAIM]`: what a paper says, and what is found here, side by side."""

import importlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mnemos.atomic import write_json
from mnemos.train.provenance import provenance
from mnemos.types import InputError

from .claims import PAPERS, Claim, Paper, paper
from .findings import Finding


@dataclass(frozen=True)
class Options:
    """How a claim is reproduced.

    out: a folder of the paper's own; data: a folder with CIFAR-10 or MNIST (None: scikit-learn's digits), of
    recordings or of text, as the claim has it; steps: updates of each run (None: the claim's own number); run: a
    finished run to draw, instead of a new one;
    recipes_only: nothing is trained or timed.
    """

    out: Path
    data: Path | None = None
    steps: int | None = None
    seeds: int = 1
    run: Path | None = None
    recipes_only: bool = False


def reproduce(target: str, options: Options) -> list[dict[str, Any]]:
    """Reproduce PAPER/CLAIM, or each claim of PAPER; returns what each CLAIM.json in `options.out` says.

    Every claim is printed as it is done. Runs that are finished in the folder are not trained again. Raises InputError
    for a name that is not known, with the nearest one.
    """
    about, claims = chosen(target)
    _check(options)
    found = []
    for claim in claims:
        print(f"{about.name}/{claim.name}: {claim.about}\n  the paper: {claim.says}", flush=True)
        found.append(_one(about, claim, options))
    return found


def chosen(target: str) -> tuple[Paper, tuple[Claim, ...]]:
    """The paper and the claims that PAPER[/CLAIM] names."""
    name, slash, wanted = target.strip("/").partition("/")
    about = paper(name)
    return about, (about.claim(wanted),) if slash else about.claims


def listing() -> str:
    """Every paper and claim, a line each."""
    lines = []
    for about in PAPERS.values():
        lines.append(f"{about.name}: {about.title}")
        lines += [f"  mnemos reproduce {about.name}/{claim.name:10} {claim.about}" for claim in about.claims]
    return "\n".join(lines)


def _check(options: Options) -> None:
    if options.seeds < 1:
        raise InputError(f"--seeds must be at least 1, found {options.seeds}")
    if options.steps is not None and options.steps < 1:
        raise InputError(f"--steps must be at least 1, found {options.steps}")
    if options.data is not None and not options.data.exists():
        raise InputError(f"--data {options.data}: expected a folder of data (or a file of text), found none")
    if options.out.exists() and not options.out.is_dir():
        raise InputError(f"--out {options.out}: expected a folder, found a file; name another")


def _one(about: Paper, claim: Claim, options: Options) -> dict[str, Any]:
    module, _, function = claim.make.partition(":")
    start, origin = time.perf_counter(), provenance(0, "cpu")
    finding: Finding = getattr(importlib.import_module(module), function)(claim, options)
    finding.show()
    options.out.mkdir(parents=True, exist_ok=True)
    result = {
        "paper": about.name,
        "title": about.title,
        "claim": claim.name,
        "about": claim.about,
        "says": claim.says,
        **finding.to_dict(),
        "seconds": time.perf_counter() - start,
        "provenance": origin,
    }
    path = options.out / f"{claim.name}.json"
    write_json(path, result)
    for written in (*finding.files, path):
        print(written)
    print(flush=True)
    return result
