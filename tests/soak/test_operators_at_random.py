"""Random calls of every public operator beside its oracle; `make soak` runs ten thousand of each."""

import pytest
import soak_operators

from mnemos import ops


def test_every_public_operator_is_tried():
    missing = set(ops.__all__) - {"backends", "which", "Linear"} - set(soak_operators.OPERATORS)
    assert not missing, "add it to tests/soak/soak_operators.py"


@pytest.mark.parametrize("name", soak_operators.OPERATORS)
def test_equals_its_oracle(name):
    failed = []
    soak_operators.search(name, 12, lambda case, error: failed.append((error, case)), of=7)
    assert not failed


def test_a_difference_is_found(monkeypatch):
    right = soak_operators.ops.short_convolution
    monkeypatch.setattr(
        soak_operators.ops, "short_convolution", lambda x, weight, *rest: right(x, weight * 1.001, *rest)
    )
    failed = []
    soak_operators.search("short_convolution", 12, lambda case, error: failed.append(error), of=7)
    assert failed
