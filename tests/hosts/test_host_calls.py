"""What a branch is given of its host's calls: the tokens, which of them are padding, and what the host made of them."""

import pytest
import torch
from hosts import ZOO, cached, close, example, open_caches, run
from torch import nn

import mnemos
from mnemos import GRC, InputError
from mnemos.hosts import HostBranch
from mnemos.hosts.masks import valid_tokens
from mnemos.memory.gated_cache import caches

PADDED = [name for name in ZOO if example(name, 1).valid is not None or name.startswith(("hf_marian", "hf_bart"))]


def watch(model: nn.Module) -> list[tuple]:
    """(x, y, mask) of every call of a branch."""
    seen: list[tuple] = []
    for branch in caches(model):
        branch.register_forward_pre_hook(lambda _, args: seen.append(args))
    return seen


@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("training", [True, False])
def test_padding_is_told_apart(name, training):
    model, inputs = cached(name).train(training), example(name)
    seen = watch(model)
    run(model, inputs)
    padding = inputs.kwargs.get("src_key_padding_mask", inputs.kwargs.get("key_padding_mask"))
    expected = ~padding if padding is not None else inputs.kwargs["attention_mask"].bool()
    assert len(seen) == len(caches(model))
    for _, _, mask in seen:
        assert mask.dtype == torch.bool
        assert torch.equal(mask, expected)


@pytest.mark.parametrize("name", [name for name in ZOO if not name.startswith("hf_reformer")])
def test_the_input_and_the_output_are_the_hosts_own(name):
    """The host alone, on what the branch was given as its input, gives what the branch was given as its output."""
    model, inputs = cached(name).train(), example(name)
    hosts, calls = {}, {}
    for module in model.modules():
        if isinstance(getattr(module, "grc", None), HostBranch):
            hosts[module.grc] = module
            hook = lambda m, args, kwargs, branch=module.grc: calls.__setitem__(branch, (args, kwargs))  # noqa: E731
            part = module.get_submodule(module.grc.inside)
            part.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)  # before it is mixed
    seen: dict = {}
    for branch in hosts:
        branch.register_forward_pre_hook(lambda m, args: seen.__setitem__(m, args))
    run(model, inputs)
    assert seen.keys() == hosts.keys()
    for branch, (x, y, _) in seen.items():
        args, kwargs = calls[branch]
        flipped = getattr(hosts[branch], "batch_first", True) is False
        if branch.inside:  # it is given (o_self, x)
            own, tokens = args[0], args[1] if len(args) > 1 else x
        else:
            tokens = args[0] if args else kwargs["hidden_states"]
            own = hosts[branch].forward(*args, **kwargs)
            own = own[0] if isinstance(own, tuple) else own
        close(x, tokens.transpose(0, 1) if flipped else tokens)
        close(y, own.transpose(0, 1) if flipped else own)


@pytest.mark.parametrize("preset", ["paper", "official", "mnemos"])
def test_time_first_is_batch_first_turned(preset):
    first, second = (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=bf), 2).double()
        for bf in (True, False)
    )
    second.load_state_dict(first.state_dict())
    for model in (first, second):
        mnemos.cache(model, GRC(length=4, preset=preset))
    second.load_state_dict(first.state_dict())
    for model in (first, second):
        open_caches(model)
    x = torch.randn(3, 7, 12, dtype=torch.float64)
    padding = torch.arange(7) >= torch.tensor([7, 5, 2])[:, None]
    for _ in range(2):
        a, b = first(x, src_key_padding_mask=padding), second(x.transpose(0, 1), src_key_padding_mask=padding)
        close(b.transpose(0, 1), a)
    for a, b in zip(caches(first.eval()), caches(second.eval()), strict=True):
        close(a.cache, b.cache)


def test_masks_of_every_kind_are_read():
    x = torch.zeros(2, 4, 3)
    valid = torch.tensor([[True, True, False, False], [True, False, True, True]])
    low = torch.finfo(torch.float32).min
    additive = torch.where(valid, 0.0, low)[:, None, None]
    both = (valid[:, None, None] & valid[:, None, :, None]).expand(2, 1, 4, 4)
    kinds = {
        "booleans": valid,
        "ones and zeros": valid.long(),
        "a mask a query": both,
        "a mask a query and head": both.expand(2, 3, 4, 4),
        "one row of keys": valid[:, None, None],
        "added": additive,
        "added, −∞": additive.clamp(max=0).masked_fill(additive < 0, -torch.inf),
        "added, half": additive.half().masked_fill(additive < 0, torch.finfo(torch.half).min),
        "added a query": torch.where(both, 0.0, low),
    }
    for kind, mask in kinds.items():
        assert torch.equal(valid_tokens(mask, x), valid), kind
    assert valid_tokens(None, x) is None
    assert torch.equal(valid_tokens(valid[:1], x), valid[:1].expand(2, 4))
    for wrong in (valid[:, :3], valid[None], torch.ones(3, 4), torch.ones(4), "causal"):
        with pytest.raises(InputError, match=r"attention mask \[2, 4\]"):
            valid_tokens(wrong, x)
