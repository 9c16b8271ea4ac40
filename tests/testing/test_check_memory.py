"""check_memory: a layer that keeps every law, and layers that break one each, in the way of that law alone."""

import pytest
import torch
from torch import nn

from mnemos import InputError
from mnemos.testing import LAWS, check_memory

QUICK = [name for name in LAWS if name != "compiles"]


class Average(nn.Module):
    """Exponential averages of values: y = W m, m ← a m + (1 − a) v; the state is (m [B, D], tokens read [B])."""

    dim = 4

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.value, self.output = nn.Linear(4, 4), nn.Linear(4, 4)
        self.decay = nn.Parameter(torch.tensor(0.3))

    def forward(self, x, state=None, mask=None):
        m, seen = self.begin(x) if state is None else state
        a, valid = self.decay.sigmoid(), torch.ones_like(x[..., 0]) if mask is None else mask.to(x.dtype)
        count = valid.cumsum(1)
        place = seen[:, None] + count - 1
        after = (count[:, :, None] - count[:, None]).clamp(min=0)
        weight = (1 - a) * a**after * valid[:, None] * torch.ones_like(after).tril()
        v = self.values(x, place, valid)
        read = weight @ v + (a ** count[..., None]) * m[:, None]
        return self.finish(x, v, read), (read[:, -1], place[:, -1] + 1)

    def begin(self, x):
        return x.new_zeros(len(x), 4), x.new_zeros(len(x))

    def values(self, x, place, valid):
        return self.value(x)

    def finish(self, x, v, read):
        return self.output(read)


class Unmasked(Average):
    def forward(self, x, state=None):
        return super().forward(x, state)


class Repeats(Average):
    calls = 0

    def finish(self, x, v, read):
        self.calls += 1
        return self.output(read) + self.calls


class Float64(Average):
    def finish(self, x, v, read):
        return self.output(read).float().to(x.dtype)


class Reads(Average):
    def values(self, x, place, valid):
        return torch.where(place[..., None] == 5, 0, self.value(x))


class Causal(Average):
    splits = "segments"

    def values(self, x, place, valid):
        v = self.value(x) * valid[..., None]
        return v + torch.cat([v[:, 1:], torch.zeros_like(v[:, :1])], 1)


class Rows(Unmasked):
    def finish(self, x, v, read):
        return self.output(read) * (1 if len(x) > 1 else 1.1)


class Resumes(Average):
    def forward(self, x, state=None, mask=None):
        y, (m, seen) = super().forward(x, state, mask)
        return y, (m * 0.9, seen)


class Alone(Average):
    def forward(self, x, state=None):
        return super().forward(x, state)[0]


class Chunked(Average):
    """Resumes only where the tokens read so far are a multiple of 4."""

    def forward(self, x, state=None, mask=None):
        y, (m, seen) = super().forward(x, state, mask)
        return y, (torch.where(seen[:, None] % 4 == 0, m, 0.9 * m), seen)


class Untouched(Average):
    def forward(self, x, state=None, mask=None):
        found = super().forward(x, state, mask)
        if state is not None and not torch.is_grad_enabled():
            state[0].mul_(0.5)
        return found


class Select(Average):
    def forward(self, x, state=None, mask=None):
        state = None if state is None else (state[0].T, state[1])
        y, (m, seen) = super().forward(x, state, mask)
        return y, (m.T, seen)


class Reset(Average):
    def begin(self, x):
        return x.new_full((len(x), 4), 0.3), x.new_zeros(len(x))


class Size(Average):
    state_kind = "constant"

    def forward(self, x, state=None, mask=None):
        y, new = super().forward(x, None if state is None else state[0], mask)
        return y, (new, torch.cat([*([] if state is None else [state[1]]), x], 1))


class Padding(Average):
    def values(self, x, place, valid):
        v = self.value(x)
        return v + 0.1 * v.mean(1, keepdim=True) * (valid.mean() < 1)


class Parameters(Average):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(4, 4)


class Derivatives(Average):
    def finish(self, x, v, read):
        return self.output(read) + v - v.detach()


class Gradient(Average):
    def forward(self, x, state=None, mask=None):
        return super().forward(x, None if state is None else tuple(part.detach() for part in state), mask)


class Saving(Average):
    def __init__(self):
        super().__init__()
        self._register_state_dict_hook(lambda module, found, *rest: found.pop("decay"))


class Autocast(Average):
    def finish(self, x, v, read):
        return self.output(read) * (2 if torch.is_autocast_enabled("cpu") else 1)


class Compiles(Average):
    def finish(self, x, v, read):
        return self.output(read) * (1.1 if torch.compiler.is_compiling() else 1)


BREAKERS = {
    c.__name__.lower(): c
    for c in (
        *(Repeats, Float64, Reads, Causal, Rows, Resumes, Untouched, Select, Reset, Size, Padding, Parameters),
        *(Derivatives, Gradient, Saving, Autocast),
    )
}


def failed(report):
    return [result.law for result in report.results if result.holds is False]


@pytest.mark.slow
def test_a_layer_that_keeps_the_laws_passes_all():
    report = check_memory(Average())
    assert report.passed
    assert not failed(report)
    assert {result.law: result.holds for result in report.results if not result.holds} == {"size": None}
    assert {*LAWS} == {*BREAKERS, "compiles"}
    assert failed(check_memory(Compiles(), laws=["float64", "compiles"])) == ["compiles"]


@pytest.mark.parametrize("law", BREAKERS)
def test_a_layer_that_breaks_a_law_fails_that_law_alone(law):
    report = check_memory(BREAKERS[law](), laws=QUICK)
    assert failed(report) == [law], str(report)
    assert not report.passed


def test_the_counterexample_is_the_smallest():
    found = {name: check_memory(BREAKERS[name](), laws=[name]).results[0] for name in ("reads", "causal", "resumes")}
    assert {name: (result.tokens, result.position) for name, result in found.items()} == {
        "reads": (6, 5),
        "causal": (2, 0),
        "resumes": (2, 1),
    }
    assert found["causal"].difference > 0.01
    chunked = check_memory(Chunked(), laws=["resumes"]).results[0]
    assert chunked.detail.endswith("with cuts before multiples of 4 it holds")


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
