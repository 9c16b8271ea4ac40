"""The codes that Python hands to the C++ kernels are those of its headers."""

import re

import torch

from mnemos.native import codes
from mnemos.native.build import HERE


def enum(name):
    """{constant: number} of an enum in the kernels' headers."""
    text = "".join(path.read_text() for path in HERE.glob("*.h"))
    (body,) = re.findall(rf"enum {name} : i64 {{(.*?)}};", text)
    return {key: int(number) for key, number in re.findall(r"(\w+) = (\d+)", body)}


def test_types():
    assert enum("Type") == {str(dtype).removeprefix("torch.").upper(): code for dtype, code in codes.TYPES.items()}
    assert torch.float64 not in codes.TYPES


def test_feature_maps():
    assert enum("Map") == {name.upper(): code for name, code in codes.FEATURE_MAPS.items()}


def test_weights():
    names = {"FULL": "float32", "HALVED": "bfloat16", "WHOLE": "int8"}
    assert {names[key]: code for key, code in enum("Weights").items()} == codes.WEIGHTS


def test_the_order_of_bfloat16_weights():
    assert f"constexpr i64 PAIRS = {codes.PAIRS};" in (HERE / "matrix.h").read_text()


def test_positions():
    assert enum("Position") == {{"none": "NOWHERE"}.get(k, k.upper()): code for k, code in codes.POSITIONS.items()}


def test_attentions_and_activations():
    assert enum("Attention") == {name.upper(): code for name, code in codes.ATTENTIONS.items()}
    assert enum("Decay") == {name.upper(): code for name, code in codes.DECAYS.items()}
    assert enum("Activation") == {{"relu": "RECTIFY"}.get(k, k.upper()): code for k, code in codes.ACTIVATIONS.items()}
