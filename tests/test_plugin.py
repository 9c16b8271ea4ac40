"""Another author's package adds a task, a model, an attention and recipes: trained, resumed, compared and reported.

Packages that fail beside it are named, and break nothing.
"""

import ast
import json
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
import multiprocessing, os, sys
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
    os.environ["TOY_STOPS"] = "1"
    said("train", "toy-bags", "--out", "stopped", "--data.stop-at", "7")
    del os.environ["TOY_STOPS"]
    said("train", "--resume", "stopped")
    said("eval", "whole")
    said("compare", "toy-bags", "toy-bags-linear", "--train.steps", "6", "--out", "both")
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
    assert "; continue with: mnemos train --resume " in done.stderr
    return folder, done.stdout, done.stderr


def test_every_verb_does_its_work_and_opens_the_task_once(told):
    codes = [line[5:] for line in told[1].splitlines() if line.startswith("CODE ")]
    assert codes == ["list 0 0", "train 0 1", "train 130 1", "train 0 1", "eval 0 1", "compare 0 1", "report 0 0"]
    for name in ("toy-bags-linear", "toy-weigher", "calm"):
        assert name in told[1]


def test_packages_that_fail_are_named_in_a_line_each(told):
    for name, words in {"broken": "RuntimeError: two lines", "doubled": "'demo'"}.items():
        (said,) = {line for line in told[2].splitlines() if f"{name} 1.0" in line}
        assert words in said


def metrics(folder: Path) -> list[dict]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def test_a_run_is_judged_by_its_corpus_metric_and_has_its_auxiliary_loss(told):
    result = json.loads((told[0] / "whole" / "result.json").read_text())
    assert (result["metric"], result["metrics"]["r"]["higher_is_better"]) == ("r", True)
    assert set(result["test"]) == {"loss", "r", "near"}
    assert 0 < result["test"]["r"] <= 1
    trained = [line for line in metrics(told[0] / "whole") if line["kind"] == "train"]
    assert all(line["auxiliary_loss"] > 0 for line in trained)
    named = {"kind", "step", "loss", "auxiliary_loss", "near", "lr", "grad_norm", "tokens"}
    assert set(trained[0]) == named
    assert trained[-1]["loss"] < trained[0]["loss"]
    assert json.loads((told[0] / "whole" / "recipe.json").read_text())["model"]["width"] == 3
    assert result["flops"] > 0
    assert f"r {result['test']['r']:.3f}" in told[1]


def test_resume_is_exact(told):
    assert metrics(told[0] / "stopped") == metrics(told[0] / "whole")
    whole, again = (json.loads((told[0] / name / "result.json").read_text()) for name in ("whole", "stopped"))
    assert again["test"] == whole["test"]
    assert again["weights"] == whole["weights"]
    assert json.loads((told[0] / "stopped" / "run.json").read_text())["resumed"]


def test_arms_are_compared_and_reported_by_it(told):
    found = json.loads((told[0] / "both" / "comparison.json").read_text())
    assert (found["metric"], found["higher_is_better"], found["majority"]) == ("r", True, None)
    assert [row["name"] for row in found["rows"]] == ["toy-bags", "toy-bags-linear"]
    page = (told[0] / "both" / "report.html").read_text()
    for words in ("Test r (higher is better)", "Weights", "The correlation of all weights"):
        assert words in page


def test_the_package_uses_public_names_alone():
    import mnemos

    tree = ast.parse((PLUGIN / "toy_bags.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not [a.name for a in node.names if a.name.startswith("mnemos.")]
        elif isinstance(node, ast.ImportFrom):
            assert not (node.module or "").startswith("mnemos")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mnemos":
            assert node.attr in mnemos.__all__
