"""What is released: the tag of a wheel in each case, one version everywhere, workflows, and the list's own checks."""

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from mnemos.native import build as building

ROOT = Path(__file__).parents[1]
WHEELS = "manylinux_x86_64 manylinux_aarch64 macosx_arm64"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem + "_released", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def release():
    return loaded(ROOT / "tools" / "release.py")


@pytest.fixture
def hook(monkeypatch):
    """The tag, whether it is pure Python, and the added files of a wheel; the compiler is not run."""
    interface = SimpleNamespace(BuildHookInterface=object)  # hatchling is there only while a wheel is built
    monkeypatch.setitem(sys.modules, "hatchling.builders.hooks.plugin.interface", interface)
    module = loaded(ROOT / "hatch_build.py")
    monkeypatch.setattr(module, "_builder", lambda path: building)
    made = module.NativeKernels()
    made.root = str(ROOT)
    made.app = SimpleNamespace(display_warning=lambda words: None, display_info=lambda words: None)

    def tagged(version="standard"):
        given = {"force_include": {}, "pure_python": True}
        made.initialize(version, given)
        return given.get("tag"), given["pure_python"], list(given["force_include"].values())

    return tagged


@pytest.mark.parametrize(
    ("platform", "machine", "tag"),
    [
        ("linux-x86_64", "x86_64", "linux_x86_64"),
        ("linux-aarch64", "x86_64", "linux_aarch64"),
        ("macosx-11.0-arm64", "arm64", "macosx_11_0_arm64"),
        ("macosx-10.13-universal2", "arm64", "macosx_11_0_arm64"),
        ("macosx-10.13-universal2", "x86_64", "macosx_11_0_x86_64"),
    ],
)
def test_a_wheel_with_kernels_is_of_one_platform_and_every_python(hook, monkeypatch, platform, machine, tag):
    commands = []
    monkeypatch.setattr(building.sysconfig, "get_platform", lambda: platform)
    monkeypatch.setattr(building.platform, "machine", lambda: machine)
    monkeypatch.setattr(building, "compiler", lambda: ["no-such-c++"])
    monkeypatch.setattr(building, "_takes", lambda command, flags: True)
    monkeypatch.setattr(building, "_run", commands.append)
    monkeypatch.setattr(building.os, "replace", lambda a, b: None)
    assert hook() == (f"py3-none-{tag}", False, ["mnemos/native/libmnemos.so"])
    assert hook("editable") == (f"py3-none-{tag}", False, [])
    given = {word for command in commands for word in command}
    assert not any(word.startswith(("-march", "-mcpu", "-mtune", "-Ofast", "-ffast-math")) for word in given)
    assert ("-mavx2" in given) == tag.endswith("x86_64")
    assert ("-arch" in given, "-ldl" in given) == ((True, False) if "macosx" in tag else (False, True))
    *compiled, linked = commands[: len(commands) // 2]
    objects = [command[-1] for command in compiled]
    once, baseline = len(building.ONCE), len(building.PER_PROCESSOR)
    assert all(x.endswith(f"{name}.o") for name, x in zip(building.ONCE, objects, strict=False))
    # what the linker keeps of several runs on every processor
    assert all("_baseline.o" in x for x in objects[once : once + baseline])
    assert [x for x in linked if x in objects] == objects


def test_without_a_compiler_a_wheel_is_pure_python(hook, monkeypatch):
    monkeypatch.setenv("CXX", "none")
    assert hook() == (None, True, [])


def test_the_versions_agree(release):
    assert release.versions().startswith(release.project()["version"])


@pytest.mark.parametrize("name", ["mutate", "sanitize"])
def test_the_tests_that_a_tool_runs_exist(name):
    named = re.findall(r'"(tests/[\w/]+(?:\.py)?)"', (ROOT / "tools" / f"{name}.py").read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_wheels_are_built_for_the_platforms_that_the_list_wants(release):
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    assert {name.partition("-")[2] for name in built["build"]} == {*WHEELS.split()}
    assert built["macos"]["environment"]["MACOSX_DEPLOYMENT_TARGET"] == building.MACOS
    assert {label.split()[0] for label in release.PLATFORMS} == {"manylinux", "macOS", "any"}
