"""The examples of README and docs run and print what they say; the files and commands that they name exist."""

import doctest
import itertools
import json
import re
from pathlib import Path

import processes
import pytest

from mnemos import registry
from mnemos.lab.cli.verbs import VERBS, main
from mnemos.testing import LAWS

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = "\n".join(page.read_text() for page in FILES)
EXAMPLES = re.findall(r"```python\n(.*?)```\n(?:```text\n(.*?)```)?", PAGES, re.DOTALL)
RUNNABLE = [(code, said) for code, said in EXAMPLES if said]
# Exporting takes seconds; it is the matter of tests/programs.
EXPORTS = re.compile(r"import export_programs|mnemos\.export\(")
RARE = [[pytest.mark.exhaustive] if EXPORTS.search(code) else [] for code, _ in RUNNABLE]


def example(code: str, compiles: bool) -> None:
    """Run one; layers are compiled only if `compiles`: to import the compiler takes as long as ten examples."""
    if not compiles:
        LAWS.pop("compiles")
    exec(code, {"__name__": "__main__"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "said"),
    [pytest.param(*one, marks=marks, id=str(i)) for i, (one, marks) in enumerate(zip(RUNNABLE, RARE, strict=True))],
)
def test_an_example_prints_what_it_says(code, said, tmp_path, exhaustive):
    done = processes.run(example, code, exhaustive, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # "..." stands for what differs from run to run, as in a doctest
    assert doctest.OutputChecker().check_output(said, done.stdout, doctest.ELLIPSIS), done.stdout


def test_there_are_examples_and_no_placeholder_is_left():
    assert len(RUNNABLE) >= 7
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
