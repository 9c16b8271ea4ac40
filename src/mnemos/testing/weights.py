"""The laws of weights: changed ones are read, saved and copied ones are the same, casts and compilation agree."""

import copy
import inspect
import pickle

import torch
from torch import Tensor, nn

from .probe import Fault, Probe


def weights(probe: Probe, t: int) -> Fault | None:
    """Weights that have changed are read: by an optimiser, from a file."""
    calls = probe.calls(t, 1)
    same_modes = probe.same_modes()
    g = torch.Generator().manual_seed(4)
    for training in (True, False) if same_modes else (probe.layer.training,):
        mode = "training" if training else "eval"
        for how in ("changed in place", "read by load_state_dict", "read by load_state_dict(assign=True)"):
            used = probe.copy(training=training)
            for live in (False, True):
                with torch.set_grad_enabled(live):
                    used.run(calls)
            tensors = used.layer.state_dict(keep_vars=True)
            other = {id(x): _other(x, g) for x in tensors.values()}
            new = {name: other[id(x)] for name, x in tensors.items()}
            fresh = probe.copy(training=training or same_modes)
            fresh.layer.load_state_dict(new, strict=False)
            if how == "changed in place":
                with torch.no_grad():
                    for name, x in tensors.items():
                        x.copy_(new[name])
            else:
                copies = {id(x): x.clone() for x in new.values()}  # written as often as a new parameter: never
                read = {name: copies[id(x)] for name, x in new.items()}
                used.layer.load_state_dict(read, strict=False, assign="assign" in how)
            expected = fresh.run(calls)
            for live in (False, True):
                with torch.set_grad_enabled(live):
                    found = used.run(calls)
                what = f"in {mode} mode, weights {how} after a call, against a new layer with these weights"
                if fault := probe.compare(found, expected, what):
                    return fault
    return None


def _other(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Other numbers than these, of the same signs."""
    if not tensor.is_floating_point():
        return tensor.detach().clone()
    noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
    return tensor.detach() * (0.7 + 0.6 * noise)


def saving(probe: Probe, t: int) -> Fault | None:
    """A layer with the saved weights, a new one of its class, and copies of one that was used give the same."""
    layer, x = probe.layer, probe.tokens(t, 5)
    fresh = copy.deepcopy(layer)  # before the forward, which may change what is not saved
    for tensor in fresh.state_dict(keep_vars=True).values():
        torch.nn.init.zeros_(tensor)
    try:
        pickle.dumps(layer)
        pickles = True
    except Exception:  # a class or function that no file can name
        pickles = False
    y = layer(probe.tokens(t))[0]
    if y.requires_grad:
        y.sum().backward()
        layer.zero_grad()
    with torch.no_grad():
        layer(probe.tokens(t, 3))
    fresh.load_state_dict(layer.state_dict(), strict=True)
    expected = copy.deepcopy(layer).eval()(x)[0]
    layers = [("a layer that was read from the state_dict", fresh)]
    if rebuilt := _rebuilt(layer):
        layers.append(("a layer made anew with the state_dict", rebuilt.to(probe.dtype)))
    layers.append(("a deep copy", copy.deepcopy(layer)))
    if pickles:
        layers.append(("a pickled copy", pickle.loads(pickle.dumps(layer))))
    for what, other in layers:
        if fault := probe.difference(other.eval()(x)[0], expected, what):
            return fault
    with torch.no_grad():
        for _, other in layers:
            for tensor in other.parameters():
                tensor.zero_()
    return probe.difference(layer.eval()(x)[0], expected, "after the weights of a copy were set to zeros")


def _rebuilt(layer: nn.Module) -> nn.Module | None:
    """A new layer of the same class, with the weights; None where the layer does not keep what it was made of."""
    arguments, source = {}, copy.deepcopy(layer)
    for name, parameter in list(inspect.signature(type(layer).__init__).parameters.items())[1:]:
        if hasattr(source, name) and not isinstance(getattr(source, name), Tensor):
            arguments[name] = getattr(source, name)
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            return None
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            new = type(layer)(**arguments).to(next(iter(layer.state_dict().values())).dtype)
        new.load_state_dict(layer.state_dict(), strict=True)
    except Exception:
        return None
    return new


def autocast(probe: Probe, t: int) -> Fault | None:
    """Outputs within 5 % of the largest, and finite gradients, in several calls."""
    low = probe.copy(torch.float32)
    calls = low.calls(t, 1, 2)
    expected = low.run(calls)
    with torch.autocast("cpu", torch.bfloat16):
        found = low.run(calls)
    for name, tensor in found.items():
        if not tensor.isfinite().all():
            return Fault(f"under autocast the {name} is not finite")
        apart = float((tensor.float() - expected[name]).abs().max())
        most = float(expected[name].abs().max())
        if name.startswith("output") and apart > 0.05 * most:
            return Fault(f"the {name} differs by up to {apart:.2g}, of at most {most:.2g}", None, apart)
    return None


def compiles(probe: Probe, t: int) -> Fault | None:
    """Outputs, gradients and what training writes, of two calls."""
    torch.compiler.reset()
    layer = copy.deepcopy(probe.layer)
    inner = copy.deepcopy(layer)
    compiled = torch.compile(inner, backend="aot_eager")
    for seed in (3, 4):  # the second forward meets what the first one wrote
        x, z = probe.tokens(t, seed).requires_grad_(), probe.tokens(t, seed).requires_grad_()
        y, found = layer(x)[0], compiled(z)[0]
        y.square().sum().backward()
        found.square().sum().backward()
        assert x.grad is not None
        assert z.grad is not None
        fault = probe.difference(found, y, "compiled") or probe.difference(z.grad, x.grad, "the compiled gradient of x")
        if fault:
            return fault
    for (name, a), b in zip(layer.state_dict().items(), inner.state_dict().values(), strict=True):
        if not torch.allclose(a.double(), b.double(), rtol=1e-7, atol=probe.tolerance):
            return Fault(f"compiled: {name} differs after two calls")
    return None
