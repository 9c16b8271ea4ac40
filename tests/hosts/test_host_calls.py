"""What a branch is given of its host's calls: the tokens, which of them are padding, and what the host made of them."""

import pytest
import torch
from hosts import ZOO, cached, close, example, open_caches, run
from torch import nn

import mnemos
from mnemos import GRC
from mnemos.hosts import HostBranch
from mnemos.memory.gated_cache import caches


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.each_value
def test_a_branch_is_given_the_hosts_own_input_output_and_mask(name, training):
    """The host alone, on what the branch was given as its input, gives what the branch was given as its output."""
    model, inputs = cached(name).train(training), example(name)
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
    padding = next((x for key, x in inputs.kwargs.items() if key.endswith("key_padding_mask")), None)
    valid = inputs.kwargs["attention_mask"].bool() if "attention_mask" in inputs.kwargs else None
    for branch, (x, y, mask) in seen.items():
        if padding is not None or valid is not None:
            assert mask.dtype == torch.bool
            assert torch.equal(mask, valid if padding is None else ~padding)
        if name == "hf_reformer":  # its hashes are drawn again
            continue
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
