"""A Python file of one's own, without a package: trained, resumed, evaluated; errors are one line."""

import json
import shutil
import sys

import pytest
from test_cli import refused

from mnemos import registry
from mnemos.config import to_dict
from mnemos.lab.cli import main
from mnemos.lab.run.recipe_files import find_recipe, from_json

MEAN = '''
from dataclasses import dataclass, replace
from typing import ClassVar

import mnemos
from beside import EPS


@mnemos.register
@dataclass(frozen=True)
class MeanConfig(mnemos.LinearConfig):
    """Linear attention with a larger eps."""

    name: ClassVar[str] = "mean"
    eps: float = EPS


@mnemos.recipe
def my_recall():
    """recall with linear attention."""
    base = mnemos.registry.load("recipe", "recall")()
    model = replace(base.model, attention=MeanConfig(), layers=1, dim=8, mlp=8)
    data = replace(base.data, distance=20, rows=8)
    return replace(base, model=model, data=data, train=replace(base.train, steps=2, batch_size=4))
'''


def forget() -> None:
    """What a new process does not know."""
    for entries in registry._registered.values():
        for name in [name for name, entry in entries.items() if entry.definition.module in registry._files]:
            del entries[name]
    registry._files.clear()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of mean.py, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mean.py").write_text(MEAN)
    (tmp_path / "beside.py").write_text("EPS = 0.25\n")
    yield tmp_path
    forget()


def test_a_run_of_a_file_is_evaluated_resumed_and_found_to_lack_it(folder, capsys):
    assert main(["train", "mean.py", "--out", "run"]) == 0
    attention = json.loads((folder / "run/recipe.json").read_text())["model"]["attention"]
    named = {"is": "mean", "plugin": str(folder / "mean.py"), "eps": 0.25}
    assert attention | named == attention
    told = to_dict(find_recipe("mean.py"))
    forget()
    assert from_json(told).name == "my-recall"  # as in the processes of a comparison
    forget()
    capsys.readouterr()
    assert main(["eval", "run"]) == 0
    executed = f"mnemos: executing the plug-in {folder / 'mean.py'}, which run/recipe.json names\n"
    assert capsys.readouterr().err.count(executed) == 1
    forget()
    said = refused(capsys, "predict", "run", "mean.py")  # a model is not a run: it names no file that may be executed
    assert said.rstrip().endswith(
        f"import its plug-in {folder / 'mean.py'} first (in a command: --plugin {folder / 'mean.py'})"
    )
    (folder / "mean.py").write_text("import mnemos\n")
    assert main(["eval", "run"]) == 2
    assert f"its plug-in {folder / 'mean.py'} does not register it" in capsys.readouterr().err
    forget()
    (folder / "mean.py").write_text(MEAN)
    shutil.move("mean.py", "moved.py")
    assert f"its plug-in {folder / 'mean.py'} is missing" in refused(capsys, "eval", "run")
    assert main(["train", "--resume", "run", "--train.steps", "4", "--plugin", "moved.py"]) == 0
    assert json.loads((folder / "run/result.json").read_text())["steps"] == 4


def test_a_plug_in_of_a_file_is_used_by_other_recipes(folder, capsys):
    assert main(["show", "recall", "--plugin=mean.py", "--model.attention", "mean"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["attention"]["plugin"] == str(folder / "mean.py")
    assert main(["list", "recall", "--plugin", "mean.py"]) == 0
    assert "  my-recall  " in capsys.readouterr().out
    assert main(["show", "my-recall", "--plugin", "mean.py"]) == 0
    assert f"is the function {folder / 'mean.py'}:my_recall" in capsys.readouterr().err


def test_what_is_wrong_with_a_file_is_one_line(folder, capsys):
    two = "import mnemos\n" + "".join(
        f'@mnemos.recipe\ndef {name}():\n    """One."""\n    return mnemos.registry.load("recipe", "recall")()\n'
        for name in ("first_one", "second_one")
    )
    (folder / "two.py").write_text(two)
    (folder / "none.py").write_text("import mnemos\n")
    (folder / "faulty.py").write_text(f"{two}print(missing)\n")
    (folder / "syntax.py").write_text("x = 1\ndef f(:\n")
    assert "two.py:first-one, two.py:second-one" in refused(capsys, "train", "two.py")
    assert "found 'third'" in refused(capsys, "compare", "two.py:third", "recall")
    assert find_recipe("two.py:second_one").name == "second-one"
    assert "docs/compare.md" in refused(capsys, "train", "none.py")
    forget()
    for value, parts in {
        "mnemos.lab.recipes.text_cached()": ("wrong.py: line 5: AttributeError: ", "text_cached"),
        "None": ("wrong.py: recipe 'wrong': expected a Recipe", "found None"),
    }.items():
        source = f'import mnemos\n@mnemos.recipe\ndef wrong():\n    """One."""\n    return {value}\n'
        (folder / "wrong.py").write_text(source)
        for command in (["train", "wrong.py"], ["compare", "recall", "wrong", "--plugin", "wrong.py"]):
            said = refused(capsys, *command)
            assert all(part in said for part in parts)
        forget()
    assert "faulty.py: line 10: NameError: name 'missing'" in refused(capsys, "show", "faulty.py")
    assert "first-one" not in registry.names("recipe")
    (folder / "stopped.py").write_text(f"{two}raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        registry.load_file("stopped.py")
    assert "first-one" not in registry.names("recipe")
    assert not registry.is_loaded("stopped.py")
    assert "syntax.py: line 2: SyntaxError: " in refused(capsys, "list", "--plugin", "syntax.py")
    assert "no such file" in refused(capsys, "eval", "run", "--plugin", "gone.py")
    assert "--plugin: expected a Python file" in refused(capsys, "list", "--plugin")
    assert not (folder / "runs").exists()
