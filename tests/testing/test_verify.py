"""`mnemos verify`: right backends pass, wrong numbers and NaN fail, and the exit code says so."""

import dataclasses

import pytest
import torch

from mnemos import InputError
from mnemos.lab.cli.verbs import main
from mnemos.ops.convolution import BACKENDS
from mnemos.testing import verify

FEW = ["short_convolution", "gated", "dense", "linear_attention (both"]


def test_the_operations_of_this_machine_pass(capsys):
    assert main(["verify", *FEW]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("processor")
    assert lines[2] == "dense layers few rows blas, many rows blas, gradients of weights blas"
    assert "torch" in lines[3]
    assert lines[-1] == f"all {len(lines) - 8} passed"
    assert sum("chunked" in line for line in lines) == 4  # two operations, float64 and float32


@pytest.mark.parametrize("wrong", [1.001, float("nan")])
def test_wrong_numbers_and_gradients_fail(wrong, monkeypatch, capsys):
    right = BACKENDS.by_name["chunked"]

    def replace(run):
        monkeypatch.setitem(BACKENDS.by_name, "chunked", dataclasses.replace(right, run=run))

    replace(lambda *given: (wrong * right.run(*given)[0], right.run(*given)[1]))
    assert main(["verify", "short"]) == 1
    assert "2 of " in capsys.readouterr().out.splitlines()[-1]

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, g):
            return wrong * g

    replace(lambda *given: (Gradient.apply(right.run(*given)[0]), right.run(*given)[1]))
    failed = [result for result in verify(["short"]) if not result.passed]
    assert {result.backend for result in failed} == {"chunked"}
    assert all(result.values < result.bound for result in failed)
    with pytest.raises(InputError, match=r"found .'sorting'"):
        next(verify(["sorting"]))
