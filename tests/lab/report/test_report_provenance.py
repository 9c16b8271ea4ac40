"""The report's last section: the commit that trained each run, and the commands."""

import json
import re

from synthetic_runs import COMMIT, edited, read, write_comparison

from mnemos.lab.report.provenance import section

OTHER = "0123456789" * 4


def test_each_run_has_the_commit_that_trained_it(tmp_path):
    folder = write_comparison(
        tmp_path / "c", seeds=(0, 1), provenance={"command": ["mnemos", "compare", "a", "b"], "commit": OTHER}
    )
    edited(folder / "demo-1/run.json", resumed=[{"step": 3, "commit": OTHER, "dirty": False}])
    edited(folder / "demo-cached-0/run.json", commit=OTHER, dirty=True)
    page = section(read([folder]))
    found = re.findall(r'<th scope="row"><code>(demo.*?)</code>.*?data-head="commit"><code>(.*?)</code>', page)
    commits = dict(found)
    assert commits["demo-0"] == commits["demo-wider-1"] == COMMIT[:10]
    assert commits["demo-1"] == f"{COMMIT[:10]}, {OTHER[:10]}"
    assert commits["demo-cached-0"] == f"{OTHER[:10]}+"
    assert "<pre>mnemos compare a b</pre>" in page
    machines = re.findall(r'data-head="machine">(.*?)<', page)
    assert set(machines) == {"cpu, AVX2, 2 cores"}


def test_a_run_that_ended_early_has_its_own_number_of_steps(tmp_path):
    folder = write_comparison(tmp_path / "c", seeds=(0,))
    last = json.loads((folder / "demo-0/result.json").read_text())["steps"]
    for name in ("demo-0", "demo-cached-0"):
        edited(folder / name / "result.json", steps=last + 3)  # patience ended it between two records
    (folder / "demo-cached-0/result.json").unlink()
    counted = re.findall(r'<code>(demo.*?)</code>.*?data-head="steps">(.*?)<', section(read([folder])))
    assert dict(counted)["demo-0"] == f"{last + 3:,}"
    assert dict(counted)["demo-cached-0"] == f"{last:,}"
