"""check_memory: layers that keep every law, and layers with one fault each, which the law of its kind reports."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mnemos import InputError
from mnemos.testing import LAWS, check_memory

QUICK = [name for name in LAWS if name != "compiles"]


class Average(nn.Module):
    """Averages that decay, m ← a m + (1 − a) v, of values of a token and of the one before it.

    The state: m [B, 4]; last [B, 4], the last valid token; seen [B], the number of valid tokens.
    """

    dim = 4

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.value, self.before, self.output = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.decay = nn.Parameter(torch.tensor(0.3))

    def forward(self, x, state=None, mask=None):
        state = self.begin(x) if state is None else self.enter(state, x)
        m, last, seen = state["m"], state["last"], state["seen"]
        x, mask = self.clean(x, mask)
        count = mask.cumsum(1)
        v, last = self.values(x, last, mask)
        v = v + torch.sin(self.place(seen, count)[..., None] / 7).to(v.dtype)
        a = self.rate()
        after = (count[:, :, None] - count[:, None]).clamp(min=0)
        weight = (1 - a) * a**after * mask[:, None] * torch.ones_like(after).tril()
        y = self.finish(x, weight @ v + (a ** count[..., None]) * m[:, None])
        total = mask.sum(1, keepdim=True)
        m = (((1 - a) * a ** (total - count) * mask)[:, None] @ v)[:, 0] + a**total * m
        return y, self.leave({"m": m, "last": last, "seen": seen + total[:, 0]}, x, y)

    def begin(self, x):
        return {"m": x.new_zeros(len(x), 4), "last": x.new_zeros(len(x), 4), "seen": torch.zeros(len(x)).long()}

    def enter(self, state, x):
        return state

    def clean(self, x, mask):
        mask = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
        return torch.where(mask[..., None], x, 0), mask

    def values(self, x, last, mask):
        """Values, each of a token and of the valid one before it, and the last valid token."""
        tokens = torch.cat([last[:, None], x], 1)
        index = torch.arange(1, x.shape[1] + 1) * mask
        latest = F.pad(index, (1, 0)).cummax(1)[0][..., None].expand_as(tokens)
        found = tokens.gather(1, latest)
        return self.value(x) + self.before(found[:, :-1]), found[:, -1]

    def place(self, seen, count):
        return seen[:, None] + count

    def rate(self):
        return self.decay.sigmoid()

    def finish(self, x, read):
        return self.output(read)

    def leave(self, state, x, y):
        return state


class KeysAndValues(nn.Module):
    """Softmax attention; the state are keys, values and which of them are valid, and grows."""

    dim, state_kind = 4, "growing"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.norm = nn.Linear(4, 12), nn.LayerNorm(4)

    def forward(self, x, state=None, mask=None):
        t = x.shape[1]
        valid = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask.clone()
        q, k, v = self.qkv(self.norm(torch.where(valid[..., None], x, 0))).chunk(3, -1)
        if state is not None:
            k, v, valid = (torch.cat(pair, 1) for pair in zip(state, (k, v, valid), strict=True))
        seen = valid[:, None] & torch.ones(t, k.shape[1], dtype=torch.bool).tril(k.shape[1] - t)
        return F.scaled_dot_product_attention(q, k, v, seen | ~seen.any(-1, keepdim=True)), (k, v, valid)


class Gru(nn.Module):
    """PyTorch's GRU, with dropout, no mask, and its state's batch first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gru, self.drop = nn.GRU(4, 4, batch_first=True), nn.Dropout(0.2)

    def forward(self, x, state=None):
        if not x.numel():  # the GRU refuses it
            return x, x.new_zeros(len(x), 1, 4) if state is None else state
        y, h = self.gru(self.drop(x), None if state is None else state.transpose(0, 1).contiguous())
        return y, h.transpose(0, 1)


class Segments(nn.Module):
    """Both directions inside a call, and the mean of the last call's tokens without its gradient."""

    splits, causal, state_gradient = "segments", False, False

    def __init__(self, width):
        super().__init__()
        torch.manual_seed(0)
        self.width, self.own, self.others = width, nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, state=None, mask=None):
        mask = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
        x = torch.where(mask[..., None], x, 0)
        state = x.new_zeros(len(x), self.width) if state is None else state
        mean = x.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        y = self.own(x) + torch.tanh(self.others(mean + state))[:, None]
        return y, torch.where(mask.any(1, keepdim=True), mean, state).detach()


class Encoder(nn.Module):
    """Attention in both directions, without a state."""

    causal = False

    def __init__(self, *, width=4):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x, state=None, mask=None):
        x = x if mask is None else torch.where(mask[..., None], x, 0)
        seen = None if mask is None else mask[:, None] | ~mask.any(1)[:, None, None]
        return F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1), seen), None


GOOD = {"average": Average, "keys": KeysAndValues, "gru": Gru, "segments": lambda: Segments(4), "encoder": Encoder}
FAULTS = {}


def faulty(law):
    """A layer with a fault that this law reports."""

    def add(cls):
        FAULTS[cls.__name__] = (law, cls)
        return cls

    return add


# ---- padding: values ----


@faulty("padding")
class MaskIgnored(Average):
    def clean(self, x, mask):
        return super().clean(x, None)


@faulty("padding")
class PaddingIsZeros(Average):
    def clean(self, x, mask):
        return super().clean(super().clean(x, mask)[0], None)


@faulty("padding")
class PositionsAreColumns(Average):
    def place(self, seen, count):
        return seen[:, None] + torch.arange(1, count.shape[1] + 1)


@faulty("padding")
class SeenCountsColumns(Average):
    def leave(self, state, x, y):
        return {**state, "seen": state["seen"] * 0 + state["seen"].max()}


@faulty("padding")
class LastColumnIsKept(Average):
    def leave(self, state, x, y):
        return {**state, "last": x[:, -1].clone()} if x.shape[1] else state


@faulty("padding")
class PaddingIsAtTheEnd(Average):
    def clean(self, x, mask):
        return super().clean(x, None if mask is None else torch.arange(x.shape[1]) < mask.sum(1, keepdim=True))


@faulty("padding")
class MaskOfTheLastRow(Average):
    def clean(self, x, mask):
        return super().clean(x, None if mask is None else mask[-1:].expand_as(mask))


@faulty("padding")
class MaskTurnedWhereSquare(Average):
    def clean(self, x, mask):
        return super().clean(x, mask.T if mask is not None and len(x) == x.shape[1] else mask)


@faulty("padding")
class MaskAtTheStartAlone(Average):
    def enter(self, state, x):
        self.started = True
        return state

    def clean(self, x, mask):
        started, self.started = getattr(self, "started", False), False
        return super().clean(x, None if started else mask)


@faulty("padding")
class MaskOfOneTokenIgnored(Average):
    def clean(self, x, mask):
        return super().clean(x, None if x.shape[1] == 1 else mask)


@faulty("padding")
class MaskOfOneRowIgnored(Average):
    def clean(self, x, mask):
        return super().clean(x, None if len(x) == 1 else mask)


@faulty("padding")
class MaskOfLongCallsIgnored(Average):
    def clean(self, x, mask):
        return super().clean(x, None if x.shape[1] > 64 else mask)


@faulty("padding")
class MaskOfLongFloat32CallsIgnored(Average):
    def clean(self, x, mask):
        return super().clean(x, None if x.shape[1] > 64 and x.dtype == torch.float32 else mask)


class Masked(Average):
    """Knows whether it has a mask when it leaves."""

    def clean(self, x, mask):
        self.mask = mask
        return super().clean(x, mask)


@faulty("padding")
class EmptyRowsForget(Masked):
    def leave(self, state, x, y):
        rows = torch.ones(len(x), dtype=torch.bool) if self.mask is None else self.mask.any(1)
        return {name: torch.where(rows.reshape(-1, *[1] * (s.dim() - 1)), s, 0) for name, s in state.items()}


# ---- padding: gradients and what it holds ----


@faulty("padding")
class MaskCutsTheGradient(Masked):
    def leave(self, state, x, y):
        return state if self.mask is None else {name: s.detach() for name, s in state.items()}


@faulty("padding")
class GradientByRowsOfTheMask(Masked):
    def finish(self, x, read):
        y = super().finish(x, read)
        return y if self.mask is None else Scaled.apply(y, 1 / self.mask.double().mean().item())


@faulty("hidden")
class PaddingTimesZero(Average):
    def clean(self, x, mask):
        _, mask = super().clean(x, mask)
        return x * mask[..., None], mask


@faulty("hidden")
class PaddingInTheGradient(Masked):
    def clean(self, x, mask):
        x, valid = super().clean(x, mask), mask
        return (
            x if valid is None else (torch.where(valid[..., None], torch.sqrt(self.raw.abs()) * 0 + x[0], x[0]), x[1])
        )

    def forward(self, x, state=None, mask=None):
        self.raw = x
        return super().forward(x, state, mask)


@faulty("hidden")
class PaddingInItsNorm(Average):
    def clean(self, x, mask):
        size = x.detach().abs().amax((1, 2), keepdim=True) if x.numel() else 1
        x, mask = super().clean(x, mask)
        return x * (1 + 1e-3 * (size > 50)), mask


@faulty("hidden")
class PaddingGetsAGradient(Masked):
    def forward(self, x, state=None, mask=None):
        y, state = super().forward(x, state, mask)
        return y if not x.numel() else y + (x.mean(1, keepdim=True) - x.mean(1, keepdim=True).detach()), state


# ---- other paths in other modes ----


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def scaled(law, name, when):
    """A layer whose outputs are 1 % larger in some situation."""

    def finish(self, x, read):
        return Average.finish(self, x, read) * (1.01 if when(self, x) else 1)

    FAULTS[name] = law, type(name, (Average,), {"finish": finish})


scaled("modes", "NoGradDiffers", lambda self, x: not torch.is_grad_enabled())
scaled("modes", "InferenceDiffers", lambda self, x: torch.is_inference_mode_enabled())
scaled("modes", "Float32Differs", lambda self, x: x.dtype == torch.float32)
scaled("modes", "EvalDiffers", lambda self, x: not self.training)
scaled(
    "modes", "EvalNoGradLongDiffers", lambda self, x: not (self.training or torch.is_grad_enabled()) and x.shape[1] > 99
)
scaled("modes", "FrozenXDiffers", lambda self, x: torch.is_grad_enabled() and not x.requires_grad)
scaled("modes", "FrozenWeightsDiffer", lambda self, x: not self.decay.requires_grad)
scaled("rows", "FortyRowsDiffer", lambda self, x: len(x) > 32)
scaled("finite", "ThousandTokensDiffer", lambda self, x: x.shape[1] > 512)
scaled("rows", "TwoRowsDiffer", lambda self, x: len(x) == 2)
scaled("resumes", "DecodingDiffers", lambda self, x: x.shape[1] == 1)
scaled("resumes", "LongCallsDiffer", lambda self, x: x.shape[1] >= 129)
scaled("resumes", "CallsOf128Differ", lambda self, x: x.shape[1] == 128)
scaled("resumes", "WholeChunksDiffer", lambda self, x: x.shape[1] > 0 and x.shape[1] % 64 == 0)
scaled("causal", "LaterTokensOfLongCallsRead", lambda self, x: x.shape[1] > 90 and x[0, 80, 0] > 0)
scaled("compiles", "CompiledDiffers", lambda self, x: torch.compiler.is_compiling())
scaled("layout", "ContiguousXDiffers", lambda self, x: not x.is_contiguous())


@faulty("modes")
class MaskIgnoredInEval(Average):
    def clean(self, x, mask):
        return super().clean(x, mask if self.training else None)


@faulty("modes")
class MaskIgnoredWithoutGradient(Average):
    def clean(self, x, mask):
        return super().clean(x, mask if torch.is_grad_enabled() else None)


@faulty("modes")
class Float32GivesFloat64(Average):
    def finish(self, x, read):
        return super().finish(x, read).double()


@faulty("modes")
class EvalHasNoGradient(Average):
    def rate(self):
        return super().rate() if self.training else super().rate().detach()


@faulty("float64")
class OutputsAreRounded(Average):
    def finish(self, x, read):
        return self.output(read).float().to(x.dtype)


@faulty("float64")
class StateIsRounded(Average):
    def leave(self, state, x, y):
        return {**state, "m": state["m"].float().to(x.dtype)}


# ---- lengths ----


@faulty("lengths")
class NoTokensRaise(Average):
    def finish(self, x, read):
        return super().finish(x, read) + 0 * x[:, -1][:, None]


@faulty("lengths")
class NoTokensForget(Average):
    def leave(self, state, x, y):
        return state if x.shape[1] else self.begin(x)


@faulty("lengths")
class NoTokensCutTheGradient(Average):
    def leave(self, state, x, y):
        return state if x.shape[1] else {name: s.detach() for name, s in state.items()}


@faulty("lengths")
class NoRowsRaise(Average):
    def finish(self, x, read):
        return super().finish(x, read) + 0 * x[0].detach().mean()


# ---- memory and aliases ----


@faulty("layout")
class StateMustBeContiguous(Average):
    def enter(self, state, x):
        return {**state, "m": state["m"].view(-1).view(len(x), 4)}


@faulty("layout")
class StateIsReadAsStored(Average):
    def enter(self, state, x):
        return {**state, "last": torch.as_strided(state["last"], (len(x), 4), (4, 1))}


@faulty("layout")
class StateIsKnownById(Average):
    def leave(self, state, x, y):
        self.given, self.more = state["m"].data_ptr(), 0.1 * state["m"].detach()
        return state

    def enter(self, state, x):
        known = state["m"].data_ptr() == getattr(self, "given", 0) and len(x) == len(self.more)
        return {**state, "m": state["m"] + self.more} if known else state


@faulty("untouched")
class XIsClampedInPlace(Average):
    def clean(self, x, mask):
        x.data.clamp_(-1, 1)
        return super().clean(x, mask)


@faulty("untouched")
class MaskIsChangedInPlace(Average):
    def clean(self, x, mask):
        found = super().clean(x, None if mask is None else mask.clone())
        if mask is not None:
            mask[:, -1:] = True
        return found


@faulty("untouched")
class StateIsChangedInPlace(Average):
    def enter(self, state, x):
        if not torch.is_grad_enabled():
            state["m"].mul_(0.5)
        return state


@faulty("untouched")
class StateIsAViewOfX(Average):
    def clean(self, x, mask):
        self.raw = x if mask is None else None
        return super().clean(x, mask)

    def leave(self, state, x, y):
        return {**state, "last": self.raw[:, -1]} if self.raw is not None and x.shape[1] else state


@faulty("untouched")
class StateIsAViewOfOutputs(Average):
    def leave(self, state, x, y):
        return {**state, "y": y[:, -1:]} if x.shape[1] else state


@faulty("untouched")
class StateIsAViewOfTheMask(Masked):
    def leave(self, state, x, y):
        return state if self.mask is None else {**state, "valid": self.mask[:, -1]}


@faulty("untouched")
class StateIsAViewOfWeights(Average):
    def leave(self, state, x, y):
        return {**state, "bias": self.value.bias.expand(len(x), -1)}


@faulty("select")
class BatchIsSecond(Average):
    def enter(self, state, x):
        return {**state, "m": state["m"].T}

    def leave(self, state, x, y):
        return {**state, "m": state["m"].T}


@faulty("reset")
class StartsElsewhere(Average):
    def begin(self, x):
        return {**super().begin(x), "m": x.new_full((len(x), 4), 0.3)}


@faulty("size")
class Grows(Average):
    state_kind = "constant"

    def begin(self, x):
        return {**super().begin(x), "all": x.new_zeros(len(x), 0, 4)}

    def enter(self, state, x):
        self.all = state["all"]
        return state

    def leave(self, state, x, y):
        before, self.all = getattr(self, "all", None), None
        return {**state, "all": torch.cat([x.new_zeros(len(x), 0, 4) if before is None else before, x], 1)}


# ---- what a call depends on ----


@faulty("repeats")
class Counts(Average):
    calls = 0

    def finish(self, x, read):
        self.calls += 1
        return super().finish(x, read) + self.calls


@faulty("repeats")
class KeepsTheLastBatch(Average):
    def finish(self, x, read):
        before, self.kept = getattr(self, "kept", None), x.detach().sum()
        return super().finish(x, read) + 1e-3 * (self.kept if before is None else before)


@faulty("repeats")
class KeepsTheLargestBatch(Average):
    most = 0

    def finish(self, x, read):
        self.most = max(self.most, len(x))
        return super().finish(x, read) * (1 if self.most < 5 else 1.1)


@faulty("repeats")
class KeepsItsMask(Average):
    def clean(self, x, mask):
        if mask is not None:
            self.kept = mask
        kept = getattr(self, "kept", None)
        return super().clean(x, mask if kept is None or kept.shape != x.shape[:2] else kept)


@faulty("repeats")
class KeepsAGraph(Average):
    def finish(self, x, read):
        y, before = super().finish(x, read), getattr(self, "kept", 0)
        self.kept = 0 * y.sum()
        return y + before


@faulty("repeats")
class Noise(Average):
    def finish(self, x, read):
        return super().finish(x, read) + 1e-3 * torch.randn_like(read)


@faulty("repeats")
class NoiseInLongCalls(Average):
    def finish(self, x, read):
        return super().finish(x, read) + 1e-3 * (torch.rand(()).item() if x.shape[1] > 64 else 0)


@faulty("repeats")
class SetsTheSeed(Average):
    def finish(self, x, read):
        torch.manual_seed(3)
        return super().finish(x, read) + 1e-3 * torch.randn(4)


@faulty("repeats")
class DrawsInVain(Average):
    def __init__(self):
        super().__init__()
        self.eval()

    def finish(self, x, read):
        return super().finish(x, read) + 0 * torch.rand(())


@faulty("repeats")
class StatisticsOfTraining(Average):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def finish(self, x, read):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(read.mean((0, 1)), 0.1) if read.numel() else None
        return super().finish(x, read if self.training else read - self.mean)


@faulty("repeats")
class ScalesItsWeights(Average):
    def finish(self, x, read):
        self.output.weight.data.mul_(1 - 1e-12)
        return super().finish(x, read)


@faulty("repeats")
class LeavesEvalMode(Average):
    def finish(self, x, read):
        self.eval()
        return super().finish(x, read)


@faulty("reads")
class SkipsTheSixth(Average):
    def values(self, x, last, mask):
        last = super().values(x, last, mask)[1]
        return torch.where((mask.cumsum(1) == 6)[..., None], 0, self.value(x)), last


@faulty("causal")
class ReadsTheNext(Average):
    splits = "segments"

    def finish(self, x, read):
        return super().finish(x, read) + F.pad(x, (0, 0, 0, 1))[:, 1:]


@faulty("rows")
class MeanOfRows(Average):
    def finish(self, x, read):
        return super().finish(x, read - read.mean(0, keepdim=True))


# ---- gradients ----


@faulty("gradient")
class StateIsDetached(Average):
    def enter(self, state, x):
        return {name: s.detach() for name, s in state.items()}


@faulty("gradient")
class ShortCallsCutTheGradient(Average):
    def leave(self, state, x, y):
        return {name: s.detach() for name, s in state.items()} if x.shape[1] == 1 else state


@faulty("gradient")
class OnePartIsDetached(Average):
    def enter(self, state, x):
        return {**state, "last": state["last"].detach()}


@faulty("derivatives")
class OneTokenDoublesTheGradient(Average):
    def finish(self, x, read):
        y = super().finish(x, read)
        return Scaled.apply(y, 2) if x.shape[1] == 1 else y


@faulty("derivatives")
class GradientOfAParameterIsDoubled(Average):
    def rate(self):
        return Scaled.apply(super().rate(), 2)


@faulty("derivatives")
class AHookDoublesTheGradient(Average):
    def __init__(self):
        super().__init__()
        self.value.weight.register_hook(lambda gradient: 2 * gradient)


@faulty("derivatives")
class GradientOfTheStateIsDoubled(Average):
    def enter(self, state, x):
        return {**state, "m": Scaled.apply(state["m"], 2)}


@faulty("autocast")
class AutocastDiffers(Average):
    def finish(self, x, read):
        low = torch.is_autocast_enabled("cpu") and x.shape[1] == 2
        return super().finish(x, read) * (2 if low else 1)


@faulty("parameters")
class Unused(Average):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(4, 4)


@faulty("finite")
class Exponential(Average):
    def finish(self, x, read):
        return super().finish(x, read.exp().log())


@faulty("finite")
class LengthOfZeros(Average):
    def clean(self, x, mask):
        x, mask = super().clean(x, mask)
        return x / x.square().sum(-1, keepdim=True).sqrt() * 2, mask


@faulty("finite")
class LongProducts(Average):
    def finish(self, x, read):
        grown = torch.cumsum(torch.ones_like(read) * 0.2, 1).exp()
        return super().finish(x, read * grown / grown)


# ---- weights and copies ----


@faulty("weights")
class StaleInEval(Average):
    def rate(self):
        if self.training:
            return super().rate()
        self.kept = getattr(self, "kept", None) or super().rate().item()
        return self.kept


@faulty("weights")
class StaleUntilTrained(Average):
    def train(self, mode=True):
        self.kept = None
        return super().train(mode)

    def finish(self, x, read):
        if self.training or torch.is_grad_enabled():
            return super().finish(x, read)
        if self.kept is None:
            self.kept = self.output.weight.clone(), self.output.bias.clone()
        return F.linear(read, *self.kept)


@faulty("weights")
class StaleAfterAssignment(Average):
    def __init__(self):
        super().__init__()
        self.held = [self.output.weight]

    def finish(self, x, read):
        return F.linear(read, self.held[0], self.output.bias)


@faulty("weights")
class StaleUntilWritten(Average):
    def finish(self, x, read):
        if torch.is_grad_enabled():
            return super().finish(x, read)
        if getattr(self, "kept", (None,))[0] != self.output.weight._version:
            self.kept = self.output.weight._version, self.output.weight.clone(), self.output.bias.clone()
        return F.linear(read, *self.kept[1:])


@faulty("saving")
class ParameterIsNotSaved(Average):
    def __init__(self):
        super().__init__()
        self._register_state_dict_hook(lambda module, found, *rest: found.pop("decay"))


class Unsaved(Average):
    def __init__(self):
        seed = torch.seed() % 1000
        super().__init__()
        self.scale(torch.randn(4, generator=torch.Generator().manual_seed(seed)))

    def finish(self, x, read):
        return super().finish(x, read * self.signs.to(read))


@faulty("saving")
class BufferIsNotSaved(Unsaved):
    def scale(self, signs):
        self.register_buffer("signs", signs, persistent=False)


@faulty("saving")
class TensorIsNoBuffer(Unsaved):
    def scale(self, signs):
        self.signs = signs


@faulty("saving")
class TrainedButNotSaved(Average):
    rows_independent = False
    seen_most = 1.0

    def finish(self, x, read):
        if self.training:
            self.seen_most = max(self.seen_most, float(read.detach().abs().max())) if read.numel() else 1.0
            return super().finish(x, read - read.mean(0, keepdim=True))
        return super().finish(x, read / self.seen_most)


@faulty("saving")
class CopiesShareWeights(Average):
    def __deepcopy__(self, memo):
        new = Average.__new__(type(self))
        nn.Module.__init__(new)
        new.__dict__.update({**self.__dict__, "_modules": {k: copy.copy(v) for k, v in self._modules.items()}})
        return new


@faulty("saving")
class PicklesWithoutItsWeight(Average):
    def __setstate__(self, state):
        super().__setstate__(state)
        self.output = nn.Linear(4, 4).to(self.decay.dtype)

    def __deepcopy__(self, memo):
        new = type(self)().to(self.decay.dtype)
        new.load_state_dict(self.state_dict())
        return new.train(self.training)


@faulty("saving")
class CannotBeCopied(Average):
    def __init__(self):
        super().__init__()
        self.kept = self.decay * 2


# ---- the tests ----


@functools.cache
def report(name):
    return check_memory(GOOD[name]().eval(), 4, QUICK)


def failed(report):
    return [result.law for result in report.results if result.holds is False]


@pytest.mark.parametrize("name", GOOD)
def test_a_good_layer_keeps_all_laws(name):
    assert report(name).passed, str(report(name))
    applied = {name: {r.law for r in report(name).results if r.holds} for name in GOOD}
    assert {*QUICK} == set.union(*applied.values())


@pytest.mark.parametrize("name", [name for name, (law, _) in FAULTS.items() if law != "compiles"])
def test_a_fault_is_reported_by_the_law_of_its_kind(name):
    law, layer = FAULTS[name]
    found = check_memory(layer(), laws=law)
    assert failed(found) == [law], str(found)
    assert not found.passed


def test_every_law_has_a_fault():
    assert {law for law, _ in FAULTS.values()} == {*LAWS}


@pytest.mark.slow
def test_a_compiled_layer_is_compared():
    assert check_memory(Average(), laws="compiles").passed
    assert failed(check_memory(FAULTS["CompiledDiffers"][1](), laws=["float64", "compiles"])) == ["compiles"]


def test_the_counterexample_is_the_smallest():
    found = {}
    for name in ("SkipsTheSixth", "ReadsTheNext", "LongCallsDiffer"):
        law, layer = FAULTS[name]
        found[name] = check_memory(layer(), laws=law).results[0]
    assert {name: (result.tokens, result.position) for name, result in found.items()} == {
        "SkipsTheSixth": (6, 5),
        "ReadsTheNext": (2, 0),
        "LongCallsDiffer": (129, 0),
    }
    assert found["ReadsTheNext"].difference > 0.01


class Chunked(Average):
    """Resumes only where the tokens read so far are a multiple of 4."""

    def leave(self, state, x, y):
        return {**state, "m": torch.where(state["seen"][:, None] % 4 == 0, state["m"], 0.9 * state["m"])}


def test_cuts_that_would_hold_are_said():
    detail = check_memory(Chunked(), laws="resumes").results[0].detail
    assert detail.endswith("with cuts before multiples of 4 it holds")


class FailsAlone(Average):
    def finish(self, x, read):
        if len(x) == 1:
            raise ValueError("expected more than one row")
        return super().finish(x, read)


def test_what_a_layer_raises_is_a_report():
    found = check_memory(FailsAlone(), laws=["reads", "rows", "size"])
    assert failed(found) == ["rows"]
    assert "ValueError: expected more than one row" in str(found)


def test_the_random_numbers_and_the_layer_of_the_caller_are_left_alone():
    layer = Gru()
    before, weights = torch.get_rng_state(), copy.deepcopy(layer.state_dict())
    check_memory(layer, 4, ["repeats", "weights", "untouched"])
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in layer.state_dict().items())
    assert layer.training
    assert all(p.grad is None and p.dtype == torch.float32 for p in layer.parameters())


class Alone(Average):
    def forward(self, x, state=None):
        return super().forward(x, state)[0]


def test_what_cannot_be_checked_is_one_line():
    for words, call in (
        ("the width of its inputs", lambda: check_memory(nn.GRUCell(4, 4))),
        ("put a module around it", lambda: check_memory(nn.GRUCell(4, 4), 4)),
        ("found Tensor", lambda: check_memory(Alone(), 4)),
        ("names of laws, found 'causality'", lambda: check_memory(Average(), laws="causality")),
    ):
        with pytest.raises(InputError, match=words) as error:
            call()
        assert "\n" not in str(error.value)
