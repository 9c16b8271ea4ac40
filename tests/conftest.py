"""What the tests of several rooms are given. Stand-ins that more than one room's tests use lie beside this file."""

import pytest
import torch
from native_kernels import NAMES, VARIANTS, run_variant


@pytest.fixture(params=VARIANTS, ids=lambda i: NAMES[i])
def variant(request, monkeypatch):
    """Every kind of the native kernels that this processor can run, by number."""
    run_variant(request.param, monkeypatch)
    return request.param


@pytest.fixture
def threads():
    """Sets the number of threads, for this test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def poisoned():
    """Memory that nothing has written holds NaN."""
    torch.use_deterministic_algorithms(True)
    for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        assert torch.empty(3, device=device).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
