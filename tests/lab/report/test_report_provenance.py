"""The report's last section: the commit that trained each run, and the commands."""

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
