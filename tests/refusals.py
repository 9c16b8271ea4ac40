"""What is refused is one line that says what was expected."""

from collections.abc import Callable

import pytest

from mnemos.errors import InputError


def refuses(words: str, call: Callable, *given: object, **named: object) -> None:
    """The call raises InputError with these words, a pattern, in one line."""
    with pytest.raises(InputError, match=words) as error:
        call(*given, **named)
    assert "\n" not in str(error.value)
