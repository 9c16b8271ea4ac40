"""Papers and their claims as data: names, statements, the paper's numbers, and the function that reproduces each."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from mnemos.types import InputError

Values = Mapping[str, tuple[float, ...]]
_Entry = TypeVar("_Entry")


@dataclass(frozen=True)
class Claim:
    """One table or figure of a paper.

    about: what it measures. make: "module:function"; the function takes the claim and the options and returns a
    `Finding`. says: what is claimed. columns: the meaning of the numbers in each row of `values`.
    """

    name: str
    about: str
    make: str
    says: str
    columns: tuple[str, ...] = ()
    values: Values = field(default_factory=dict)


@dataclass(frozen=True)
class Paper:
    """A paper and those of its claims that this library can reproduce."""

    name: str
    title: str
    claims: tuple[Claim, ...]

    def claim(self, name: str) -> Claim:
        """The claim `name`. Raises InputError, with the most similar name, for an unknown one."""
        return choose(name, {claim.name: claim for claim in self.claims}, f"a claim of {self.name}")


def choose(name: str, entries: Mapping[str, _Entry], expected: str) -> _Entry:
    """The entry `name`. Raises InputError, with the most similar name, for an unknown one."""
    if name not in entries:
        near = difflib.get_close_matches(name, entries, 1, 0.5)
        hint = f"did you mean {near[0]!r}?" if near else "choose one of these"
        raise InputError(f"expected {expected} ({', '.join(entries)}), found {name!r}; {hint}")
    return entries[name]
