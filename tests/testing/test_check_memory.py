"""check_memory: layers that keep every law, and layers with one fault each, which the law of its kind reports."""

import copy

import pytest
import torch
from refusals import refuses
from torch import nn
from torch.nn import functional as F

from mnemos.attention import RelativeConfig, SoftmaxAttention
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


FAULTS = {}


def fault(law, name, base=Average, **members):
    """A layer with a fault that this law reports: `base` with other methods."""
    FAULTS[name] = law, type(name, (base,), members)


def clean(masked):
    """A `clean` that takes masked(self, x, mask) for the mask."""
    return lambda self, x, mask: Average.clean(self, x, masked(self, x, mask))


def leave(changed):
    """A `leave` that changes parts of the state."""
    return lambda self, state, x, y: {**state, **changed(self, state, x, y)}


def enter(changed):
    return lambda self, state, x: {**state, **changed(state, x)}


def finish(changed):
    """A `finish` that changes what the layer returns."""
    return lambda self, x, read: changed(self, x, Average.finish(self, x, read))


def detached(state):
    return {name: s.detach() for name, s in state.items()}


class Scaled(torch.autograd.Function):
    """The identity, with a gradient that is multiplied."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class Masked(Average):
    """Knows what it was given when it leaves: `clean` makes another x of it."""

    def clean(self, x, mask):
        self.given, self.mask = x, mask
        return super().clean(x, mask)


# ---- padding: values ----

for name, masked in {
    "PaddingIsAtTheEnd": lambda x, mask: torch.arange(x.shape[1]) < mask.sum(1, keepdim=True),
    "MaskOfTheLastRow": lambda x, mask: mask[-1:].expand_as(mask),
    "MaskTurnedWhereSquare": lambda x, mask: mask.T if len(x) == x.shape[1] else mask,
}.items():
    fault("padding", name, clean=clean(lambda self, x, mask, of=masked: None if mask is None else of(x, mask)))


def detach_if_masked(self, state, x, y):
    return state if self.mask is None else detached(state)


fault("padding", "MaskCutsTheGradient", Masked, leave=detach_if_masked)

# ---- what padding holds ----


def padding_times_zero(self, x, mask):
    _, mask = Average.clean(self, x, mask)
    return x * mask[..., None], mask


def root_of_padding(self, x, mask):
    cleaned, valid = Average.clean(self, x, mask)
    return torch.where(valid[..., None], cleaned, torch.sqrt(x.abs()) * 0), valid


def norm_of_padding(self, x, mask):
    size = x.detach().abs().amax((1, 2), keepdim=True) if x.numel() else 1
    x, mask = Average.clean(self, x, mask)
    return x * (1 + 1e-3 * (size > 50)), mask


fault("hidden", "PaddingTimesZero", clean=padding_times_zero)
fault("hidden", "PaddingInTheGradient", clean=root_of_padding)
fault("hidden", "PaddingInItsNorm", clean=norm_of_padding)

# ---- other paths in other modes: outputs that are 1 % larger in some situation ----

for law, name, when in (
    ("modes", "NoGradDiffers", lambda self, x: not torch.is_grad_enabled()),
    ("modes", "InferenceDiffers", lambda self, x: torch.is_inference_mode_enabled()),
    ("modes", "Float32Differs", lambda self, x: x.dtype == torch.float32),
    ("rows", "FortyRowsDiffer", lambda self, x: len(x) > 32),
    ("finite", "ThousandTokensDiffer", lambda self, x: x.shape[1] > 512),
    ("rows", "TwoRowsDiffer", lambda self, x: len(x) == 2),
    ("resumes", "DecodingDiffers", lambda self, x: x.shape[1] == 1),
    ("resumes", "LongCallsDiffer", lambda self, x: x.shape[1] >= 129),
    ("causal", "LaterTokensOfLongCallsRead", lambda self, x: x.shape[1] > 90 and x[0, 80, 0] > 0),
    ("compiles", "CompiledDiffers", lambda self, x: torch.compiler.is_compiling()),
    ("layout", "ContiguousXDiffers", lambda self, x: not x.is_contiguous()),
):
    fault(law, name, finish=finish(lambda self, x, y, when=when: y * (1.01 if when(self, x) else 1)))
fault("float64", "OutputsAreRounded", finish=finish(lambda self, x, y: y.float().to(x.dtype)))
fault("float64", "StateIsRounded", leave=leave(lambda self, state, x, y: {"m": state["m"].float().to(x.dtype)}))

# ---- lengths ----

fault("lengths", "NoTokensRaise", finish=finish(lambda self, x, y: y + 0 * x[:, -1][:, None]))
fault("lengths", "NoTokensForget", leave=lambda self, state, x, y: state if x.shape[1] else self.begin(x))
fault("lengths", "NoTokensCutTheGradient", leave=lambda self, state, x, y: state if x.shape[1] else detached(state))

# ---- memory and aliases ----

as_stored = enter(lambda state, x: {"last": torch.as_strided(state["last"], (len(x), 4), (4, 1))})
fault("layout", "StateMustBeContiguous", enter=enter(lambda state, x: {"m": state["m"].view(-1).view(len(x), 4)}))
fault("layout", "StateIsReadAsStored", enter=as_stored)


def clamp_in_place(self, x, mask):
    x.data.clamp_(-1, 1)
    return Average.clean(self, x, mask)


def mask_in_place(self, x, mask):
    cleaned = Average.clean(self, x, None if mask is None else mask.clone())
    if mask is not None:
        mask[:, -1:] = True
    return cleaned


def halve_in_place(self, state, x):
    if not torch.is_grad_enabled():
        state["m"].mul_(0.5)
    return state


def write_behind(self, x, state=None, mask=None):
    """New keys go into the buffer of the old ones, over what a sibling of the same state has written there."""
    y, (keys, values, valid) = KeysAndValues.forward(self, x, state, mask)
    if torch.is_grad_enabled():
        return y, (keys, values, valid)
    n, end = 0 if state is None else state[0].shape[1], keys.shape[1]
    room = None if state is None else state[0]._base
    if room is None or room.shape[1] < end:
        room, n = keys.new_zeros(len(keys), end + 8, 4), 0
    room[:, n:end] = keys[:, n:]
    return y, (room[:, :end], values, valid)


fault("untouched", "ForksShareTheRoomBehind", KeysAndValues, forward=write_behind)
fault("untouched", "XIsClampedInPlace", clean=clamp_in_place)
fault("untouched", "MaskIsChangedInPlace", clean=mask_in_place)
fault("untouched", "StateIsChangedInPlace", enter=halve_in_place)
turn = leave(lambda self, state, x, y: {"m": state["m"].T})
fault("select", "BatchIsSecond", enter=enter(lambda state, x: {"m": state["m"].T}), leave=turn)
fault("reset", "StartsElsewhere", begin=lambda self, x: {**Average.begin(self, x), "m": x.new_full((len(x), 4), 0.3)})


def see_all(self, state, x):
    self.all = state["all"]
    return state


def append_all(self, state, x, y):
    before, self.all = getattr(self, "all", None), None
    return {**state, "all": torch.cat([x.new_zeros(len(x), 0, 4) if before is None else before, x], 1)}


def begin_all(self, x):
    return {**Average.begin(self, x), "all": x.new_zeros(len(x), 0, 4)}


fault("size", "Grows", state_kind="constant", begin=begin_all, enter=see_all, leave=append_all)

# ---- what a call depends on ----


def keep_in_mind(self, x, y):
    before, self.kept = getattr(self, "kept", None), x.detach().sum()
    return y + 1e-3 * (self.kept if before is None else before)


def keep_largest(self, x, y):
    self.most = max(getattr(self, "most", 0), len(x))
    return y * (1 if self.most < 5 else 1.1)


def keep_mask(self, x, mask):
    if mask is not None:
        self.kept = mask
    kept = getattr(self, "kept", None)
    return mask if kept is None or kept.shape != x.shape[:2] else kept


fault("repeats", "KeepsTheLastBatch", finish=finish(keep_in_mind))
fault("repeats", "KeepsTheLargestBatch", finish=finish(keep_largest))
fault("repeats", "KeepsItsMask", clean=clean(keep_mask))


def skip_sixth(self, x, last, mask):
    last = Average.values(self, x, last, mask)[1]
    return torch.where((mask.cumsum(1) == 6)[..., None], 0, self.value(x)), last


fault("reads", "SkipsTheSixth", values=skip_sixth)
fault("causal", "ReadsTheNext", splits="segments", finish=finish(lambda self, x, y: y + F.pad(x, (0, 0, 0, 1))[:, 1:]))
fault("rows", "MeanOfRows", finish=finish(lambda self, x, y: y - y.mean(0, keepdim=True)))

# ---- gradients ----

fault("gradient", "StateIsDetached", enter=enter(lambda state, x: detached(state)))
cut_if_short = leave(lambda self, state, x, y: detached(state) if x.shape[1] == 1 else state)
fault("gradient", "ShortCallsCutTheGradient", leave=cut_if_short)
fault("gradient", "OnePartIsDetached", enter=enter(lambda state, x: {"last": state["last"].detach()}))
double_one = finish(lambda self, x, y: Scaled.apply(y, 2) if x.shape[1] == 1 else y)
fault("derivatives", "OneTokenDoublesTheGradient", finish=double_one)
fault("derivatives", "GradientOfAParameterIsDoubled", rate=lambda self: Scaled.apply(Average.rate(self), 2))
fault("derivatives", "GradientOfTheStateIsDoubled", enter=enter(lambda state, x: {"m": Scaled.apply(state["m"], 2)}))


def with_unused(self):
    Average.__init__(self)
    self.unused = nn.Linear(4, 4)


fault("parameters", "Unused", __init__=with_unused)
double_in_autocast = finish(lambda self, x, y: y * (1 + (torch.is_autocast_enabled("cpu") and x.shape[1] == 2)))
fault("autocast", "AutocastDiffers", finish=double_in_autocast)


def unit_length(self, x, mask):
    x, mask = Average.clean(self, x, mask)
    return x / x.square().sum(-1, keepdim=True).sqrt() * 2, mask


fault("finite", "Exponential", finish=lambda self, x, read: Average.finish(self, x, read.exp().log()))
fault("finite", "LengthOfZeros", clean=unit_length)

# ---- weights and copies ----


def stale_in_eval(self):
    if self.training:
        return Average.rate(self)
    self.kept = getattr(self, "kept", None) or Average.rate(self).item()
    return self.kept


def stale_until_trained(self, x, read):
    if self.training or torch.is_grad_enabled():
        return Average.finish(self, x, read)
    if self.kept is None:
        self.kept = self.output.weight.clone(), self.output.bias.clone()
    return F.linear(read, *self.kept)


def forget_when_trained(self, mode=True):
    self.kept = None
    return Average.train(self, mode)


def stale_until_written(self, x, read):
    if torch.is_grad_enabled():
        return Average.finish(self, x, read)
    if getattr(self, "kept", (None,))[0] != self.output.weight._version:
        self.kept = self.output.weight._version, self.output.weight.clone(), self.output.bias.clone()
    return F.linear(read, *self.kept[1:])


fault("weights", "StaleInEval", rate=stale_in_eval)
fault("weights", "StaleUntilTrained", train=forget_when_trained, finish=stale_until_trained)
fault("weights", "StaleUntilWritten", finish=stale_until_written)


def faulty(cls):
    """A layer that is not saved or copied rightly: pickles know a class by its name in this file."""
    FAULTS[cls.__name__] = "saving", cls
    return cls


@faulty
class ParameterIsNotSaved(Average):
    def __init__(self):
        super().__init__()
        self._register_state_dict_hook(lambda module, found, *rest: found.pop("decay"))


@faulty
class BufferIsNotSaved(Average):
    def __init__(self):
        seed = torch.seed() % 1000
        super().__init__()
        signs = torch.randn(4, generator=torch.Generator().manual_seed(seed))
        self.register_buffer("signs", signs, persistent=False)

    def finish(self, x, read):
        return super().finish(x, read * self.signs.to(read))


@faulty
class TrainedButNotSaved(Average):
    rows_independent = False
    seen_most = 1.0

    def finish(self, x, read):
        if self.training:
            self.seen_most = max(self.seen_most, float(read.detach().abs().max())) if read.numel() else 1.0
            return super().finish(x, read - read.mean(0, keepdim=True))
        return super().finish(x, read / self.seen_most)


# ---- the same laws, broken in other ways ----


def in_eval(self):
    Average.__init__(self)
    self.eval()


def seen_without_gradient(self, x, y):
    before, self.kept = getattr(self, "kept", False), not torch.is_grad_enabled()
    return y * (1.01 if before else 1)


def seen_in_training(self, x, y):
    self.kept = 1.01 if self.training else getattr(self, "kept", 1)
    return y * (1 if self.training else self.kept)


def narrow_after_more_rows(self, x, y):
    self.most = max(getattr(self, "most", 0), len(x))
    return y[..., : 4 if self.most < 5 else 2]


def count_states(self, state, x):
    self.count = getattr(self, "count", 0) + 1
    return state


def without_padding(self, x, y):
    return y if self.mask is None else y.masked_fill(~self.mask[..., None], torch.nan)


def sums_of_padding(self, x, y):
    total = self.given.sum(1, keepdim=True)
    return y + (total - total.detach())


def bias(changed):
    """A `finish` that changes the last bias."""
    return lambda self, x, read: F.linear(read, self.output.weight, changed(x, self.output.bias))


def another_start(self, rows, device=None, dtype=None):
    return Average.begin(self, torch.zeros(rows, 4, dtype=dtype)) | {"m": torch.full((rows, 4), 0.1, dtype=dtype)}


def no_copy(self, memo):
    raise TypeError("one of a kind")


for law, name, changed in (
    ("repeats", "SetsItsMode", lambda self, x, y: self.eval() and y),
    ("repeats", "SetsTheSeed", lambda self, x, y: torch.manual_seed(0) and y),
    ("repeats", "ChangesAWeight", lambda self, x, y: (self.output.bias.data.mul_(1 + 1e-14), y)[1]),
    ("repeats", "DiffersAfterNoGrad", seen_without_gradient),
    ("repeats", "NarrowAfterMoreRows", narrow_after_more_rows),
    ("float64", "OutputsAreFloat32", lambda self, x, y: y.float()),
    ("modes", "OutputsAreFloat64", lambda self, x, y: y.double()),
    ("lengths", "NoTokensHaveAnotherWidth", lambda self, x, y: y if x.shape[1] else y[..., :2]),
    ("lengths", "NoRowsHaveAnotherWidth", lambda self, x, y: y if len(x) else y[..., :2]),
    ("autocast", "AutocastIsInfinite", lambda self, x, y: y * (torch.inf if torch.is_autocast_enabled("cpu") else 1)),
):
    fault(law, name, finish=finish(changed))
fault("repeats", "DrawsInEval", __init__=in_eval, finish=finish(lambda self, x, y: y + 0 * torch.rand(1).to(y)))
fault("repeats", "DiffersAfterTraining", __init__=in_eval, finish=finish(seen_in_training))
fault("untouched", "CountsStates", enter=count_states, finish=finish(lambda self, x, y: y + getattr(self, "count", 0)))
fault("untouched", "StateIsAViewOfX", Masked, leave=leave(lambda self, state, x, y: {"x": self.given[:, :1]}))
fault("hidden", "PaddingGetsAGradient", Masked, finish=finish(sums_of_padding))
fault("hidden", "OutputsOfPaddingAreNaN", Masked, finish=finish(without_padding))
fault("parameters", "GradientIsNaN", finish=bias(lambda x, b: Scaled.apply(b, torch.nan)))
fault("gradient", "ShortCallsDetachTheBias", finish=bias(lambda x, b: b.detach() if x.shape[1] == 1 else b))
fault("saving", "CannotBeCopied", __deepcopy__=no_copy)
fault("saving", "CopiesShareWeights", __deepcopy__=lambda self, memo: self)


# ---- the tests ----


def failed(report):
    return [result.law for result in report.results if result.holds is False]


def test_good_layers_keep_all_laws():
    applied = set()
    for layer in (Average, Gru):
        report = check_memory(layer().eval(), 4, QUICK)
        assert report.passed, f"{layer.__name__}: {report}"
        applied |= {result.law for result in report.results if result.holds}
    assert applied == {*QUICK} - {"size"}  # of layers that declare how their state grows, below


@pytest.mark.parametrize(
    ("layer", "left_out"),
    [
        (SoftmaxAttention(4, 2, causal=False), {"causal", "resumes", "gradient", "select", "reset", "size"}),
        (KeysAndValues(), set()),
        (RelativeConfig(memory=3, detached=False).build(4, 2, causal=True), {"gradient"}),
        (RelativeConfig(memory=20, same_length=True).build(4, 2, causal=True), {"gradient"}),
    ],
    ids=["whole", "growing", "segments", "detached"],
)
def test_a_law_that_a_layer_does_not_promise_does_not_apply(layer, left_out):
    laws = ["causal", "resumes", "gradient", "select", "reset", "size", "lengths", "untouched"]
    found = {result.law: result.holds for result in check_memory(layer, 4, laws).results}
    assert found == {law: None if law in left_out else True for law in laws}


def test_every_law_has_a_fault():
    assert {law for law, _ in FAULTS.values()} == {*LAWS}


@pytest.mark.parametrize("name", [name for name, (law, _) in FAULTS.items() if law in QUICK])
def test_a_fault_is_reported_by_the_law_of_its_kind(name):
    law, layer = FAULTS[name]
    found = check_memory(layer(), laws=law)
    assert failed(found) == [law], str(found)
    assert not found.passed


class NotKept(Average):
    """Cannot be made again from what it keeps: `sizes` is not there, and `width` is another one."""

    def __init__(self, sizes, width=4):
        super().__init__()
        assert width == 4
        self.sizes, self.width = sizes, 5


class NotKeptAtAll(Average):
    def __init__(self, sizes):
        super().__init__()


def test_what_a_layer_may_do_breaks_no_law():
    """Weights that are not trained, integers that are saved, and arguments that it does not keep."""
    layer = FAULTS["Unused"][1]()
    layer.unused.requires_grad_(False)
    assert check_memory(layer, laws="parameters").passed
    layer = type("Ordered", (Average,), {"finish": finish(lambda self, x, y: y[..., self.order])})()
    layer.register_buffer("order", torch.tensor([3, 2, 1, 0]))
    assert check_memory(layer, laws="weights").passed
    for layer in (NotKept(4), NotKeptAtAll(4)):
        assert check_memory(layer, laws="saving").passed


def test_hooks_on_gradients_are_checked_and_a_layer_without_copies_is_not_examined_further():
    layer = Average()
    layer.decay.register_hook(lambda gradient: 2 * gradient)
    assert failed(check_memory(layer, laws="derivatives")) == ["derivatives"]
    found = check_memory(FAULTS["CannotBeCopied"][1](), laws=["repeats", "saving"])
    assert [result.holds for result in found.results] == [None, False]


def test_a_compiled_layer_is_compared():
    found = check_memory(FAULTS["CompiledDiffers"][1](), laws=["float64", "compiles"])
    assert failed(found) == ["compiles"]
    assert 0 < found.results[-1].difference < 0.1


@pytest.mark.parametrize(
    ("name", "tokens", "position", "difference"),
    [("SkipsTheSixth", 6, 5, 0.0), ("ReadsTheNext", 2, 0, 0.01), ("LongCallsDiffer", 129, 0, 0.001)],
)
def test_the_counterexample_is_the_smallest(name, tokens, position, difference):
    law, layer = FAULTS[name]
    found = check_memory(layer(), laws=law).results[0]
    assert (found.tokens, found.position) == (tokens, position)
    assert found.difference >= difference


class Chunked(Average):
    """Resumes only where the tokens read so far are a multiple of 4."""

    def leave(self, state, x, y):
        return {**state, "m": torch.where(state["seen"][:, None] % 4 == 0, state["m"], 0.9 * state["m"])}


def test_cuts_that_would_hold_are_said():
    detail = check_memory(Chunked(), laws="resumes").results[0].detail
    assert detail.endswith("with cuts before multiples of 4 it holds")


@pytest.mark.parametrize(
    ("start", "says"),
    [(another_start, "differs, by up to "), (lambda self, rows, **given: torch.zeros(rows), "raised ")],
)
def test_a_fault_of_initial_state_is_called_so(start, says):
    """No cut has to do with it."""
    layer = type("AnotherStart", (Average,), {"initial_state": start})()
    detail = check_memory(layer, laws="resumes").results[0].detail
    assert detail.startswith("from initial_state instead of None: ")
    assert says in detail
    assert "cuts" not in detail


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


def test_what_cannot_be_checked_is_one_line():
    def without_a_state(self, x, state=None):
        return Average.forward(self, x, state)[0]

    def with_a_count(self, x, state=None):
        return Average.forward(self, x)[0], 1

    alone, counted = (type("Other", (Average,), {"forward": one})() for one in (without_a_state, with_a_count))
    refuses("the width of its inputs", check_memory, nn.GRUCell(4, 4))
    refuses("put a module around it", check_memory, nn.GRUCell(4, 4), 4)
    refuses("found Tensor", check_memory, alone)
    refuses("a state of tensors, found int, in which none are found", check_memory, counted)
    refuses("names of laws, found 'causality'", check_memory, Average(), laws="causality")
