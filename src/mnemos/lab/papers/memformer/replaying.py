"""Table 3: memory and speed of replay, back-propagation through time and gradient checkpointing."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos.lab.measure.gradients import WAYS, check_ways, most_saved, state_bytes
from mnemos.lab.measure.peak import peak_of
from mnemos.lab.measure.timing import race, ratio
from mnemos.memory.slots import SlotsConfig
from mnemos.models.memformer import MemformerConfig
from mnemos.types import Output, State

from ..claim import Claim
from ..findings import Finding, Table
from ..reproduce import Options

# The paper's number of layers and horizon, at a smaller width.
MODEL = MemformerConfig(
    vocab_size=256,
    dim=64,
    encoder_layers=4,
    decoder_layers=16,
    num_heads=8,
    mlp=256,
    segment=64,
    memory=SlotsConfig(slots=64, temperature=0.125),
)
ROWS, HORIZON, ROUNDS = 4, 8, 5
# The paper's names, and the names in `mnemos.lab.measure.gradients`.
ROUTES = {
    "BPTT": "through time",
    "GC": "torch.utils.checkpoint",
    "MRBP": "replay, advance",
    "MRBP without advance": "replay",
}


class SegmentLoss(nn.Module):
    """A language model as one segment of a rollout: `loss, state = model(tokens, state)`, tokens [B, L + 1]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, state: State = None) -> Output:
        """The mean negative log-likelihood of tokens[:, 1:], and the new state."""
        logits, state = self.model(tokens[:, :-1], state)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), state

    def advance(self, tokens: Tensor, state: State = None) -> State:
        """The new state only: runs Memformer's encoder and writer."""
        return self.model.advance(tokens[:, :-1], state)


def table3(claim: Claim, options: Options) -> Finding:
    """Table 3: memory and speed of three ways to compute the same gradients."""
    if options.recipes_only:
        return Finding([], [_ABOUT])
    torch.manual_seed(0)
    model = SegmentLoss(MODEL.build())
    segments = list(torch.randint(MODEL.vocab_size, (HORIZON, ROWS, MODEL.segment + 1)))
    check_ways(model, segments[:3])
    runs = {name: partial(WAYS[way], model, segments) for name, way in ROUTES.items()}
    with torch.no_grad():
        stored = HORIZON * state_bytes(model.advance(segments[0]))
    columns = ["", "MiB saved", "MiB of states", "process peak MiB", "relative to BPTT", "relative speed"]
    table = Table(_title(), [*columns, "paper MB", "paper relative to BPTT", "paper relative speed"])
    saved = {name: most_saved(run) for name, run in runs.items()}
    peaks = {name: peak_of(run) for name, run in runs.items()}
    times = race(runs, ROUNDS)
    for name, (mb, speed) in {**dict.fromkeys(runs, (None, None)), **claim.values}.items():
        kept = None if name == "GC" else saved[name] / 2**20
        states = stored / 2**20 if ROUTES[name].startswith("replay") else 0.0
        peak, most = peaks[name], peaks["BPTT"]
        space = (None, None) if peak is None or most is None else (peak / 2**20, peak / most)
        share = None if mb is None else mb / claim.values["BPTT"][0]
        table.add(name, kept, states, *space, ratio(times, "BPTT", name).median, mb, share, speed)
    limit = 3 * HORIZON / (4 * HORIZON - 1)
    note = (
        "Upper limits of the speed, if a backward pass costs as much as two forward passes: checkpointing 0.75, replay "
        f"without advance {limit:.3f}. With advance the limit is higher, because the first pass omits the decoder."
    )
    return Finding([table], [_ABOUT, note])


_ABOUT = (
    "All ways compute the same gradients; this is checked first. BPTT: back-propagation through time. GC: "
    "torch.utils.checkpoint around each segment. MRBP: mnemos.replay, whose first pass runs only the encoder and the "
    "writer. Saved: the maximum bytes of tensors that autograd keeps, without parameters (unknown for checkpointing). "
    "States: the bytes stored between the two passes. Process peak: memory in addition to that before the call, "
    "including gradients. The paper has the memory of a GPU, and does not say what it includes."
)


def _title() -> str:
    layers = f"{MODEL.encoder_layers} + {MODEL.decoder_layers} layers of width {MODEL.dim}"
    sizes = f"{MODEL.memory.slots} slots, {HORIZON} segments of {MODEL.segment}, batch {ROWS}"
    return f"One rollout of Memformer: {layers}, {sizes}, {torch.get_num_threads()} threads"
