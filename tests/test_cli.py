"""The command line as a user meets it: exit codes, one-line errors, and a small comparison from end to end."""

import contextlib
import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pairwise import cover
from processes import Process, until

from mnemos import registry
from mnemos.errors import InputError, say
from mnemos.lab.cli import main
from mnemos.lab.run.recipe_files import find_recipe

QUICK = "--train.steps 10 --train.batch-size 8 --train.eval-every 5 --train.log-every 5 --train.checkpoint-every 5"
QUICK += " --data.train-size 200 --data.valid-size 50 --data.test-size 60 --model.dim 16 --train.accelerator cpu"
QUICK += " --model.layers 1 --model.mlp 16"
QUICK = QUICK.split()
RARELY = ["--train.eval-every", "100", "--train.checkpoint-every", "100"]


def is_gone(group: int) -> bool:
    """Whether every process of a group has ended."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("chosen", [None, "GOMP_SPINCOUNT"])
def test_waiting_threads_sleep_soon_unless_the_environment_says_otherwise(monkeypatch, chosen):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.setenv(name, "7")  # recorded, so that it is restored
        monkeypatch.delenv(name)
    if chosen:
        monkeypatch.setenv(chosen, "7")
    assert main(["list", "attentions"]) == 0
    assert os.environ.get("GOMP_SPINCOUNT") == {None: "30000", "GOMP_SPINCOUNT": "7"}.get(chosen)


def refused(capsys, *arguments: str) -> str:
    assert main(list(arguments)) == 2
    said = capsys.readouterr().err
    assert said.startswith("mnemos: ")
    assert said.count("\n") == 1, f"one line, found: {said}"
    assert "Traceback" not in said
    return said


# Of each verb a word of its help.
OPTIONS = """list --all, show RECIPE, eval --split, predict --top, detect --json, sample --top-k, chat --window,
report --out, look --text, train --from, compare --seeds, reproduce --seeds, bench-memory --quick,
verify OPERATION, translate --n-best, score --samples, average --last, linearise --half-life, export --to,
tokenizer --lowercase"""
OPTIONS = dict(pair.split() for pair in OPTIONS.split(","))


@pytest.mark.parametrize("verb", OPTIONS)
def test_every_verb_has_help_of_its_own(verb, capsys):
    from mnemos.lab.cli.verbs import VERBS

    assert {*VERBS} == {*OPTIONS}
    assert main(["--help"]) == 0
    assert f"mnemos {verb} " in capsys.readouterr().out
    for word in ("--help", "-h"):
        assert main([verb, word]) == 0
        said = capsys.readouterr()
        assert f"usage: mnemos {verb}" in said.out
        assert OPTIONS[verb] in said.out
        assert said.err == ""
        assert not re.search(r"^ +--\S+( \S+)? +\((default|required)", said.out, re.MULTILINE), (
            "each option is explained"
        )


def test_after_a_recipe_help_is_of_its_fields_each_once(capsys):
    """tyro takes a field's help from the docstring's section Attributes, and leaves it out of the description."""
    for words in (["compare", "short-listops-wider"], ["train", "--out", "x"]):
        assert main([words[0], "short-listops-cached", *words[1:], "--help"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "====" not in said
        for field in ("steps between two evaluations on the validation split", "Dm/D, the width of a slot"):
            assert said.count(field) == 1
        assert "--model.attention NAME" in said
        assert "--model.cache NAME" in said


def listed(capsys, *arguments: str) -> list[str]:
    """The first words of the lines of recipes that `mnemos list` prints."""
    assert main(["list", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line.split()[0] for line in lines if line.startswith("  ")]


def test_list_names_every_entry_and_recipes_under_their_tasks(capsys):
    assert main(["list", "--all"]) == 0
    said = capsys.readouterr().out
    for kind in registry.KINDS:
        for name in registry.names(kind):
            assert f"  {name}" in said
    lines = said[said.index("recipes, by task") :].splitlines()
    below = lines[lines.index("  text") + 1 : lines.index("  cifar")]
    assert {line.split()[0] for line in below if line.startswith("    ")} >= {"text", "text-memformer", "wikitext-xl"}
    assert main(["list", "attentions"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [lines[0], *(line.split()[0] for line in lines[1:])] == ["attentions", *registry.names("attention")]


def test_list_shows_recipes_as_families_and_the_recipes_of_a_name(capsys):
    names = registry.names("recipe")
    assert main(["list"]) == 0
    shown = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if line.startswith("    ")]
    assert sum(int(many.strip("()")) if many.startswith("(") else 1 for _, many in shown) == len(names)
    assert ["text-state", "(17)"] in shown
    assert len(listed(capsys, "small-images")) == 4 + 57, "a heading for each task"
    variants = ["text-cached", "text-cached-unwritten", "text-cached-xl-no-memory"]
    assert listed(capsys, "text-cached") == ["text", *variants]
    of_text = listed(capsys, "text")
    assert not {"demo", "listops"} & {*of_text}
    assert "did you mean 'text'" in refused(capsys, "list", "txet")
    assert "mnemos list attentions has it" in refused(capsys, "list", "gated-delta")


def test_every_recipe_is_shown_as_json_that_reads_back(capsys, exhaustive):
    from mnemos.config import from_dict
    from mnemos.lab.run.recipe import Recipe

    places, names = registry.definitions("recipe"), registry.names("recipe")
    if not exhaustive:  # every part of the names
        names = [names[number] for number in cover([name.split("-") for name in names], pairs=False)]
    for number, name in enumerate(names):
        steps = [] if number % 8 else ["--train.steps", "7"]  # the parser of fields takes long
        assert main(["show", name, *steps]) == 0, name
        said = capsys.readouterr()
        assert str(places[name]) in said.err
        shown = from_dict(Recipe, json.loads(said.out))
        for field in shown.from_data():
            assert f"model.{field}" in said.err, name
        default = registry.load("recipe", name)()
        assert shown.train == (dataclasses.replace(default.train, steps=7) if steps else default.train), name
        assert (shown.model, shown.data, shown.optim, shown.name) == (default.model, default.data, default.optim, name)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("trian short-listops", "did you mean 'train'?"),
        ("train", "name of a recipe"),
        ("train dmeo", "did you mean 'demo'"),
        ("train short-listops --model.dim seven --train.steps 5", "expected an integer, found 'seven'"),
        ("train short-listops --model.attention linaer", "did you mean 'linear'"),
        ("train short-listops --model.attention linear --model.attention.window 8", "--model.attention.window"),
        ("show short-listops-cached --model.cache.ratio 2", ": --model.cache.ratio: expected above 0 and at most 1"),
        ("show short-listops --model.cache.length 8", "short-listops has no cache: add --model.cache mnemos"),
        ("train nowhere.json", "nowhere.json: expected a recipe's file, found no such file"),
        ("compare short-listops --vary train.steps 8,9", "equal train settings"),
        ("compare short-listops --vary model.dim 8,9 --vary model.dim 7,8", "model.dim twice"),
        ("train short-listops --resume nowhere", "--resume RUN alone"),
        (["train", "--resume", __file__], "expected a run, found a file"),
        ("eval text", "found the name of a recipe; mnemos train text trains it"),
        (["eval", "no\n\x1b[31mwhere"], "mnemos: no\\n\\x1b[31mwhere: expected a run"),
        ("eval", "required: RUN; see mnemos eval --help"),
        ("report x --ouy y", "did you mean --out?"),
        ("list --plugin", "--plugin: expected a Python file"),
        ("export x --to onx", "--to: expected one of hf, onnx, onnxruntime, torch, found 'onx'; did you mean onnx?"),
        ("train digits-vit --model.patchsize 3", "did you mean --model.patch?"),  # not --train.batch-size
        (["train", "text", "--model(.zzz", "3"], "found --model(.zzz; see mnemos train text --help"),
        ("compare short-listops short-listops", "found short-listops, short-listops"),
        ("report nowhere --out /", "expected a file or a new name to write to, found a folder"),
        ("report", "required: RUNS; see mnemos report --help"),
        ("look nowhere", "nowhere: expected a run"),
        ("show demo demo", "mnemos show: expected one recipe, found demo demo; use mnemos compare"),
        ("show short-listops --model.zzz 3", "found --model.zzz; --model has vocab-size, dim, "),
        ("show short-listops --model.dim 8 9", "expected settings --field value, found 9 without its field"),
        ("show short-listops --optim.betas 1", "--optim.betas: expected 2 numbers, found '1'"),
        ("show short-listops --model.attention", "--model.attention: expected the name of an attention, found none; k"),
        ("show short-listops --model.cache foo", "preset of a cache or none, found 'foo'; known: paper, official, mne"),
        ("show short-listops --name a/b", "--name: expected a name without / and \\, found 'a/b'; change it"),
        ("compare", "expected several recipes, seeds or rates, found 0; see mnemos list"),
        ("compare short-listops --rates 1e-3", "expected several recipes, seeds or rates, found 1; see mnemos list"),
        ("compare short-listops --rates 1e-3,x", "--rates: expected numbers such as 1e-3,1e-2, found '1e-3,x'"),
        ("bench-memory --jobs 0", "--jobs: expected at least 1, found 0; leave the option out for its default"),
        ("tokenizer x --out nowhere/t.json", "expected a file in a folder that exists, found no folder nowhere;"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = arguments.split() if isinstance(arguments, str) else arguments
    assert words in refused(capsys, *arguments)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_what_the_system_refuses_is_one_line_and_exit_code_1(capsys):
    assert main(["tokenizer", "x", "--out", "x" * 300]) == 1
    said = capsys.readouterr().err
    assert said == f"mnemos: {'x' * 300}: File name too long; check the path\n"


def test_an_attention_is_chosen_by_name_and_has_its_own_settings(capsys):
    assert main(["show", "gated-delta"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["is"], shown["key_width"]) == ("gated-delta", None)
    for name in ("linear", "relative", "block-sparse"):
        assert main(["show", "short-listops", f"--model.attention={name}", "--model.dim", "32"]) == 0
        shown = json.loads(capsys.readouterr().out)["model"]
        assert (shown["attention"]["is"], shown["dim"]) == (name, 32)
    words = ["--model.attention.memory", "7", "--model.attention", "relative"]
    assert main(["show", "short-listops", *words]) == 0
    shown = json.loads(capsys.readouterr().out)["model"]["attention"]
    assert (shown["is"], shown["memory"], shown["clamp"]) == ("relative", 7, 0)


def test_a_cache_is_added_changed_and_removed_by_name(capsys):
    def cache(*words: str) -> dict | None:
        assert main(["show", *words]) == 0
        return json.loads(capsys.readouterr().out)["model"]["cache"]

    added = cache("short-listops", "--model.cache", "paper", "--model.cache.length", "8")
    assert (added["preset"], added["length"], added["gate_init"]) == ("paper", 8, None)
    changed = cache("text-cached", "--model.cache.ratio", "0.25", "--model.cache=official")
    assert [changed[name] for name in ("preset", "length", "scope", "ratio")] == ["official", 32, "stream", 0.25]
    assert cache("short-listops-cached", "--model.cache", "none") is None
    assert cache("mnist-vit", "--model.cache", "mnemos")["preset"] == "mnemos"


@pytest.mark.slow
def test_a_recipe_is_read_from_the_file_that_show_printed(tmp_path, capsys):
    assert main(["show", "short-listops-cached", "--train.steps", "7"]) == 0
    file = tmp_path / "mine.json"
    shown = json.loads(capsys.readouterr().out)
    file.write_text(json.dumps(shown))
    assert main(["show", str(file), "--model.dim", "32"]) == 0
    again = json.loads(capsys.readouterr().out)
    about = "short-listops-cached with given settings: train.steps, model.dim"
    assert again == {**shown, "about": about, "model": {**shown["model"], "dim": 32}}
    said = refused(capsys, "compare", "short-listops-cached", str(file), "--out", str(tmp_path / "run"))
    assert "two called 'short-listops-cached', which differ in train.steps (6000, not 7); name" in said
    file.write_text(json.dumps({key: shown[key] for key in ("model", "data")}))
    assert main(["show", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "mine"
    file.with_suffix(".yaml").write_text(yaml.safe_dump(shown))
    assert main(["show", str(file.with_suffix(".yaml"))]) == 0
    assert json.loads(capsys.readouterr().out) == shown
    written = "# mine\nname: mine\nmodel: {is: transformer, vocab_size: 8}\ndata: {is: listops}\n"
    written += "optim: {lr: 1e-3}\ntrain: {steps: 3}"
    file.with_suffix(".yml").write_text(written)
    assert main(["show", str(file.with_suffix(".yml"))]) == 0
    of_yaml = json.loads(capsys.readouterr().out)
    assert (of_yaml["name"], of_yaml["optim"]["lr"], of_yaml["train"]["steps"]) == ("mine", 0.001, 3)
    for number, read in (("010", 10), ("1:30", "1:30"), ("2026-13-01", "2026-13-01")):  # of YAML 1.1: 8, 90, an error
        file.with_suffix(".yml").write_text(written.replace("steps: 3", f"steps: {number}"))
        if isinstance(read, int):
            assert find_recipe(str(file.with_suffix(".yml"))).train.steps == read
        else:
            said = refused(capsys, "train", str(file.with_suffix(".yml")))
            assert f"train.steps: expected an integer, found {read!r}" in said
    for written, problem in (
        ("name: mine\nmodel: {is: transformer\ndata: 3", "mapping that starts in line 2; correct the file"),
        ('a: 1\nname: "mine\n\n\n', "line 5: expected YAML, found unexpected end of stream while scanning a quoted"),
        ("steps: !!int x", "mine.yml: expected YAML, found a value that its tag does not allow ("),
        ("steps: !!bool maybe", "mine.yml: expected YAML, found a value that its tag does not allow ('maybe')"),
        ("name: \x00", "mine.yml: expected a recipe, found a file that cannot be read ("),
        ("# nothing", "mine.yml: expected a recipe, found nothing; mnemos show prints one"),
    ):
        file.with_suffix(".yml").write_text(written)
        assert problem in refused(capsys, "train", str(file.with_suffix(".yml")))
    for written, problem in (
        ('{"model":', "mine.json: line 1: expected JSON"),
        (json.dumps(shown | {"model": "text"}), "mine.json: model: expected"),
    ):
        file.write_text(written)
        assert problem in refused(capsys, "train", str(file), "--out", str(tmp_path / "run"))


@pytest.mark.slow
def test_seeds_rates_and_values_of_a_field_are_compared(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("mnemos.lab.compare.compare.compare", lambda recipes, *rest, **switches: seen.append(recipes))

    def compared(words: str) -> list:
        assert main(["compare", *words.split(), "--out", str(tmp_path)]) == 0
        return seen[-1]

    for words in ("short-listops --seeds 3", "short-listops --rates 1e-3,3e-3"):
        assert len(compared(words)) == 1
    found = compared("short-listops-cached --vary model.cache.length 8,32 --baselines --train.steps 5")
    lengths = {recipe.name: recipe.model.cache.length for recipe in found}
    assert lengths == {"short-listops-cached-length-8": 8, "short-listops-cached-length-32": 32}
    assert found[1].train.steps == 5
    none, paper = compared("short-listops --vary model.cache none,paper")
    assert (none.name, none.model.cache) == ("short-listops-cache-none", None)
    assert (paper.name, paper.model.cache.length) == ("short-listops-cache-paper", "auto")
    found = compared("short-listops short-listops-cached --vary model.dim 8,16 --vary optim.lr 1e-3,2e-3")
    names = [f"short-listops-dim-{dim}-lr-{lr}" for dim in (8, 16) for lr in ("1e-3", "2e-3")]
    assert [recipe.name for recipe in found[:4]] == names
    assert [recipe.name[:20] for recipe in found[4:]] == ["short-listops-cached"] * 4
    assert [(recipe.model.dim, recipe.optim.lr) for recipe in found[5:7]] == [(8, 0.002), (16, 0.001)]


COMPARISON = ["compare", "short-listops-cached", "--unwritten", *QUICK, "--out"]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory, forked_comparisons) -> Path:
    folder = tmp_path_factory.mktemp("compare") / "run"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main([*COMPARISON, str(folder)]) == 0
    assert said.getvalue().startswith("2 recipes × 1 seed: 2 runs\n")
    for words in ("majority class", "caches emptied (", "exchanged (", "state KiB: what the model"):
        assert words in said.getvalue()
    return folder


@pytest.mark.slow
def test_compare_writes_what_it_promises(comparison):
    found = json.loads((comparison / "comparison.json").read_text())
    assert (found["metric"], found["higher_is_better"], 0 < found["majority"] < 1) == ("accuracy", True, True)
    cached, unwritten = found["rows"]
    names = ["short-listops-cached", "short-listops-cached-unwritten"]
    assert [row["name"] for row in found["rows"]] == names
    assert [row["baseline_of"] for row in found["rows"]] == [None, names[0]]
    assert [row["memory"] for row in found["rows"]] == ["cache", None]
    assert [cached[cost] for cost in ("parameters", "flops")] == [unwritten[cost] for cost in ("parameters", "flops")]
    costs = ("parameters", "flops", "seconds", "peak_bytes", "steps", "tokens", "train_flops")
    for row in found["rows"]:
        other = {"name", "memory", "mean", "std", "interval", "against", "seeds", "state_bytes", "runs", "baseline_of"}
        assert set(row) == {*other, *costs}
        assert (row["steps"], row["tokens"] > 10 * 8, row["seeds"]) == (10, True, 1)
        assert [run["folder"] for run in row["runs"]] == found["runs"][row["name"]]
        assert [run["seed"] for run in row["runs"]] == [0]
        assert min(row[key] for key in ("mean", *costs)) > 0 == row["state_bytes"]  # a classifier
    controls = {(one["name"], one["control"]) for one in found["controls"]}
    assert controls == {*((names[0], control) for control in ("emptied", "exchanged", "closed")), (names[1], "closed")}
    for run in (comparison / folder for folders in found["runs"].values() for folder in folders):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert {line["kind"] for line in lines} == {"train", "valid", "gates"}


@pytest.mark.slow
def test_a_finished_comparison_is_read_again_and_another_is_refused(comparison, capsys):
    metrics = comparison / "short-listops-cached/seed-0/metrics.jsonl"
    before = metrics.stat().st_mtime_ns
    assert main([*COMPARISON, str(comparison)]) == 0
    assert metrics.stat().st_mtime_ns == before
    capsys.readouterr()
    words = [*COMPARISON, str(comparison), "--train.steps", "30"]
    assert "differs in train.steps (10, not 30)" in refused(capsys, *words)


@pytest.mark.slow
def test_a_comparison_is_reported_and_its_runs_are_evaluated_and_loaded(comparison, capsys):
    import torch

    from mnemos import load

    assert main(["report", str(comparison)]) == 0
    path, opened = capsys.readouterr().out.splitlines()
    assert Path(path).parent == comparison
    assert opened.startswith("Open file://")
    assert "short-listops-cached" in Path(path).read_text()
    run = comparison / "short-listops-cached/seed-0"
    assert main(["eval", str(run)]) == 0
    said = capsys.readouterr().out
    for name in ("as trained", "emptied", "exchanged", "closed", "majority"):
        assert name in said
    assert load(run / "model")(torch.ones(1, 5, dtype=torch.int64))[0].shape == (1, 10)
    assert "found a comparison" in refused(capsys, "eval", str(comparison))


def test_the_version_and_a_closed_pipe(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip().count(".") == 2
    shell = f"{sys.executable} -m mnemos list attentions | head -1"
    done = subprocess.run(shell, shell=True, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr


def forked_compare(words: list[str]) -> None:
    """`mnemos compare` in a process whose runs are forks: a new interpreter for each takes seconds of imports."""
    import multiprocessing

    fork = multiprocessing.get_context("fork")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mnemos.lab.compare.processes.multiprocessing.get_context", lambda _: fork)
        raise SystemExit(main(words))


@pytest.mark.slow
def test_an_interrupted_comparison_leaves_nobody_behind_and_goes_on(forked_comparisons, tmp_path):
    folder = tmp_path / "run"
    fields = [*QUICK, *RARELY, "--train.steps", "40"]
    command = ["compare", "short-listops", "short-listops-wider", "--out", str(folder), *fields]
    process = Process(forked_compare, command)
    metrics = folder / "short-listops/seed-0/metrics.jsonl"
    until(lambda: metrics.exists() and "train" in metrics.read_text())
    os.killpg(process.pid, signal.SIGINT)
    done = process.wait(60)
    assert done.returncode == 130, done.stderr
    assert f": mnemos {' '.join(command)}\n" in done.stderr
    assert "Traceback" not in done.stderr
    until(lambda: is_gone(process.pid), 30)  # no child trains on unseen
    assert main(command) == 0
    assert (folder / "comparison.json").is_file()


def test_an_encoding_that_lacks_characters():
    program = "import sys\nfrom mnemos.__main__ import main\nsys.argv[1:] = ['--version']\nmain()\nprint('漢')"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, env=os.environ | {"PYTHONIOENCODING": "cp1252"}
    )
    assert (found.returncode, found.stderr) == (0, b"")
    assert found.stdout.decode("cp1252").rstrip().endswith("\\u6f22")


def test_terminals_get_no_control_characters_from_names(capsys):
    say("a\x1b]0;title\x07\tb", "\x9b2J\r\x7fé漢\u200d\n", sep="|", end="")
    assert capsys.readouterr().out == "a\\x1b]0;title\\x07\tb|\\x9b2J\\r\\x7fé漢\u200d\n"
    for name in ("a\x1b[2J", "a\nb"):
        with pytest.raises(InputError, match="without control characters"):
            dataclasses.replace(registry.load("recipe", "demo")(), name=name)
