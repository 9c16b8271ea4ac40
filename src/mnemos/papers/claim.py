"""What a paper claims, as data: each claim's name, what it says, the paper's values, and what reproduces it."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from mnemos.types import InputError

Values = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Claim:
    """One table or figure. make: "module:function", which takes the claim and the options and returns a Finding.

    columns: what the numbers in each row of `values` are. says: what the paper reads off it.
    """

    name: str
    about: str
    make: str
    says: str
    columns: tuple[str, ...] = ()
    values: Values = field(default_factory=dict)


@dataclass(frozen=True)
class Paper:
    """A paper and the claims that can be reproduced here."""

    name: str
    title: str
    claims: tuple[Claim, ...]

    def claim(self, name: str) -> Claim:
        """The claim of that name. Raises InputError, with the nearest name, where there is none."""
        known = {claim.name: claim for claim in self.claims}
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.5)
            hint = f"did you mean {self.name}/{near[0]}?" if near else f"known: {', '.join(known)}"
            raise InputError(f"{self.name} has no claim {name!r}; {hint}")
        return known[name]
