"""The report's last section: the commit that trained each run, uncommitted changes, and the data's files."""

import re

import pytest
from synthetic_runs import COMMIT, edited, write_comparison, write_run

from mnemos.lab.report.provenance import rollout as rollout_sentence
from mnemos.lab.report.provenance import section
from mnemos.lab.report.read import read

OTHER = "0123456789" * 4


def rows(page, caption):
    """The cells of the table with this caption, without its head."""
    table = page[page.index(caption) :]
    found = re.findall(r"<tr>.*?</tr>", table[: table.index("</table>")], re.S)[1:]
    return [
        [re.sub("<[^>]+>", "", cell).strip() for cell in re.findall(r"<t[hd].*?</t[hd]>", one, re.S)] for one in found
    ]


@pytest.mark.parametrize(
    ("rollout", "said", "unsaid"),
    [
        ({"segments": 8, "replay": True}, "an update reads 8 segments, one batch each, with memory replay; ", "later"),
        ({"segments": 8, "slide": 8}, "the trainer cuts no gradient", "later"),
        ({"segments": 8, "slide": 3}, "; the next update begins 3 segments later; ", "replay"),
        ({"segments": 4, "replay": False, "horizon": 2}, "cuts the gradient after every 2 segments", "replay"),
        ({"segments": 4, "replay": True, "horizon": 1}, "cuts the gradient after every 1 segment", "replay"),
    ],
)
def test_how_an_update_reads_is_said_of_the_trainer_and_not_of_the_model(rollout, said, unsaid):
    """A model may detach its state, and without replay a horizon bounds what is in memory."""
    sentence = rollout_sentence({"train": {"rollout": rollout}}, None)
    assert said in sentence
    assert unsaid not in sentence


def test_each_run_has_the_commit_that_trained_it(tmp_path):
    folder = write_comparison(
        tmp_path / "c", seeds=(0, 1), provenance={"command": ["mnemos", "compare", "a", "b"], "commit": OTHER}
    )
    files = [{"name": "train.tsv", "bytes": 1234567, "sha256": "a" * 64}]
    for run in ("demo-0", "demo-1"):
        edited(
            folder / run / "run.json",
            data={"count": 1, "bytes": 1234567, "sha256": "b" * 64, "hashed": 1, "files": files},
        )
    edited(folder / "demo-1/run.json", resumed=[{"step": 3, "commit": OTHER, "dirty": False}])
    edited(folder / "demo-cached-0/run.json", commit=OTHER, dirty=True)
    page = section(read([folder]))
    commits = {cells[0]: cells[3] for cells in rows(page, "The runs, each with the commit that trained it")}
    assert commits["demo-0"] == commits["demo-wider-1"] == COMMIT[:10]
    assert commits["demo-1"] == f"{COMMIT[:10]}, {OTHER[:10]}"
    assert commits["demo-cached-0"] == f"{OTHER[:10]}+"
    assert "demo-cached-0 was trained from source with uncommitted changes" in page
    assert "git checkout" not in page, "no one commit trained all runs"
    edited(folder / "demo-wider-0/run.json", resumed=[{"step": 3, "commit": COMMIT, "dirty": True}])
    assert "demo-cached-0 and demo-wider-0 were trained from source with" in section(read([folder]))
    assert rows(page, "The data: 1 file of 1,234,567 bytes") == [["train.tsv", "1,234,567", "a" * 64]]


def test_what_reports_is_not_what_trained(tmp_path):
    folder = write_comparison(tmp_path / "c", provenance={"command": ["mnemos", "compare", "a", "b"], "commit": OTHER})
    page = section(read([folder]))
    assert f"git checkout {COMMIT}" in page
    assert OTHER[:10] not in page
    assert "uncommitted" not in page.split("The runs, each")[0]


def test_the_commands_of_a_run_that_was_trained_for_longer_reproduce_it(tmp_path):
    run = write_run(tmp_path / "a", "demo", 0)
    words = ["mnemos", "train", "--resume", "a"]
    resumed = [
        {"step": 3, "commit": COMMIT, "command": words},
        {"step": 6, "commit": COMMIT, "command": [*words, "--train.steps", "9"]},
    ]
    edited(tmp_path / "a/run.json", command=["mnemos", "train", "demo", "--train.steps", "6"], resumed=resumed)
    said = section(read([run])).split("<h3>Commands</h3>")[1]
    lines = re.search(r"<pre>(.*?)</pre>", said, re.S)[1].splitlines()
    assert lines == [
        f"git checkout {COMMIT}",
        "mnemos train demo --train.steps 6",
        "mnemos train --resume a --train.steps 9  # resumed after update 6",
    ]
    edited(tmp_path / "a/run.json", resumed=[*resumed[:1], resumed[1] | {"commit": OTHER}])
    assert "git checkout" not in section(read([run])), "two commits trained the run"
