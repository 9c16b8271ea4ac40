"""Claims that are not measured yet: what the paper says, its values, and why ours are missing."""

from .claim import Claim
from .findings import Finding, Table
from .reproduce import Options


def not_yet(claim: Claim, options: Options) -> Finding:
    """The paper's values and the sentence in `claim.missing`. Trains and writes nothing; `options` are not used."""
    found = Finding([], [f"Not yet: {claim.missing}"])
    if claim.values:
        table = Table(claim.about, ["", *(f"paper {column}" for column in claim.columns)])
        for name, values in claim.values.items():
            table.add(name, *values)
        found.tables.append(table)
    return found
