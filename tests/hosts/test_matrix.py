"""The matrix of hosts: the architectures that no other test runs over, and what docs/hosts.md says of all."""

import itertools
import json
from pathlib import Path

import pytest
from hosts import FEW
from matrix import CHECKS, MODELS

ROOT = Path(__file__).parents[2]
SOME = (*FEW, "hf_gpt2", "hf_mistral")  # of architectures that read a row whole, and of decoders
FAST = ("trains", "strict state", "deepcopy", "save, load", "uncache", "bfloat16", "rows alone")
QUICK = {*itertools.product(SOME, FAST), ("hf_vit", "checkpointing"), ("hf_swin", "checkpointing")}  # of layers, stages
# Those whose attention has the adapter of another architecture here: the same row of `ADAPTERS`, the same inputs.
# fmt: off
ALIKE = [
    "torchvision_swin2", "timm_dinov2", "timm_swin2", "hf_dinov2", "hf_beit", "hf_vit_msn", "hf_clip_vision",
    "hf_xlm_roberta", "hf_camembert", "hf_electra", "hf_deberta2", "hf_mbart", "hf_pegasus", "hf_whisper",
    "hf_hubert", "hf_mistral", "hf_qwen2", "hf_qwen3", "hf_gemma3", "hf_cohere", "hf_falcon_alibi", "hf_Gemma",
    "hf_Phi3", "hf_Olmo2",
]
# fmt: on
pytestmark = pytest.mark.filterwarnings("ignore")  # of the hosts


def holds(name: str, check: str) -> bool:
    """Whether a check holds or its reason not to apply is the one in the results. It raises where it does not hold."""
    reason = CHECKS[check](name)
    rows = json.loads((ROOT / "results" / "host_matrix.json").read_text())["rows"]
    return reason is None or reason == rows[name][check]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive) if name in ALIKE else name for name in MODELS]
)
def test_with_the_gate_closed_the_host_is_what_it_was_and_padding_does_not_matter(name):
    assert holds(name, "closed gate")
    assert holds(name, "padding")


@pytest.mark.parametrize(
    ("name", "check"),
    [
        (name, check) if (name, check) in QUICK else pytest.param(name, check, marks=pytest.mark.exhaustive)
        for name in MODELS
        for check in CHECKS
    ],
)
def test_every_check(name, check):
    assert holds(name, check)


def test_the_page_says_what_was_measured(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from host_matrix import BEGIN, END, RESULTS, table

    rows = json.loads(RESULTS.read_text())["rows"]
    assert list(rows) == list(MODELS), "run tools/host_matrix.py"
    page = (ROOT / "docs" / "hosts.md").read_text()
    assert page[page.index(BEGIN) + len(BEGIN) : page.index(END)].strip() == table(rows).strip()
    passing = [name for name, row in rows.items() if not any(said.startswith("no: ") for said in row.values())]
    assert len(passing) >= 45
