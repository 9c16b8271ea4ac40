"""Attention classes of other packages, registered as hosts."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import mnemos
from mnemos.hosts import Call, Host, adapters


class Pooling(nn.Module):
    """A host that no library has: every token gets the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.parts = 8, 2

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.mean(1, keepdim=True).expand_as(tokens)


HOST = Host(
    f"{__name__}:Pooling", ("tokens",), width="width", heads="parts", call=lambda module, args, kwargs: Call(args[0])
)


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(adapters, "_registered", {})
    return mnemos.register_host(HOST)


def test_a_registered_host_is_cached(registered):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), Pooling()), torch.randn(2, 5, 8)
    before = model(x)
    report = mnemos.cache(model, mnemos.GRC(length=4))
    assert [swapped.name for swapped in report.swapped] == ["1"]
    assert not torch.equal(model(x), before)
    assert torch.equal(mnemos.uncache(model)(x), before)


def test_without_it_the_class_is_unknown():
    with pytest.raises(mnemos.InputError):
        mnemos.cache(nn.Sequential(nn.Linear(8, 8), Pooling()))


def test_a_class_has_one_adapter(registered):
    assert mnemos.register_host(HOST) is HOST
    with pytest.raises(mnemos.InputError, match=r"Pooling.*test_known_hosts"):
        mnemos.register_host(replace(HOST, width="dim"))
    ours = "torch.nn.modules.activation:MultiheadAttention"
    with pytest.raises(mnemos.InputError, match=r"MultiheadAttention.*adapters"):
        mnemos.register_host(replace(HOST, kind=ours))
