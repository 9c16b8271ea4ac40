"""What the tests of several rooms are given. Stand-ins that more than one room's tests use lie beside this file.

PyTorch is imported where it is used: the process that starts the others would take seconds for it before they start.
"""

import gc
import os
from collections import defaultdict
from pathlib import Path

import fork_server
import pytest
import quick
from pairwise import cover

pytest_plugins = ["record"]
# What is imported stays; to search it for garbage takes a fifth of the time of imports.
gc.disable()
quick.leave_out_the_disk()
# Which library computes dense layers would be measured: equal tests could have other bits, and so could processes.
os.environ.setdefault("MNEMOS_DENSE", "blas")
# Threads that spin while they wait take the cores from the other test process: a call of two threads took seconds.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Variables of distributed training. Fabric leaves LOCAL_RANK behind, and transformers then waits for other processes.
DISTRIBUTED = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
BEFORE = {name: os.environ.get(name) for name in DISTRIBUTED}


def pytest_addoption(parser):
    parser.addoption("--exhaustive", action="store_true", help="every combination of parameters, not every pair")
    parser.addoption("--cases", type=int, help="of each test's parametrised cases, so many (by default all of them)")


class _Marks:
    """Marks what tests/slow.txt names, before `-m` chooses."""

    @staticmethod
    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(items):
        names = set((Path(__file__).parent / "slow.txt").read_text().split())
        for item in items:
            if item.nodeid.partition("[")[0] in names:
                item.add_marker("slow")


def pytest_configure(config):
    config.pluginmanager.register(_Marks())
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        fork_server.serve_others()


@pytest.hookimpl(trylast=True)  # after `-m` has left out what is slow
def pytest_collection_modifyitems(config, items):
    """Which of a test's parametrised cases run.

    By default enough that every pair of parameters' values meets (see `pairwise`), or of a test marked `each_value`
    every value; none that is marked `exhaustive`. With `--exhaustive` all. With `--cases` the first of these, the last,
    and evenly between them, so that `make check` is quick.
    """
    most = config.getoption("cases")
    if most is not None and most < 1:
        raise pytest.UsageError(f"--cases must be 1 or more, found {most}")
    every = config.getoption("exhaustive")
    tests = defaultdict(list)
    for item in items:
        if every or item.get_closest_marker("exhaustive") is None:
            tests[item.nodeid.partition("[")[0]].append(item)
    if not every:
        tests = {name: _covering(cases) for name, cases in tests.items()}
    if most is not None:
        step = max(1, most - 1)
        tests = {
            name: [cases[round(k * (len(cases) - 1) / step)] for k in range(most)] for name, cases in tests.items()
        }
    kept = {case for cases in tests.values() for case in cases}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.fixture(scope="session", autouse=True)
def _charts_without_their_library():
    """Pages hold a stand-in for the library of charts, which takes seconds to put together; see `chart_library`."""
    try:
        import vl_convert
    except ImportError:
        yield
        return
    whole = vl_convert.javascript_bundle
    vl_convert.javascript_bundle = lambda: "window.vegaEmbed = null;"
    yield
    vl_convert.javascript_bundle = whole


@pytest.fixture(scope="session", autouse=True)
def _seeds_of_the_processor_alone():
    """`torch.manual_seed` notes its caller for every sort of device that is not there: a fiftieth of the time."""
    import torch

    with pytest.MonkeyPatch.context() as patched:
        for device in (torch.cuda, torch.mtia, torch.xpu):
            if not device.is_available():
                patched.setattr(device, "manual_seed_all", lambda seed: None)
        yield


@pytest.fixture(autouse=True)
def _distributed_variables_as_before():
    yield
    for name, value in BEFORE.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(scope="session")
def chart_library(_charts_without_their_library):
    """The library of charts itself."""
    libraries = pytest.importorskip("vl_convert.vl_convert")
    return libraries.javascript_bundle()


def _covering(cases: list) -> list:
    pairs = cases[0].get_closest_marker("each_value") is None
    return [cases[number] for number in cover([_values(case) for case in cases], pairs)]


def _values(item) -> list[tuple]:
    """What a case has of each list of parameters; parameters that one list gives together are one value."""
    given = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    values = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        values.append(tuple((name, id(given.pop(name))) for name in names if name in given))
    fixtures = [(name, id(value)) for name, value in given.items()]
    return [item.nodeid.partition("[")[0], *values, *fixtures]


@pytest.fixture(scope="session")
def exhaustive(request) -> bool:
    """Whether the long form of a test is wanted."""
    return request.config.getoption("exhaustive")


def pytest_collection_finish(session):
    """Start the server of processes beforehand, where a test will need one.

    What is alive by now stays so: the garbage collector does not search it after each of some thousand tests. What the
    tests import later stays too, so the collector searches everything after a million new objects, not after 70,000.
    """
    gc.freeze()
    gc.set_threshold(5000, 20, 10)
    gc.enable()
    if any("slow" in item.keywords or "forks" in item.fixturenames for item in session.items):
        fork_server.serve()


@pytest.fixture(scope="session")
def forks():
    """Asked for by fast tests that start processes: the server has been started."""


@pytest.fixture(scope="module")
def forked_comparisons(forks):
    """`compare`, called in this process, forks its runs from the tests' server instead of spawning interpreters."""
    import processes

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mnemos.lab.compare.processes.multiprocessing.get_context", lambda _: processes.CONTEXT)
        yield


@pytest.fixture
def threads():
    """Sets the number of threads, for this test."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def poisoned():
    """Memory that nothing has written holds NaN."""
    import torch

    torch.use_deterministic_algorithms(True)
    for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        assert torch.empty(3, device=device).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
