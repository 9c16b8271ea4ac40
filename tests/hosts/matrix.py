"""What is checked of every architecture that `mnemos.cache` knows: the columns of docs/hosts.md.

A check returns None if it holds, or in a few words why it does not apply; it raises if it does not hold. Hosts are
small, in double precision, with random weights.
"""

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from hosts import MODELS, Example, build, close, example, given, loss, open_caches, run, state
from more_hosts import DECODERS, MORE
from torch import nn
from torch.utils.checkpoint import checkpoint

import mnemos
from mnemos import GRC
from mnemos.memory.gated_cache import caches

MODELS.update(MORE | DECODERS)
Check = Callable[[str], str | None]
_SLOTS = 4


def host(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A fresh host in eval mode; the same at every call."""
    return build(name, dtype)


def cached(name: str, grc: GRC | None = None, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The host with open gates, and caches that hold something."""
    model = host(name, dtype)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        mnemos.cache(model, GRC(length=_SLOTS) if grc is None else grc)
    open_caches(model)
    return model


def closed_gate(name: str) -> None:
    """λ = −∞ gives the host's outputs and gradients, in training and in eval mode."""
    inputs, plain = example(name), host(name)
    model = copy.deepcopy(plain)
    preset = ("paper", "official", "mnemos")[len(name) % 3]
    mnemos.cache(model, GRC(preset=preset, length=_SLOTS), **given(name))
    with torch.no_grad():
        for branch in caches(model):
            branch.mix.fill_(-torch.inf)
            branch.cache.normal_()
    with torch.no_grad():
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
    """The host's own checkpoint loads with strict=True and leaves the caches as they are."""
    model, plain = cached(name), host(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert [key for key in before if ".grc." not in f".{key}"] == list(plain.state_dict())
    model.load_state_dict(plain.state_dict(), strict=True)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


def deep_copy(name: str) -> None:
    """A deep copy computes the same, and training it leaves the original alone."""
    model, inputs = cached(name), example(name)
    again = copy.deepcopy(model)
    expected = run(model, inputs)
    close(run(again, inputs), expected)
    loss(again.train(), inputs)
    again.eval()
    close(run(model, inputs), expected)


def compiled(name: str) -> str | None:
    """torch.compile, in eval and in training mode, computes what eager mode computes."""
    try:
        for training in (False, True):
            eager, model = cached(name).train(training), cached(name).train(training)
            close(_compiled(model, name), run(eager, example(name)))
            for mine, theirs in zip(caches(model.eval()), caches(eager.eval()), strict=True):
                close(mine.cache, theirs.cache)
    except Exception:
        try:
            for training in (False, True):
                plain = host(name).train(training)
                close(_compiled(plain, name), run(plain, example(name)))
        except Exception as error:
            return f"the host does not compile to the same ({type(error).__name__})"
        raise
    return None


def _compiled(model: nn.Module, name: str) -> torch.Tensor:
    torch.compiler.reset()
    try:
        return run(torch.compile(model, backend="eager"), example(name))
    finally:
        torch.compiler.reset()


def autocast(name: str) -> str | None:
    """Under autocast to bfloat16: finite, and near single precision."""
    inputs = example(name, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        try:
            plain = run(host(name, torch.float32), inputs).float()
        except Exception as error:
            return f"the host fails ({type(error).__name__})"
        model = cached(name, dtype=torch.float32).train()
        loss(model, inputs).backward()
        found = run(model.eval(), inputs).float()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    exact = run(cached(name, dtype=torch.float32), inputs)
    rounding = (plain - run(host(name, torch.float32), inputs)).abs().max()
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
        try:
            model.set_grad_checkpointing()
        except Exception as error:
            return f"the host has none ({type(error).__name__})"
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
    """A saved model comes back: from its folder (Hugging Face), or by its state dict."""
    # Single precision: some hosts compute constants at loading, in the precision that the model then has.
    model, inputs = cached(name, dtype=torch.float32), example(name, dtype=torch.float32)
    expected = run(model, inputs)
    with tempfile.TemporaryDirectory() as folder:
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(folder)
            again = mnemos.hosts.from_pretrained(type(model), folder).eval()
        else:
            path = Path(folder) / "weights.pt"
            torch.save(model.state_dict(), path)
            again = host(name, torch.float32)
            mnemos.cache(again, GRC(length=_SLOTS))
            again.load_state_dict(torch.load(path))
    close(run(again, inputs), expected, 1e-5)


def uncached(name: str) -> None:
    """`uncache` gives back the host: outputs, names, hooks."""
    model, inputs = host(name), example(name)
    expected = run(model, inputs)  # BigBird replaces its attention at the first short input
    before = state(model)
    mnemos.cache(model, GRC(length=_SLOTS))
    assert state(model) != before
    mnemos.uncache(model)
    close(run(model, inputs), expected)
    assert state(model) == before


def bfloat16(name: str) -> str | None:
    """The whole model in bfloat16 trains and predicts finite values."""
    inputs = example(name, dtype=torch.bfloat16)
    try:
        run(host(name, torch.bfloat16), inputs)
    except Exception as error:
        return f"the host fails ({type(error).__name__})"
    model = cached(name, dtype=torch.bfloat16).train()
    loss(model, inputs).backward()
    assert run(model.eval(), inputs).isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    return None


def rows_alone(name: str) -> str | None:
    """In eval mode a row's output does not depend on the other rows."""
    inputs, plain, model = example(name), host(name), cached(name)

    def differs(one: nn.Module) -> bool:
        together = run(one, Example(inputs.args, inputs.kwargs, None, inputs.batch))
        part = inputs.rows(1, 2)
        alone = run(one, Example(part.args, part.kwargs, None, part.batch))
        t = min(together.shape[1], alone.shape[1]) if together.dim() > 2 and inputs.batch == 0 else None
        both = (together[1:2], alone) if inputs.batch == 0 else (together[:, 1:2], alone)
        if t is not None:
            both = tuple(each[:, :t] for each in both)
        if inputs.valid is not None and both[0].dim() > 2 and inputs.batch == 0:
            keep = inputs.valid[1, : both[0].shape[1]]
            both = tuple(each[:, keep] for each in both)
        return not torch.allclose(*both, rtol=1e-9, atol=1e-9)

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
        if differs(host(name)):
            return "the host depends on it"
    except Exception as error:
        return f"the host takes no more ({type(error).__name__})"
    assert not differs(cached(name))  # a token of padding in the cache would show: each row reads what it has written
    return None


def _more_padding(inputs: Example) -> Example | None:
    """The same rows with five more positions of padding."""
    extra, kwargs, args, valid = 5, dict(inputs.kwargs), inputs.args, inputs.valid
    pad = nn.functional.pad
    if "input_ids" in kwargs and "attention_mask" in kwargs:
        kwargs["input_ids"] = pad(kwargs["input_ids"], (0, extra), value=1)
        kwargs["attention_mask"] = pad(kwargs["attention_mask"], (0, extra))
    elif "input_values" in kwargs and "attention_mask" in kwargs:
        kwargs |= {key: pad(kwargs[key], (0, 100)) for key in ("input_values", "attention_mask")}
        return Example(args, kwargs, valid if valid is None else pad(valid, (0, 5)), inputs.batch)
    elif "flattened_patches" in kwargs:
        kwargs["flattened_patches"] = pad(kwargs["flattened_patches"], (0, 0, 0, extra))
        kwargs["attention_mask"] = pad(kwargs["attention_mask"], (0, extra))
    elif (key := next((k for k in kwargs if k.endswith("key_padding_mask")), None)) is not None:
        kwargs[key] = pad(kwargs[key], (0, extra), value=True)
        longer = pad(args[0], (0, 0, 0, extra), value=9.0)
        args = (longer,) * len(args)
    else:
        return None
    return Example(args, kwargs, None if valid is None else pad(valid, (0, extra)), inputs.batch)


def other_size(name: str) -> str | None:
    """Images of another size than the model was made for, with every preset, where the host takes them."""
    inputs = example(name)
    images = inputs.args[0] if inputs.args else inputs.kwargs.get("pixel_values")
    if images is None or images.dim() != 4:
        return "no images"
    larger = nn.functional.interpolate(images, scale_factor=2.0)
    plain = host(name)
    for kwargs in ({"interpolate_pos_encoding": True}, {}):
        more = dict(kwargs)
        if not inputs.args:
            more = {**inputs.kwargs, **kwargs, "pixel_values": larger}
        other = Example((larger,) if inputs.args else (), more)
        try:
            run(plain, other)
        except Exception:
            continue
        for preset in ("mnemos", "paper", "official"):
            model = cached(name, GRC(preset=preset, length=_SLOTS))
            assert run(model, other).isfinite().all()
            loss(model.train(), other).backward()
        return None
    return "the host takes one size"


CHECKS: dict[str, Check] = {
    "closed gate": closed_gate,
    "trains": trains,
    "strict state": strict_state,
    "deepcopy": deep_copy,
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
