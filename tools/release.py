"""Check what a release needs, as far as this machine can: `make release-check`, or `.venv/bin/python tools/release.py`.

A row for each point of the list: "ok", "FAILED", or "to do" for what only a person can do. Exit code 1 if a row failed.
With --tag (a release, not a rehearsal) also if the date is missing or the tag is not this commit's. Without --dist it
builds the source distribution, and from that a wheel for this machine. It needs no network once the tools are in
.venv-release, which the target of make installs. The tests are the matter of `make test`.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / ".venv-release" / "bin"
SIZES = {".whl": 6e6, ".gz": 4e6}  # bytes
PLATFORMS = {
    "manylinux x86-64": r"manylinux_\d+_\d+_x86_64",
    "manylinux aarch64": r"manylinux_\d+_\d+_aarch64",
    "macOS arm64": r"macosx_\d+_\d+_arm64",
    "any": r"py3-none-any",
}
SOURCES = {"src", "hatch_build.py", "constraints.txt", "CHANGELOG.md", "CITATION.cff", "README.md", "LICENSE"}
SOURCES |= {"pyproject.toml", "PKG-INFO", ".gitignore"}
OF_A_MACHINE = re.compile(
    rb"""(?:^|[\s\0"'`(=:])/(?:home|root|Users|work|tmp|mnt)/\w|index-url[= ]+\w+://|\bfile:///\w"""
)
BY_HAND = (
    "a trusted publisher of mnemos-torch on the index: this repository, release.yml, environment pypi",
    "the environment pypi of the repository with a reviewer, and the branch main protected",
)


class FailedError(Exception):
    """Why a row failed, in one line."""


class ByHandError(Exception):
    """What a person has to do."""


def run(*command: str | Path, **settings: object) -> str:
    """The output of a command; FailedError with its last line if it does not exit with 0."""
    done = subprocess.run([str(x) for x in command], cwd=ROOT, capture_output=True, text=True, **settings)
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        named = next((line for line in lines if re.search(r"^(FAILED|ERROR)|error", line)), lines[-1] if lines else "")
        raise FailedError(f"{Path(command[0]).name} {' '.join(map(str, command[1:3]))}: {named.strip()[:160]}")
    return done.stdout


def tool(module: str, *words: str | Path) -> str:
    """Run a module of .venv-release."""
    if not TOOLS.exists():
        raise FailedError("no .venv-release; run `make release-check`")
    return run(TOOLS / "python", "-m", module, *words, env={**os.environ, "PATH": f"{TOOLS}:{os.environ['PATH']}"})


def project() -> dict:
    """The table [project] of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


# ---- what the repository says: the rows of the list return what they saw ----


def changes() -> tuple[str, str]:
    """The version and the date of the newest heading of CHANGELOG.md; no date where it is unreleased."""
    heading = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    if match := re.fullmatch(r"Unreleased \(([\w.]+)\)|([\w.]+) \((\d{4}-\d\d-\d\d)\)", heading):
        return match[1] or match[2], match[3] or ""
    raise FailedError(f'CHANGELOG.md: expected "## VERSION (DATE)" or "## Unreleased (VERSION)", found "## {heading}"')


def cited(field: str) -> str:
    """A field of CITATION.cff, empty where it is missing."""
    match = re.search(rf"^{field}: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    return match[1].strip("\"'") if match else ""


def versions() -> str:
    """One version everywhere."""
    said = {"pyproject.toml": project()["version"], "CHANGELOG.md": changes()[0], "CITATION.cff": cited("version")}
    if len(set(said.values())) > 1:
        raise FailedError(", ".join(f"{name} {version}" for name, version in said.items()))
    return f"{project()['version']} in {', '.join(said)}"


def date(tag: str) -> str:
    """The day of the release in CHANGELOG.md and CITATION.cff."""
    days = {"CHANGELOG.md": changes()[1], "CITATION.cff": cited("date-released")}
    if all(days.values()) and len(set(days.values())) == 1:
        return f"{days['CHANGELOG.md']} in {' and '.join(days)}"
    missing = ", ".join(f"{name}: {day or 'none'}" for name, day in days.items())
    raise (FailedError if tag else ByHandError)(f"the day of the release ({missing})")


def address() -> str:
    """Where the project is: without it the README's links lead nowhere on the index."""
    if not project().get("urls"):
        raise ByHandError("[project.urls] in pyproject.toml and repository-code in CITATION.cff")
    return ", ".join(project()["urls"])


def tagged(tag: str) -> str:
    """Nothing is changed or untracked; the tag of this version is free, or at this commit."""
    if changed := run("git", "status", "--porcelain").splitlines():
        raise FailedError(f"{len(changed)} files are changed or untracked, {changed[0][3:]} among them")
    name = f"v{project()['version']}"
    if tag and tag != name:
        raise FailedError(f"expected the tag {name}, found {tag}")
    here = name in run("git", "tag", "--points-at", "HEAD").split()
    if not here and name in run("git", "tag", "--list", name):
        raise FailedError(f"{name} is another commit's")
    if tag and not here:
        raise FailedError(f"{name} is not a tag of this commit")
    return f"{run('git', 'rev-parse', '--short', 'HEAD').strip()}, {name} is {'at this commit' if here else 'free'}"


def files() -> str:
    """No file names a path of somebody's machine or the address of a package index."""
    names = [name for name in run("git", "ls-files", "-z").split("\0")[:-1] if name != "tools/release.py"]
    wrong = [name for name in names if (ROOT / name).is_file() and OF_A_MACHINE.search((ROOT / name).read_bytes())]
    if wrong:
        raise FailedError(f"a machine's path or an index's address in {', '.join(wrong[:4])}")
    return f"no machine's path and no index's address in {len(names)} files"


def workflows() -> str:
    """Workflows, issue forms and CITATION.cff have the fields that their readers know; the auditor finds nothing."""
    github = ROOT / ".github"
    config = github / "ISSUE_TEMPLATE" / "config.yml"
    schemas = {
        "github-workflows": sorted((github / "workflows").glob("*.yml")),
        "github-issue-forms": sorted({*config.parent.glob("*.yml")} - {config}),
        "github-issue-config": [config],
        "citation-file-format": [ROOT / "CITATION.cff"],
    }
    for name, paths in schemas.items():
        tool("check_jsonschema", "--builtin-schema", f"vendor.{name}", *paths)
    run(TOOLS / "zizmor", "--offline", "--quiet", ".github/workflows")
    return f"{sum(map(len, schemas.values()))} files fit their schemas, zizmor found nothing"


# ---- the distributions ----


def build(dist: Path) -> str:
    """The source distribution, and from it the wheel; on Linux with the tag of the C library that it needs."""
    tool("build", "--no-isolation", "--outdir", dist)
    for wheel in dist.glob("*-linux_*.whl"):
        tool("auditwheel", "repair", "--wheel-dir", dist, wheel)
        wheel.unlink()
    return ", ".join(f"{path.name} ({path.stat().st_size / 1e6:.1f} MB)" for path in sorted(dist.iterdir()))


def contents(dist: Path) -> str:
    """What belongs into the distributions is there, and nothing else."""
    tracked = {x.removeprefix("src/") for x in run("git", "ls-files", "src").split()}
    paths = sorted(dist.iterdir())
    if not {".gz", ".whl"} <= {path.suffix for path in paths}:
        raise FailedError(f"expected a source distribution and a wheel, found {', '.join(path.name for path in paths)}")
    for path in paths:
        wheel = path.suffix == ".whl"
        with tempfile.TemporaryDirectory() as folder:
            shutil.unpack_archive(path, folder, "zip" if wheel else "gztar")
            top = Path(folder) if wheel else next(Path(folder).iterdir())  # of a source distribution, one folder
            members = {str(one.relative_to(top)): one.read_bytes() for one in top.rglob("*") if one.is_file()}
        if wheel:
            kernels = set() if path.name.endswith("-any.whl") else {"mnemos/native/libmnemos.so"}
            wrong = {name for name in members if ".dist-info/" not in name} ^ (tracked | kernels)
        else:
            wrong = {name for name in members if name.split("/")[0] not in SOURCES}
            wrong |= {name for name in members if name.startswith("src/")} ^ {f"src/{name}" for name in tracked}
        wrong |= {name for name, data in members.items() if OF_A_MACHINE.search(data)}
        if wrong:
            raise FailedError(f"{path.name}: missing, foreign or with a machine's path: {', '.join(sorted(wrong)[:4])}")
        size, most = path.stat().st_size, SIZES[path.suffix]
        if size > most:
            raise FailedError(f"{path.name} has {size / 1e6:.1f} MB, at most {most / 1e6:.0f}")
    return f"{len(paths)} distributions: the package, in wheels for a platform the kernels, and nothing else"


def tags(dist: Path, complete: bool) -> str:
    """Wheels for any Python 3, with tags that an index takes; of a release, one for each platform."""
    names = [path.name for path in sorted(dist.glob("*.whl"))]
    of = {label: [x for x in names if re.search(pattern, x)] for label, pattern in PLATFORMS.items()}
    if strange := [x for x in names if "-py3-none-" not in x or not any(x in fitting for fitting in of.values())]:
        raise FailedError(f"no tag of a release: {', '.join(strange)}")
    missing = [label for label, fitting in of.items() if not fitting]
    if complete and missing:
        raise FailedError(f"no wheel for {', '.join(missing)}")
    return f"{', '.join(label for label in of if label not in missing)}" + ("" if complete else " (of this machine)")


def smoke(dist: Path) -> str:
    """The wheel in a fresh environment, whose other packages are this one's, without a compiler on the path."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=False)
        bin_, (site,) = Path(folder, "bin"), Path(folder).glob("lib/python*/site-packages")
        offline = ["--no-index", "--no-deps", "--quiet", "--find-links", dist]
        run(sys.executable, "-m", "pip", "--python", bin_ / "python", "install", *offline, project()["name"])
        (site / "others.pth").write_text(sysconfig.get_path("purelib"))  # behind its own
        kernels = ["--kernels"] if any("-any" not in path.name for path in dist.glob("*.whl")) else []
        environment = {"PATH": str(bin_), "OMP_NUM_THREADS": "1"}
        said = run(bin_ / "python", ROOT / "tools" / "smoke.py", *kernels, env=environment)
        if f"imported {folder}" not in said:
            raise FailedError(f"expected the wheel's package, found {said.splitlines()[0]}")
        return "; ".join(" ".join(line.split()) for line in said.splitlines()[1:])


def main() -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist", type=Path, help="a folder of built distributions, all that will be published")
    parser.add_argument("--tag", default="", help="the tag that is being released")
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        dist = options.dist.resolve() if options.dist else Path(folder)
        rows: dict[str, Callable[[], str]] = {
            "version": versions,
            "date": lambda: date(options.tag),
            "tag": lambda: tagged(options.tag),
            "files": files,
            "workflows": workflows,
            **({} if options.dist else {"build": lambda: build(dist)}),
            "contents": lambda: contents(dist),
            "tags": lambda: tags(dist, options.dist is not None),
            "metadata": lambda: tool("twine", "check", "--strict", *sorted(dist.iterdir())) and "twine check --strict",
            "smoke": lambda: smoke(dist),
            "address": address,
        }
        for name, check in rows.items():
            try:
                state, words = "ok", check()
            except ByHandError as error:
                state, words = "to do", str(error)
            except (FailedError, OSError, StopIteration) as error:
                state, words = "FAILED", " ".join(str(error).split())
                failed += 1
            print(f"{state:7} {name:10} {words}", flush=True)
    for words in BY_HAND:
        print(f"{'to do':7} {'by hand':10} {words}")
    print(f"\n{failed} of {len(rows)} FAILED" if failed else f"\nnothing failed in {len(rows)} rows")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
