"""What is checked of every architecture that `mnemos.cache` knows: the columns of docs/hosts.md.

A check returns None if it holds, or in a few words why it does not apply; it raises if it does not hold. Hosts are
small, in double precision, with random weights.
"""

import copy
import pickle
import tempfile
from collections.abc import Callable

import torch
from hosts import MODELS, Example, build, cached, close, example, given, loss, run, state
from more_hosts import DECODERS, MORE
from torch import nn
from torch.utils.checkpoint import checkpoint

import mnemos
from mnemos import GRC
from mnemos.memory.gated_cache import caches

MODELS.update(MORE | DECODERS)
Check = Callable[[str], str | None]
_SLOTS = 4


def error_of(call: Callable[[], object]) -> str:
    """The class of what a call raises; "": nothing."""
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return ""


def closed_gate(name: str) -> None:
    """λ = −∞ gives the host's outputs and gradients, in training and in eval mode."""
    inputs, plain = example(name), build(name)
    model = copy.deepcopy(plain)
    preset = ("paper", "official", "mnemos")[len(name) % 3]
    mnemos.cache(model, GRC(preset=preset, length=_SLOTS), **given(name))
    with torch.no_grad():
        for branch in caches(model):
            branch.mix.fill_(-torch.inf)
            branch.cache.normal_()
        close(run(model.eval(), inputs), run(plain.eval(), inputs))
    outputs = [run(one.train(), inputs) for one in (model, plain)]
    close(*outputs)
    for output in outputs:
        (output * torch.linspace(-1, 1, output.shape[-1], dtype=output.dtype) + output.square()).sum().backward()
    theirs = dict(plain.named_parameters())
    for key, parameter in model.named_parameters():
        if key in theirs and theirs[key].grad is not None:
            close(parameter.grad, theirs[key].grad)


def trains(name: str) -> None:
    """Two optimiser steps: every parameter of the caches moves, and every cache is written."""
    model = cached(name).train()
    mnemos.memory.clear_caches(model)
    before = {key: value.clone() for key, value in model.named_parameters() if ".grc." in f".{key}"}
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for seed in (1, 2, 3):  # the gates learn once the cache holds something
        optimiser.zero_grad()
        loss(model, example(name, seed=seed)).backward()
        optimiser.step()
    for key, value in model.named_parameters():
        if key in before and not key.endswith("key.bias"):  # softmax does not depend on it
            assert value.isfinite().all()
            assert not torch.equal(value, before[key]), key
    for branch in caches(model):
        assert branch.cache.abs().max() > 0


def strict_state(name: str) -> None:
    """The host's own checkpoint loads with strict=True and leaves the caches, and what is pending, as they are."""
    model, plain = cached(name).train(), build(name)
    loss(model, example(name))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    own = [key for key in before if ".grc." in f".{key}"]
    assert [key for key in before if key not in own] == list(plain.state_dict())
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter += 1
    for assign in (False, True):
        other = {key: value.clone() for key, value in plain.state_dict().items()}
        model.load_state_dict(other, strict=True, assign=assign)
        assert list(other) == list(plain.state_dict()), "what was given was changed"
        for key, value in model.state_dict().items():
            assert torch.equal(value, (before if key in own else other)[key]), key
    loss(model, example(name)).backward()


def copies(name: str) -> None:
    """A copy, also one by pickle, has all of the original, stores into itself, and reads what it has itself."""
    model = cached(name, "paper")
    with torch.no_grad():
        run(model, example(name))  # something is remembered of the frozen cache
    run(model.train(), example(name, seed=1))
    left = [(branch.cache.clone(), branch.pending.clone()) for branch in caches(model)]
    twins = [copy.deepcopy(model)]
    try:
        pickle.dumps(build(name))
    except RuntimeError:  # PyTorch's parametrised modules are not pickled
        pass
    else:
        twins.append(pickle.loads(pickle.dumps(model)))
    for twin in twins:
        run(twin, example(name, seed=2))
        for mine, (stored, pending), theirs in zip(caches(model), left, caches(twin), strict=True):
            assert theirs is not mine
            assert torch.equal(mine.cache, stored)
            assert torch.equal(mine.pending, pending)
            assert torch.equal(theirs.cache, pending)
        mnemos.uncache(twin)
        assert not caches(twin)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter += 1
    with torch.no_grad():
        expected = run(model.eval(), example(name))
        twin = copy.deepcopy(model)
        for branch in caches(twin):
            branch.cache.add_(1)
        assert not torch.equal(run(twin, example(name)), expected)
        close(run(model, example(name)), expected)


def compiled(name: str) -> str | None:
    """torch.compile, in eval and in training mode, computes what eager mode computes."""
    try:
        _compile(cached, name)
    except Exception:
        if why := error_of(lambda: _compile(build, name)):
            return f"the host does not compile to the same ({why})"
        raise
    return None


def _compile(make: Callable[[str], nn.Module], name: str) -> None:
    for training in (False, True):
        eager, model = make(name).train(training), make(name).train(training)
        torch.compiler.reset()
        try:
            close(run(torch.compile(model, backend="eager"), example(name)), run(eager, example(name)))
        finally:
            torch.compiler.reset()
        for mine, theirs in zip(caches(model.eval()), caches(eager.eval()), strict=True):
            close(mine.cache, theirs.cache)


def autocast(name: str) -> str | None:
    """Under autocast to bfloat16: finite, and near single precision."""
    inputs = example(name, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        if why := error_of(lambda: run(build(name, torch.float32), inputs)):
            return f"the host fails ({why})"
        plain = run(build(name, torch.float32), inputs).float()
        model = cached(name, dtype=torch.float32).train()
        loss(model, inputs).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    exact = run(cached(name, dtype=torch.float32), inputs)
    rounding = (plain - run(build(name, torch.float32), inputs)).abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        found = run(cached(name, dtype=torch.float32), inputs).float()
    assert (found - exact).abs().max() < 10 * rounding + 0.05 * exact.abs().max()
    return None


def checkpointed(name: str) -> str | None:
    """Gradient checkpointing gives the gradients and the caches of a forward without it; float32 takes the kernels."""
    inputs, plain = example(name, dtype=torch.float32), cached(name, dtype=torch.float32).train()
    model = copy.deepcopy(plain)
    wrapped = False
    if getattr(model, "supports_gradient_checkpointing", False):
        model.activation_checkpointing_enable({"use_reentrant": False})
    elif hasattr(model, "set_grad_checkpointing"):
        if why := error_of(model.set_grad_checkpointing):
            return f"the host has none ({why})"
    else:
        wrapped = True
    found = checkpoint(loss, model, inputs, use_reentrant=False) if wrapped else loss(model, inputs)
    found.backward()
    loss(plain, inputs).backward()
    for (key, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), key
        if mine.grad is not None:
            close(mine.grad, theirs.grad, 1e-4)
    for one, other in zip(caches(model.eval()), caches(plain.eval()), strict=True):
        close(one.cache, other.cache, 1e-4)
    return None


def saved(name: str) -> None:
    """A trained model comes back with its settings and all that it has learned and stored."""
    # Single precision: some hosts compute constants at loading, in the precision that the model then has.
    single = torch.float32
    model = cached(name, "mnemos", single, gate_init=-1.5, candidate="layernorm_gelu").train()
    for seed in (1, 2):
        loss(model, example(name, seed=seed, dtype=single)).backward()
    with tempfile.TemporaryDirectory() as folder:
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(folder)
            again = mnemos.hosts.from_pretrained(type(model), folder)
            assert not again.training
        else:
            mnemos.hosts.save(model, folder)
            again = mnemos.hosts.load(build(name, single), folder)
    for mine, theirs in zip(caches(model), caches(again), strict=True):
        assert (mine.grc, mine.grid, mine.prefix) == (theirs.grc, theirs.grid, theirs.prefix)
    expected = model.state_dict()
    for key, value in again.state_dict().items():
        assert torch.equal(value, expected[key]), key
    for training in (False, True):
        found, expected = (loss(one.train(training), example(name, seed=3, dtype=single)) for one in (again, model))
        close(found, expected, 1e-4)


def uncached(name: str) -> None:
    """`uncache` gives back the host: outputs, names, hooks, also those of the user."""
    model, inputs, calls = build(name), example(name), []
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    mine = last.register_forward_hook(lambda *_: calls.append(1))
    run(model.train(), inputs)  # hosts remember things of a forward: BigBird replaces its attention
    expected = run(model.eval(), inputs)
    before, weights = state(model), {key: value.clone() for key, value in model.state_dict().items()}
    mnemos.cache(model, GRC(preset=("paper", "official", "mnemos")[len(name) % 3], length=_SLOTS), **given(name))
    assert state(model) != before
    loss(model.train(), inputs).backward()
    with torch.no_grad():
        run(model.eval(), inputs)
    assert mnemos.uncache(model) is model
    assert state(model) == before
    model.load_state_dict(weights)  # the means of batches have moved
    calls.clear()
    close(run(model, inputs), expected)
    assert calls or name == "torch_mha", "a hook of the user's was taken away"
    mine.remove()
    mnemos.cache(model, GRC(length=_SLOTS))
    run(model.train(), inputs)


def bfloat16(name: str) -> str | None:
    """The whole model in bfloat16 trains and predicts finite values."""
    inputs = example(name, dtype=torch.bfloat16)
    if why := error_of(lambda: run(build(name, torch.bfloat16), inputs)):
        return f"the host fails ({why})"
    model = cached(name, dtype=torch.bfloat16).train()
    loss(model, inputs).backward()
    assert run(model.eval(), inputs).isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    return None


def rows_alone(name: str) -> str | None:
    """In eval mode a row's output does not depend on the other rows."""
    inputs, plain, model = example(name), build(name), cached(name)

    part = inputs.rows(1, 2)

    def differs(one: nn.Module) -> bool:
        together, alone = (run(one, Example(each.args, each.kwargs, None, each.batch)) for each in (inputs, part))
        if inputs.batch:
            return not torch.allclose(together[:, 1:2], alone, rtol=1e-9, atol=1e-9)
        together = together[1:2]
        if together.dim() > 2:  # positions that mean something
            t = min(together.shape[1], alone.shape[1])
            keep = slice(t) if inputs.valid is None else inputs.valid[1, :t].nonzero()[:, 0]
            together, alone = together[:, keep], alone[:, keep]
        return not torch.allclose(together, alone, rtol=1e-9, atol=1e-9)

    if differs(plain):
        return "the host's rows are not independent"
    assert not differs(model)
    return None


def padding(name: str) -> str | None:
    """How much padding a batch has does not matter."""
    inputs = example(name)
    more = _more_padding(inputs)
    if more is None:
        return "takes no padding"

    @torch.no_grad()
    def differs(one: nn.Module) -> bool:
        a, b = run(one, inputs), run(one, more)
        return a.shape != b.shape or not torch.allclose(a, b, rtol=1e-9, atol=1e-9)

    try:
        if differs(build(name)):
            return "the host depends on it"
    except Exception as error:
        return f"the host takes no more ({type(error).__name__})"
    assert not differs(cached(name))  # a token of padding in the cache would show: each row reads what it has written
    return None


def _more_padding(inputs: Example) -> Example | None:
    """The same rows with five more positions of padding."""
    kwargs, args, pad = dict(inputs.kwargs), inputs.args, nn.functional.pad
    extra = 100 if "input_values" in kwargs else 5  # recordings have many numbers for each position
    if (key := next((k for k in kwargs if k.endswith("key_padding_mask")), None)) is not None and not inputs.batch:
        kwargs[key] = pad(kwargs[key], (0, extra), value=True)
        args = (pad(args[0], (0, 0, 0, extra), value=9.0),) * len(args)
    elif "attention_mask" in kwargs:
        for name, more, value in (
            *(("input_ids", (0, extra), 1), ("input_values", (0, extra), 0), ("attention_mask", (0, extra), 0)),
            ("flattened_patches", (0, 0, 0, extra), 0),
        ):
            if name in kwargs:
                kwargs[name] = pad(kwargs[name], more, value=value)
    else:
        return None
    return Example(args, kwargs, None if inputs.valid is None else pad(inputs.valid, (0, 5)), inputs.batch)


def other_size(name: str) -> str | None:
    """Images of another size than the model was made for, with every preset, where the host takes them."""
    inputs = example(name)
    images = inputs.args[0] if inputs.args else inputs.kwargs.get("pixel_values")
    if images is None or images.dim() != 4:
        return "no images"
    larger = nn.functional.interpolate(images, scale_factor=2.0)
    args, named = ((larger,), {}) if inputs.args else ((), {**inputs.kwargs, "pixel_values": larger})
    plain = build(name)
    for more in ({"interpolate_pos_encoding": True}, {}):
        other = Example(args, {**named, **more})
        if error_of(lambda other=other: run(plain, other)):
            continue
        for preset in ("mnemos", "paper", "official"):
            model = cached(name, preset)
            assert run(model, other).isfinite().all()
            loss(model.train(), other).backward()
        return None
    return "the host takes one size"


CHECKS: dict[str, Check] = {
    "closed gate": closed_gate,
    "trains": trains,
    "strict state": strict_state,
    "deepcopy": copies,
    "compile": compiled,
    "autocast": autocast,
    "checkpointing": checkpointed,
    "save, load": saved,
    "uncache": uncached,
    "bfloat16": bfloat16,
    "rows alone": rows_alone,
    "padding": padding,
    "other image size": other_size,
}
