"""The codes that Python hands to the C++ kernels are those of its headers."""

import re

import pytest
import torch

from mnemos import native
from mnemos.native import codes
from mnemos.native.build import HERE


def enum(name):
    """{constant: number} of an enum in the kernels' headers."""
    text = "".join(path.read_text() for path in HERE.rglob("*.h"))
    (body,) = re.findall(rf"enum (?:class )?{name} : i64 {{(.*?)}};", text)
    return {key: int(number) for key, number in re.findall(r"(\w+) = (\d+)", body)}


def test_types():
    assert enum("Type") == {str(dtype).removeprefix("torch.").upper(): code for dtype, code in codes.TYPES.items()}
    assert torch.float64 not in codes.TYPES


def test_feature_maps():
    assert enum("Map") == {name.upper(): code for name, code in codes.FEATURE_MAPS.items()}


def test_weights():
    assert enum("Weights") == {name.upper(): code for name, code in codes.WEIGHTS.items()}


def test_the_order_of_bfloat16_weights():
    assert f"constexpr i64 PAIRS = {codes.PAIRS};" in (HERE / "decoder" / "matrix.h").read_text()


def test_positions():
    assert enum("Position") == {{"none": "NOWHERE"}.get(k, k.upper()): code for k, code in codes.POSITIONS.items()}


def test_attentions_and_activations():
    assert enum("Attention") == {name.upper(): code for name, code in codes.ATTENTIONS.items()}
    assert enum("Decay") == {name.upper(): code for name, code in codes.DECAYS.items()}
    assert enum("Activation") == {{"relu": "RECTIFY"}.get(k, k.upper()): code for k, code in codes.ACTIVATIONS.items()}


def test_a_record_packed_in_another_order_is_refused():
    with pytest.raises(RuntimeError, match="data b t h, Python data b h t"):
        native.layout("Rows", "data b h t")
    del native._layouts["Rows"]
