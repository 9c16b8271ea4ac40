"""The viewer of what a memory holds: a model reads a document, and one page shows what it wrote, read and kept. Start
with `viewer`; `record` reads segment by segment, and `readers` has one for each kind of memory.
"""
