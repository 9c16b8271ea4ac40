"""The claims of three papers, and the code that reproduces each: `mnemos reproduce PAPER/CLAIM`.

A claim is data (`claims`): what the paper says, its numbers, and the function that measures it, which
returns a finding (`findings`): tables of our values beside the paper's, notes, pictures. Most train small models
(`small_runs`) that differ in one thing; experiments over seeds add differences and power (`experiments`). Whether a
claim was seen is a row of `verdicts`. Read `reproduce` first, then a claim and its function in PAPER/tables or
PAPER/figures. PAPER/recipes has the models at the paper's size; `baselines` what the comparisons alone need.
"""
