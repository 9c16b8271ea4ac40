"""`mnemos reproduce PAPER[/CLAIM]`: measure a paper's claims and show the results next to the paper's numbers."""

import base64
import importlib
import time
from dataclasses import dataclass
from pathlib import Path

from mnemos.atomic import check_output_folder, read_bytes, write_json, write_text
from mnemos.errors import plural, say
from mnemos.lab.run.provenance import provenance, trained
from mnemos.types import InputError, JSONObject

from .claims import PAPERS, Claim, Paper, choose
from .findings import Finding, cell_text
from .verdicts import SYMBOLS, verdicts


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
    Raises InputError for an unknown name, with the most similar one, and for options out of range.
    """
    paper, claims = chosen(target)
    for name, count in (("seeds", options.seeds), ("jobs", options.jobs), ("steps", options.steps)):
        if count is not None and count < 1:
            raise InputError(f"--{name}: expected at least 1, found {count}; raise it")
    if options.data is not None and not options.data.exists():
        raise InputError(
            f"--data {options.data}: expected a folder of data or a file of text, but the path does not exist"
        )
    check_output_folder(options.out)
    results = []
    for claim in claims:
        say(f"{paper.name}/{claim.name}: {claim.about}\n  The claim: {claim.says}")
        for row in verdicts(paper.name, claim.name):
            say(f"  {SYMBOLS[row.symbol].capitalize()}: {row.item}. {row.line}", flush=True)
        # --- the claim's own function ---
        module, _, function = claim.make.partition(":")
        start, origin = time.perf_counter(), provenance(0, "cpu")  # before it: the code may change while models train
        finding: Finding = getattr(importlib.import_module(module), function)(claim, options)
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
        path, page = options.out / f"{claim.name}.json", options.out / f"claim-{claim.name}.html"
        write_json(path, result)
        write_text(page, claim_page(result, finding))
        for written in (*finding.files, path, page):
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


def claim_page(result: JSONObject, finding: Finding) -> str:
    """The page of a claim in the shell of all pages: tables, notes, figures. result: what its JSON file holds."""
    from mnemos.lab.report import markup  # what only names recipes needs no page
    from mnemos.lab.report.shell import html_page, script

    escape, paragraph = markup.escape, markup.paragraph
    tables = [
        markup.table(one.title, one.columns, [[escape(cell_text(cell)) for cell in row] for row in one.rows], "claims")
        for one in finding.tables
    ]
    pictures, paths = [], []
    for path in (*finding.files, *finding.runs):
        if path.suffix != ".png":
            paths.append(path)
            continue
        data = base64.b64encode(read_bytes(path)).decode()  # inside the page, so that it can be sent alone
        image = f'<img alt="{escape(path.stem)}" src="data:image/png;base64,{data}">'
        pictures.append(markup.figure([image], path.name, "full"))
    items = "".join(f"<li><code>{escape(path)}</code></li>" for path in paths)
    facts = {**result["provenance"], "seconds": f"{result['seconds']:.1f}"}
    origin = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>"
        for name, fact in facts.items()
        if fact is not None and not isinstance(fact, dict | list)
    )
    sections = {
        "tables": ("Further tables", "\n".join(tables[1:])),
        "figures": ("Figures", "\n".join(pictures)),
        "runs": ("Pages and runs", f"<ul>{items}</ul>" if items else ""),
        "provenance": ("Provenance", f'<dl class="facts">{origin}</dl>'),
    }
    filled = {slug: section for slug, section in sections.items() if section[1]}
    notes = "".join(f"<li>{markup.prose(note)}</li>" for note in finding.notes)
    opening = [
        paragraph(f"The claim: {result['says']}", "lead"),
        *tables[:1],
        f'<ul class="caveats">{notes}</ul>' if notes else "",
        markup.contents((slug, name) for slug, (name, _) in filled.items()),
    ]
    body = f'<section id="verdict" class="opening">\n{chr(10).join(filter(None, opening))}</section>\n'
    body += "\n".join(markup.folded(slug, name, text, slug == "figures") for slug, (name, text) in filled.items())
    runs = f" · {plural(len(finding.runs), 'run')}" if finding.runs else ""
    byline = paragraph(f"{result['paper']}/{result['claim']}{runs}", "byline")
    return html_page(f"{result['title']}: {result['about']}", body, byline, [script("page.js")])
