"""The codes that Python hands to the C++ kernels are those of its headers."""

import re

import pytest
import torch

from mnemos import native
from mnemos.native import codes
from mnemos.native.build import HERE

ENUMS = {  # names that differ from Python's
    "Type": ({str(dtype).removeprefix("torch."): code for dtype, code in codes.TYPES.items()}, {}),
    "Map": (codes.FEATURE_MAPS, {}),
    "Weights": (codes.WEIGHTS, {}),
    "Position": (codes.POSITIONS, {"NONE": "NOWHERE"}),
    "Attention": (codes.ATTENTIONS, {}),
    "Decay": (codes.DECAYS, {}),
    "Activation": (codes.ACTIVATIONS, {"RELU": "RECTIFY"}),
}


@pytest.mark.parametrize("name", ENUMS)
def test_codes_are_those_of_the_headers(name):
    ours, renamed = ENUMS[name]
    text = "".join(path.read_text() for path in HERE.rglob("*.h"))
    (body,) = re.findall(rf"enum (?:class )?{name} : i64 {{(.*?)}};", text)
    theirs = {key: int(number) for key, number in re.findall(r"(\w+) = (\d+)", body)}
    assert theirs == {renamed.get(key.upper(), key.upper()): code for key, code in ours.items()}


def test_the_order_of_bfloat16_weights_and_no_code_of_float64():
    assert f"constexpr i64 PAIRS = {codes.PAIRS};" in (HERE / "decoder" / "matrix.h").read_text()
    assert torch.float64 not in codes.TYPES


def test_a_record_packed_in_another_order_is_refused():
    with pytest.raises(RuntimeError, match="data b t h, Python data b h t"):
        native.layout("Rows", "data b h t")
    del native._layouts["Rows"]
