"""Another author's package adds a task, a model and recipes: trained, evaluated, compared and reported.

Packages that fail beside it are named, and break nothing.
"""

import json
import re
from pathlib import Path

import processes
import pytest

pytestmark = pytest.mark.slow

PLUGIN = Path(__file__).parent / "plugin"
FAILING = {
    "broken": "raise RuntimeError('two\\nlines')",
    "doubled": "import mnemos\n@mnemos.recipe('demo')\ndef mine():\n    'Mine.'\n",
}
DRIVER = """
import multiprocessing, sys
sys.path[:0] = PLACES
import torch
import toy_bags
from mnemos.lab.cli import main

if __name__ == "__main__":
    torch.set_num_threads(1)
    # Each recipe of a comparison has a process of its own: a fork, since a new interpreter imports everything again.
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.get_context = lambda method=None, start=multiprocessing.get_context: start("fork")
    def said(*words):
        before = len(toy_bags.opened)
        code = main(list(words))
        print("CODE", words[0], code, len(toy_bags.opened) - before, flush=True)
    said("list")
    said("train", "toy-bags", "--out", "whole")
    said("eval", "whole")
    said("compare", "toy-bags", "toy-bags-softmax", "--train.steps", "6", "--out", "both")
    said("report", "both")
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> tuple[Path, str, str]:
    """The folder where everything was run in one process, what was printed, and what was said of it."""
    folder = tmp_path_factory.mktemp("plugin")
    for name in ("toy_bags", *FAILING):
        about = folder / "site" / f"{name}-1.0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[mnemos.plugins]\n{name} = {name}\n")
    for name, source in FAILING.items():
        (folder / "site" / f"{name}.py").write_text(source)
    known = {"__name__": "__main__", "PLACES": [str(PLUGIN), str(folder / "site")]}
    done = processes.run(exec, DRIVER, known, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout, done.stderr


def test_every_verb_does_its_work_and_opens_the_task_once(told):
    codes = [line[5:] for line in told[1].splitlines() if line.startswith("CODE ")]
    assert codes == ["list 0 0", "train 0 1", "eval 0 1", "compare 0 1", "report 0 0"]
    assert {"toy-bags-softmax", "toy-weigher"} <= {*told[1].split()}


def test_packages_that_fail_are_named_in_a_line_each(told):
    for name, words in {"broken": "RuntimeError: two lines", "doubled": "'demo'"}.items():
        (said,) = {line for line in told[2].splitlines() if f"{name} 1.0" in line}
        assert words in said


def test_a_run_is_judged_by_its_corpus_metric(told):
    result = json.loads((told[0] / "whole" / "result.json").read_text())
    assert (result["metric"], result["metrics"]["r"]["higher_is_better"]) == ("r", True)
    assert set(result["test"]) == {"loss", "r", "near"}
    assert 0 < result["test"]["r"] <= 1
    lines = map(json.loads, (told[0] / "whole" / "metrics.jsonl").read_text().splitlines())
    trained = [line for line in lines if line["kind"] == "train"]
    assert set(trained[0]) == {"kind", "step", "loss", "near", "lr", "grad_norm", "tokens", "seconds"}
    assert trained[-1]["loss"] < trained[0]["loss"]
    assert json.loads((told[0] / "whole" / "recipe.json").read_text())["model"]["width"] == 3
    assert result["flops"] > 0
    assert f"r {result['test']['r']:.3f}" in told[1]


def test_arms_are_compared_and_reported_by_it(told):
    found = json.loads((told[0] / "both" / "comparison.json").read_text())
    assert (found["metric"], found["higher_is_better"], found["majority"]) == ("r", True, None)
    assert [row["name"] for row in found["rows"]] == ["toy-bags", "toy-bags-softmax"]
    page = (told[0] / "both" / "report.html").read_text()
    for words in ("Test r (higher is better)", "Weights", "The correlation of all weights"):
        assert words in page


def test_the_package_uses_public_names_alone():
    import mnemos

    text = (PLUGIN / "toy_bags.py").read_text()
    assert not re.search(r"from mnemos|import mnemos\.", text)
    assert {*re.findall(r"\bmnemos\.(\w+)", text)} <= {*mnemos.__all__}
