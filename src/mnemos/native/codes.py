"""Numbers that Python and the kernels share. tests/ops/test_kernel_codes.py compares them with the headers."""

import torch

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum Type in call.h
FEATURE_MAPS = {"identity": 0, "elu": 1, "relu": 2}  # enum Map in call.h; identity: φ was applied before the call
WEIGHTS = {"float32": 0, "bfloat16": 1, "int8": 2}  # enum Weights in decode.h
POSITIONS = {"none": 0, "learned": 1, "sinusoidal": 2, "rotary": 3}  # enum Position in decode.h
ATTENTIONS = {  # enum Attention in decode.h
    "linear": 0,
    "softmax": 1,
    "delta": 2,
    "gla": 3,
    "retention": 4,
    "mamba2": 5,
}
DECAYS = {"none": 0, "head": 1, "channel": 2}  # enum Decay in decode.h
ACTIVATIONS = {"relu": 0, "gelu": 1, "silu": 2}  # enum Activation in decode.h
PAIRS = 32  # of matrix.h: bfloat16 weights are stored in groups of so many columns, in the order 0, 16, 1, 17, ...
