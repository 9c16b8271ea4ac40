"""Comparisons whose runs have no processes of their own."""

import os

import pytest
import quick

from mnemos.errors import InputError
from mnemos.lab.errors import Interrupted, TrainingFailed

CODES = {TrainingFailed: 1, InputError: 2, Interrupted: 130}


@pytest.fixture(scope="session", autouse=True)
def _git_is_asked_once():
    quick.ask_git_once()


class Child:
    """What stands for the process of a run; code None: it works until it is told to end."""

    def __init__(self, code: int | None) -> None:
        self.exitcode, self.terminated, self.joined = code, False, False
        self.sentinel, self._end = os.pipe()
        if code is not None:
            os.close(self._end)

    def terminate(self) -> None:
        self.terminated = True
        if self.exitcode is None:
            self.exitcode = 130
            os.close(self._end)

    def join(self) -> None:
        self.joined = True
        os.close(self.sentinel)


@pytest.fixture
def runs_here(monkeypatch):
    """Makes comparisons call `trained(recipe, folder)` in place of a process; what it raises is how the run ends.

    Returns the children that were started. `trained` returns "working" for a run that does not end, or an exit code.
    """
    from mnemos.lab.compare import processes

    def use(trained) -> list[Child]:
        children: list[Child] = []

        def start(recipe, folder, quiet, among):
            try:
                ended = trained(recipe, folder)
                code = None if ended == "working" else ended or 0
            except tuple(CODES) as error:
                print(error)
                code = CODES[type(error)]
            children.append(Child(code))
            return children[-1]

        monkeypatch.setattr(processes, "_start", start)
        return children

    return use


@pytest.fixture
def trained_here(runs_here):
    """Makes comparisons train in this process."""

    def work(recipe, folder) -> None:
        from mnemos.lab.run.session import run

        run(recipe, folder, resume=(folder / "recipe.json").is_file(), quiet=True)

    return runs_here(work)
