"""Results in, one self-contained HTML report out; never trains.

`read` makes `Results` of folders, `run_records` one run of a folder. `page` asks each section for HTML: sentences and
tables of scores (`verdict`, `scores`, `costs`, `provenance`), `curves`, what memories did (`memory_use`,
`gated_caches`), what models put out (`outputs`). All draw with `charts` and write with `markup`;
`shell` makes the file. Start with `page`, whose SECTIONS are in the order of the report.
"""

from .page import report

__all__ = ["report"]
