"""What a program outside the package is told of its types: mypy reads this file, nobody runs it.

`warn_unused_ignores` makes it a test of both kinds: a line that is right must pass, and one that is wrong must not.
"""

from typing import assert_type

import torch
from torch import Tensor

import mnemos
from mnemos.attention import GatedCacheAttention, LinearAttention, RelativeAttention, SoftmaxAttention
from mnemos.attention.gated import GatedState
from mnemos.attention.linear import PlacedSums
from mnemos.lab.papers.baselines.reformer import ReformerAttention
from mnemos.memory import KeyValues, Segments
from mnemos.memory.key_values import BranchedKeyValues
from mnemos.models import LSTM, LSTMConfig, LSTMState, MemformerState, TransformerState
from mnemos.ops.linear import LinearState
from mnemos.types import Advances, Attention, HeadAttention, RecurrentModel

x = torch.zeros(1, 3, 8)
ids = torch.zeros(1, 3, dtype=torch.int64)

softmax = SoftmaxAttention(8, 2, causal=True)
assert_type(softmax(x), tuple[Tensor, KeyValues | BranchedKeyValues | None])
assert_type(LinearAttention(8, 2, causal=True)(x), tuple[Tensor, LinearState | PlacedSums | None])
assert_type(ReformerAttention(8, 2)(x), tuple[Tensor, KeyValues | None])
assert_type(RelativeAttention(8, 2)(x), tuple[Tensor, Segments | None])
gated = GatedCacheAttention(8, 2, softmax, mnemos.GRC(length=4), causal=True)
assert_type(gated(x), tuple[Tensor, GatedState | None])
layers: list[HeadAttention] = [softmax, gated]
attention: Attention = gated

model = mnemos.Transformer(dim=8, num_heads=2)
logits, state = model(ids)
assert_type(state, TransformerState | None)
assert_type(mnemos.Memformer()(ids), tuple[Tensor, MemformerState])
assert_type(LSTM(LSTMConfig())(ids), tuple[Tensor, LSTMState])
models: list[RecurrentModel] = [model, mnemos.Memformer(), LSTM(LSTMConfig())]
advances: Advances = mnemos.Memformer()

# A state keeps its type.
assert_type(mnemos.select(state, torch.tensor([0])), TransformerState | None)
assert_type(mnemos.reset(state, torch.tensor([True])), TransformerState | None)
assert_type(mnemos.detach(softmax(x)[1]), KeyValues | BranchedKeyValues | None)
assert_type(mnemos.join([softmax(x)[1], softmax(x)[1]]), KeyValues | BranchedKeyValues | None)

with mnemos.collect_auxiliary_losses() as found:
    mnemos.add_auxiliary_loss(x.sum())
assert_type(found[0], Tensor)

stream = mnemos.Stream(model).prefill(ids)
tokens, stream = stream.generate(3)
assert_type(tokens, Tensor)
result = mnemos.replay(lambda segment, state: (segment.sum(), state), [x, x])
assert_type(result.losses, Tensor)

# Each of these is wrong, and the checker says so.
SoftmaxAttention(8, 2)("text")  # type: ignore
SoftmaxAttention(8, "two")  # type: ignore
GatedCacheAttention(8, 2, torch.nn.Linear(8, 8))  # type: ignore
mnemos.GRC(preset="papre")  # type: ignore
mnemos.Stream(mnemos.Memformer()).generate("many")  # type: ignore
mnemos.add_auxiliary_loss(0.5)  # type: ignore
mnemos.no_such_name  # type: ignore  # noqa: B018
