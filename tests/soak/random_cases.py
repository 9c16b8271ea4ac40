"""Random cases of hypothesis, the same in every run."""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st


def cases(count: int, of: int = 0) -> Callable[..., Any]:
    """`given` with so many cases, the same in every run, and no search for smaller ones."""

    def with_cases(strategy: st.SearchStrategy[Any], test: Callable[[Any], None]) -> None:
        checks = settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        seed(of)(checks(given(strategy)(test)))()

    return with_cases
