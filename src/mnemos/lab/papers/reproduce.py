"""`mnemos reproduce PAPER[/CLAIM]`: measure a paper's claims and show the results next to the paper's numbers."""

import difflib
import importlib
import time
from dataclasses import dataclass
from pathlib import Path

from mnemos.atomic import write_json
from mnemos.errors import say
from mnemos.lab.run.provenance import provenance, trained
from mnemos.types import InputError, JSONObject

from .cached_transformers.claims import CACHED_TRANSFORMERS
from .claim import Claim, Paper
from .findings import Finding
from .linear_transformers.claims import LINEAR_TRANSFORMERS
from .memformer.claims import MEMFORMER
from .verdicts import SYMBOLS, verdicts

PAPERS = {paper.name: paper for paper in (CACHED_TRANSFORMERS, LINEAR_TRANSFORMERS, MEMFORMER)}


@dataclass(frozen=True)
class Options:
    """How to reproduce a claim.

    out: the output folder, one per paper. data: a folder with the claim's data: CIFAR-10 or MNIST (None: scikit-learn's
    digits), recordings, or text. steps: the number of updates of each run (None: the claim's own number). run: a
    finished run to draw instead of training one. recipes_only: only print which recipes would be trained; no model
    runs, and no file is written.
    """

    out: Path
    data: Path | None = None
    steps: int | None = None
    seeds: int = 1
    run: Path | None = None
    recipes_only: bool = False


def reproduce(target: str, options: Options) -> list[JSONObject]:
    """Reproduce PAPER/CLAIM, or every claim of PAPER. Returns the contents of each CLAIM.json in `options.out`.

    Each claim is printed when it is finished. With `options.recipes_only` no file is written. Runs that are already
    finished in the folder are not trained again.
    Raises InputError for an unknown name, with the most similar one, and for options out of range.
    """
    about, claims = chosen(target)
    _check(options)
    found = []
    for claim in claims:
        say(f"{about.name}/{claim.name}: {claim.about}\n  The claim: {claim.says}")
        for row in verdicts(about.name, claim.name):
            say(f"  {SYMBOLS[row.symbol].capitalize()}: {row.item}. {row.line}", flush=True)
        found.append(_reproduce_claim(about, claim, options))
    return found


def chosen(target: str) -> tuple[Paper, tuple[Claim, ...]]:
    """The paper and the claims named by PAPER[/CLAIM]. Raises InputError for an unknown name."""
    name, slash, wanted = target.strip("/").partition("/")
    if name not in PAPERS:
        near = difflib.get_close_matches(name, PAPERS, 1, 0.5)
        hint = f"did you mean {near[0]!r}?" if near else "choose one of these"
        raise InputError(f"expected a paper ({', '.join(PAPERS)}), found {name!r}; {hint}")
    about = PAPERS[name]
    return about, (about.claim(wanted),) if slash else about.claims


def listing() -> str:
    """A list of all papers and claims, one per line."""
    lines = []
    for about in PAPERS.values():
        lines.append(f"{about.name}: {about.title}")
        lines += [f"  mnemos reproduce {about.name}/{claim.name:10} {claim.about}" for claim in about.claims]
    return "\n".join(lines)


def _check(options: Options) -> None:
    if options.seeds < 1:
        raise InputError(f"--seeds: expected at least 1, found {options.seeds}")
    if options.steps is not None and options.steps < 1:
        raise InputError(f"--steps: expected at least 1, found {options.steps}")
    if options.data is not None and not options.data.exists():
        raise InputError(
            f"--data {options.data}: expected a folder of data or a file of text, but the path does not exist"
        )
    if options.out.exists() and not options.out.is_dir():
        raise InputError(f"--out {options.out}: expected a folder, found a file; choose another path")


def _reproduce_claim(about: Paper, claim: Claim, options: Options) -> JSONObject:
    module, _, function = claim.make.partition(":")
    start, origin = time.perf_counter(), provenance(0, "cpu")
    finding: Finding = getattr(importlib.import_module(module), function)(claim, options)
    finding.show()
    result = {
        "paper": about.name,
        "title": about.title,
        "claim": claim.name,
        "about": claim.about,
        "says": claim.says,
        **finding.to_dict(),
        "trained": [trained(run, str(run)) for run in finding.runs if (run / "run.json").is_file()],
        "seconds": time.perf_counter() - start,
        "provenance": origin,
    }
    if not options.recipes_only:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"{claim.name}.json"
        write_json(path, result)
        from .claim_page import write_claim_page  # what only names recipes needs no page

        page = options.out / f"claim-{claim.name}.html"
        write_claim_page(result, finding, page)
        for written in (*finding.files, path, page):
            say(written)
    say(flush=True)
    return result
