"""The examples of README and docs run and print what they say; the files and commands that they name exist."""

import doctest
import itertools
import json
import os
import re
from pathlib import Path

import processes
import pytest
import torch

from mnemos import registry
from mnemos.lab.cli.verbs import VERBS, main

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = "\n".join(page.read_text() for page in FILES)
EXAMPLE = re.compile(r"```python\n(.*?)```\n(?:```text\n(.*?)```)?", re.DOTALL)
# Exporting takes seconds; it is the matter of tests/programs.
EXPORTS = re.compile(r"import export_programs|mnemos\.export\(")
MARK = "\x1e"  # between what two examples print


def examples(page: Path, exports: bool) -> list[tuple[int, str, str]]:
    """The line, the code and the output of each example of a page that says what it prints."""
    text = page.read_text()
    found = [(text.count("\n", 0, one.start()) + 2, *one.groups()) for one in EXAMPLE.finditer(text) if one[2]]
    return [one for one in found if bool(EXPORTS.search(one[1])) == exports]


RUNNABLE = {page.name: (page, found) for page in FILES if (found := examples(page, False))}
RARE = {f"{page.name}-exports": (page, found) for page in FILES if (found := examples(page, True))}


def in_turn(page: Path, parts: list[tuple[int, str, str]]) -> None:
    """Each with names, a folder and random numbers of its own; a traceback has the page and its line."""
    folder, seed = Path.cwd(), torch.initial_seed()
    for line, code, _ in parts:
        (folder / str(line)).mkdir()
        os.chdir(folder / str(line))
        torch.manual_seed(seed)
        exec(compile("\n" * (line - 1) + code, page, "exec"), {"__name__": "__main__"})
        print(MARK, end="", flush=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RUNNABLE, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in RARE)])
def test_the_examples_of_a_page_print_what_they_say(name, tmp_path):
    page, parts = (RUNNABLE | RARE)[name]
    done = processes.run(in_turn, page, parts, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for (line, _, said), found in zip(parts, done.stdout.split(MARK)[:-1], strict=True):
        # "..." stands for what differs from run to run, as in a doctest
        right = doctest.OutputChecker().check_output(said, found, doctest.ELLIPSIS)
        assert right, f"{name}, line {line}: expected {said!r}, found {found!r}"


def test_there_are_examples_and_no_placeholder_is_left():
    assert sum(len(found) for _, found in RUNNABLE.values()) >= 40
    found = set(re.findall(r"\b[A-Z]{4,}_[A-Z]+\b|\bPARAMETERS\b|^MAP$|^HELPED$", PAGES, re.MULTILINE))
    environment = {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GOMP_SPINCOUNT", "MNEMOS_DENSE"}
    environment |= {"WANDB_PROJECT", "WANDB_MODE"}
    assert found == environment | {"SEGMENT_MEMORIES"}  # a table that gets a row


def test_commands_name_verbs_recipes_and_fields_that_exist(capsys):
    for line in sorted(set(re.findall(r"^\$ mnemos (.*?)\s*(?:> .*|#.*)?$", PAGES, re.MULTILINE))):
        verb, *words = line.split()
        assert verb in VERBS
        if verb in ("train", "compare", "show") and "--resume" not in words:
            given = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
            names = [name for name in given if ".py" not in name]  # a reader's own file
            if not names or "--plugin" in words:
                continue
            if verb == "show" and set(names) <= set(registry.names("attention")):
                continue
            files = [name for name in names if name.endswith(".json")]
            assert set(names) - set(files) <= set(registry.names("recipe")), line
            options = r"--unwritten|--baselines|--vary \S+ \S+|--(?:seeds|out|jobs|equal|minutes|rates|against) \S+"
            options += r"|--log \S+|--from \S+|--model (?:hf:NAME|FOLDER)"
            fields = re.sub(options, "", " ".join(words[len(given) :])).split()
            if files:  # what `mnemos show` printed
                assert not fields
                continue
            assert main(["show", names[0], *fields]) == 0, f"{line}: {capsys.readouterr().err}"


def test_the_files_they_name_exist():
    for page in [*FILES, *(ROOT / "log").glob("*.md"), *(ROOT / "src").glob("**/README.md")]:
        text = page.read_text()
        for linked, named in re.findall(r"\]\(([\w./-]+)\)|`((?:src|benchmarks|docs|results)/[\w./-]*)`", text):
            if re.search("/(PAPER|NAME|ROOM)[/.]", named):  # a place to fill in
                continue
            assert (page.parent / linked if linked else ROOT / named).exists(), f"{page.name}: {linked or named}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_bytes()) <= 7000


def test_the_figure_of_the_demo_has_its_processor():
    cpu = json.loads((ROOT / "results/demo.json").read_text())["provenance"]["cpu"]
    assert cpu in (ROOT / "docs/memories.md").read_text()
