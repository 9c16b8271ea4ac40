"""`mnemos reproduce PAPER[/CLAIM]`: measure a paper's claims and show the results next to the paper's numbers."""

import importlib
import time
from dataclasses import dataclass
from pathlib import Path

from mnemos.atomic import check_output_folder, write_json
from mnemos.errors import say
from mnemos.lab.run.provenance import provenance, trained
from mnemos.types import InputError, JSONObject

from .claims import PAPERS, Claim, Paper, choose
from .findings import Finding
from .verdicts import SYMBOLS, verdicts


class OtherDataError(InputError):
    """The data are not this claim's, or it has none and needs some."""


@dataclass(frozen=True)
class Options:
    """How to reproduce a claim.

    out: the output folder, one per paper. data: a folder with the claim's data: CIFAR-10 or MNIST (None: scikit-learn's
    digits), recordings, or text. steps: the number of updates of each run (None: the claim's own number). jobs: runs at
    a time, as `compare` has them. run: a finished run to draw instead of training one.
    """

    out: Path
    data: Path | None = None
    steps: int | None = None
    seeds: int = 1
    jobs: int = 1
    run: Path | None = None


def reproduce(target: str, options: Options) -> list[JSONObject]:
    """Reproduce PAPER/CLAIM, or every claim of PAPER. Returns the contents of each CLAIM.json in `options.out`.

    Runs that are already finished in the folder are not trained again.
    Raises InputError for an unknown name, with the most similar one, for options out of range, and for those
    of training where the claim trains nothing; of a whole paper, a claim whose data are not there is left out, with a
    line that says so.
    """
    paper, claims = chosen(target)
    for name, count in (("seeds", options.seeds), ("jobs", options.jobs), ("steps", options.steps)):
        if count is not None and count < 1:
            raise InputError(f"--{name}: expected at least 1, found {count}; raise it")
    if options.data is not None and not options.data.exists():
        raise InputError(
            f"--data {options.data}: expected a folder of data or a file of text, but the path does not exist"
        )
    given = {"data": options.data, "steps": options.steps, "seeds": options.seeds > 1, "run": options.run}
    unread = [f"--{name}" for name, value in given.items() if value] if claims[0].measures and len(claims) == 1 else []
    if unread:
        found = f"{paper.name}/{claims[0].name} measures and trains nothing"
        raise InputError(f"expected no options of training, found {', '.join(unread)}: {found}; leave them out")
    check_output_folder(options.out)
    results = []
    for claim in claims:
        say(f"{paper.name}/{claim.name}: {claim.about}\n  The claim: {claim.says}")
        for row in verdicts(paper.name, claim.name):
            say(f"  {SYMBOLS[row.symbol].capitalize()}: {row.item}. {row.line}", flush=True)
        # --- the claim's own function ---
        module, _, function = claim.make.partition(":")
        start, origin = time.perf_counter(), provenance(0, "cpu")  # before it: the code may change while models train
        try:
            finding: Finding = getattr(importlib.import_module(module), function)(claim, options)
        except OtherDataError as error:  # the other claims of the paper may be able to read them
            if len(claims) == 1:
                raise
            say(f"  Not run: {error}\n", flush=True)
            continue
        finding.show()
        result = {
            "paper": paper.name,
            "title": paper.title,
            "claim": claim.name,
            "about": claim.about,
            "says": claim.says,
            **finding.to_dict(),
            "trained": [trained(run, str(run)) for run in finding.runs if (run / "run.json").is_file()],
            "seconds": time.perf_counter() - start,
            "provenance": origin,
        }
        results.append(result)
        # --- its files: each claim's when it is finished, because the next may take hours or fail ---
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(path := options.out / f"{claim.name}.json", result)
        for written in (*finding.files, path):
            say(written)
        say(flush=True)
    return results


def chosen(target: str) -> tuple[Paper, tuple[Claim, ...]]:
    """The paper and the claims named by PAPER[/CLAIM]. Raises InputError for an unknown name."""
    name, slash, claim = target.strip("/").partition("/")
    paper = choose(name, PAPERS, "a paper")
    return paper, (paper.claim(claim),) if slash else paper.claims


def listing() -> str:
    """A list of all papers and claims, one per line."""
    lines = []
    for paper in PAPERS.values():
        lines.append(f"{paper.name}: {paper.title}")
        lines += [f"  mnemos reproduce {paper.name}/{claim.name:10} {claim.about}" for claim in paper.claims]
    return "\n".join(lines)
