"""What one installs: the distribution `mnemos-torch`, which is imported as `mnemos`, and its extras."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from mnemos import libraries
from mnemos.errors import install_command

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PLACES = "*.md docs/*.md src/**/*.py src/**/*.md examples/**/*.ipynb tools/**/*.py"
TEXTS = [path for place in PLACES.split() for path in ROOT.glob(place)]


def test_install_commands_can_work():
    """The distribution is on no index, so that its own name fetches nothing, or what a stranger put there."""
    commands = [(path, line) for path in TEXTS for line in path.read_text().splitlines() if "pip install" in line]
    extras = [extra for _, line in commands for one in re.findall(r"\.\[([\w,]+)\]", line) for extra in one.split(",")]
    assert len(extras) >= 5
    assert set(extras) <= set(PROJECT["optional-dependencies"])
    assert [path for path, line in commands if "mnemos-torch[" in line] == []


def test_the_command_of_an_extra_names_its_libraries(monkeypatch):
    needed = ["torch>=2", "tyro>=0.9; extra == 'lab'"]
    needed += ["scikit-learn<2,>=1; extra == 'data'", 'data-x; extra == "data-x"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needed)
    assert install_command("data") == "pip install 'scikit-learn<2,>=1'"
    needed += ["absent[more]>=2; extra == 'data'"]
    assert install_command("data") == "pip install 'absent[more]>=2'"  # scikit-learn is installed
    needed += ["numpy<1; extra == 'data'"]
    assert install_command("data") == "pip install 'absent[more]>=2' 'numpy<1'", "another version is"
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: None)
    assert install_command("data") == "pip install '.[data]' in a clone of mnemos"


def test_extras_take_the_versions_of_transformers_that_were_tried_and_no_others():
    first, *_, last = libraries.TRIED
    major, minor = last.split(".")
    found = [one for needed in PROJECT["optional-dependencies"].values() for one in needed if "transformers" in one]
    assert set(found) - {"compressive-transformer-pytorch>=0.4"} == {f"transformers>={first},<{major}.{int(minor) + 1}"}
    pinned = re.search(r"^transformers==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert pinned[1] in libraries.TRIED


def test_lower_bounds_are_the_versions_of_the_oldest_environment():
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    oldest = dict(line.replace("_", "-").split("==") for line in lines if "==" in line)
    extras = re.search(r"^EXTRAS = ([\w,]+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    needed = [one for extra in extras.split(",") for one in PROJECT["optional-dependencies"][extra]]
    bounded = [one for one in map(Requirement, PROJECT["dependencies"] + needed) if one.name != PROJECT["name"]]
    assert len(bounded) > 20
    for one in bounded:
        (bound,) = (part.version for part in one.specifier if part.operator == ">=")
        assert f"{oldest[one.name]}.".startswith(f"{bound}."), one
