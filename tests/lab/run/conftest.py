from collections.abc import Callable
from pathlib import Path

import processes
import pytest
import torch
from spoken_standins import write_recordings
from train_standins import Toys, work
from trained_runs import text_recipe, texts, trained

from mnemos.lab.cli import main
from mnemos.lab.run import flops
from mnemos.lab.run.session import run
from mnemos.lab.tasks import text


@pytest.fixture(scope="session")
def run_apart(forks) -> Callable[..., int]:
    """`run_apart(folder, toys, resume, moment, number)`: `work` in a process of its own; its exit code (-9: killed)."""

    def run(folder: Path, toys: Toys, *arguments: object) -> int:
        return processes.run(work, str(folder), toys, *arguments, timeout=120).returncode

    return run


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def short_measurements():
    """FLOPs of one shape of batches (eight: tests/lab/compare/test_budgets.py) and short texts: they take longest."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(flops, "_COUNTED", 1)
        patched.setattr(text, "WRITTEN", 20)
        yield


@pytest.fixture(scope="session")
def text_run(tmp_path_factory) -> Path:
    """A finished run of `text_recipe`, whose texts are beside it; no test changes it."""
    folder = tmp_path_factory.mktemp("use")
    run(text_recipe(texts(folder / "texts", "abcd")), folder / "run", quiet=True)
    return folder / "run"


@pytest.fixture(scope="session")
def classifier_run(tmp_path_factory) -> Path:
    """A finished run of short-listops, whose task reads no files and whose model writes nothing; no test changes it."""
    small = {"dim": 16, "layers": 1, "num_heads": 2}
    rows = {"train_size": 100, "valid_size": 20, "test_size": 20}
    return trained("short-listops", tmp_path_factory.mktemp("classifier") / "run", small, rows)


@pytest.fixture(scope="session")
def spoken_run(tmp_path_factory) -> Path:
    """A finished run of spoken-digits-linear, whose recordings are in spoken/ beside it; no test changes it."""
    folder = tmp_path_factory.mktemp("speech")
    small = {"vocab_size": 2, "layers": 1, "dim": 16, "num_heads": 2, "mlp": 32}
    path = str(write_recordings(folder / "spoken"))
    data = {"path": path, "longest": 2, "test_takes": 1, "valid_takes": 1, "rows": 6}
    settings = {"steps": 4, "batch_size": 4, "log_every": 2}
    return trained("spoken-digits-linear", folder / "run", small, data, **settings)


@pytest.fixture
def output(capsys) -> Callable[..., str]:
    """`output(*words)`: what the command line prints."""

    def run(*words: object) -> str:
        capsys.readouterr()
        assert main([*map(str, words)]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys) -> Callable[..., str]:
    """`refused(*words)`: the one line by which the command line refuses its words."""

    def run(*words: object) -> str:
        capsys.readouterr()
        assert main([*map(str, words)]) == 2
        said = capsys.readouterr().err
        assert said.startswith("mnemos: ")
        assert said.count("\n") == 1, f"one line, found: {said}"
        return said

    return run
