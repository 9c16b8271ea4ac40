"""The viewer of what a memory holds: a model reads a document, and one page shows what it wrote, read and kept.

`record` lets a model read segment by segment. `observe` tells what its parts were called with; a reader for each memory
(`readers`: of slots and memory tokens in `segments`, of windows and gated caches in `caches`, of sums in `sums`) makes
of that what was written, read and moved. `effects` empties parts of the memory and looks at predictions; `images` does
for models of images what fits them. `page` says it in sentences and packs the arrays (`pack`) for look.js. Start with
`viewer`, which has the public functions.
"""
