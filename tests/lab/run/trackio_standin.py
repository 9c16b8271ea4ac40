"""A stand-in for trackio, which needs an older Pillow than the tests' environment has."""

import json
import sys
import types
from pathlib import Path
from typing import Any

from train_standins import work


def stand_in(file: Path) -> types.ModuleType:
    """A module with the documented functions of trackio that are used; its rows are in a file.

    init(project, name, config, resume="never") -> Run, which gives a name that is taken another one; Run.log(metrics,
    step), Run.finish(); Api().runs(project), which raises ValueError for an unknown project; their name and delete().
    """

    def rows() -> list[dict]:
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def append(row: dict) -> None:
        with file.open("a") as opened:
            opened.write(json.dumps(row) + "\n")

    class Run:
        def __init__(self, project: str, name: str) -> None:
            self.project, self.name = project, name

        def log(self, metrics: dict, step: int | None = None) -> None:
            append({"project": self.project, "run": self.name, "step": step, "metrics": metrics})

        def finish(self) -> None:
            append({"project": self.project, "run": self.name, "step": None, "metrics": {}})

        def delete(self) -> bool:
            kept = [row for row in rows() if row["run"] != self.name]
            found = len(kept) < len(rows())
            file.write_text("".join(json.dumps(row) + "\n" for row in kept))
            return found

    def init(project: str, name: str | None = None, config: dict | None = None, resume: str = "never") -> Run:
        assert json.dumps(config)
        print("* Trackio project initialized")
        return Run(project, "another" if name in {row["run"] for row in rows()} else str(name))

    class Api:
        def runs(self, project: str) -> list[Run]:
            names = {row["run"] for row in rows() if row["project"] == project}
            if not names:
                raise ValueError(f"Project '{project}' does not exist")
            return [Run(project, name) for name in sorted(names)]

    made = types.ModuleType("trackio")
    made.init, made.Api = init, Api  # type: ignore[attr-defined]
    return made


def work_with_trackio(file: str, *arguments: Any) -> None:
    """`work` where `import trackio` finds the stand-in. For processes of their own."""
    sys.modules["trackio"] = stand_in(Path(file))
    work(*arguments)
