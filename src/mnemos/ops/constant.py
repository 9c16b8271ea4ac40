"""Answers that never change while a process lives, for torch.compile to ask once."""

from collections.abc import Callable
from typing import Any


def constant(function: Callable[..., Any]) -> Any:
    """`torch.compiler.assume_constant_result(function)`, without the second that importing the compiler takes."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
