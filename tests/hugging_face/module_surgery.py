"""What people do to a module of a model: hooks, a forward of the instance, an adapter, a parametrisation."""

import torch


class Adapter(torch.nn.Module):
    """As those of PEFT: the module that it wraps is `base_layer`, and its weight is that of the wrapper."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.share = torch.nn.Parameter(torch.tensor(0.3))

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, *args, **options):
        return (1 + self.share) * self.base_layer(*args, **options)


class Scaled(torch.nn.Module):
    def forward(self, weight):
        return 1.3 * weight


def steered(y):
    """1.3·y, not contiguous; of a tuple, the first."""
    if isinstance(y, tuple):
        return steered(y[0]), *y[1:]
    return (1.3 * y).repeat_interleave(2, -1)[..., ::2]


def hook_after(model, name):
    model.get_submodule(name).register_forward_hook(lambda module, args, y: steered(y))


def hook_before(model, name):
    hook = lambda module, args, options: ((1.3 * args[0], *args[1:]), options) if args else None  # noqa: E731
    model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)


def replace_forward(model, name):
    module = model.get_submodule(name)
    own = module.forward
    module.forward = lambda *args, **options: steered(own(*args, **options))


def adapt(model, name):
    module = model.get_submodule(name)
    if not list(module.children()) and not isinstance(module, torch.nn.Conv1d):  # Transformers reads its weights alone
        model.set_submodule(name, Adapter(module))


def parametrise(model, name):
    if hasattr(module := model.get_submodule(name), "weight"):
        torch.nn.utils.parametrize.register_parametrization(module, "weight", Scaled())


WAYS = (hook_after, hook_before, replace_forward, adapt, parametrise)
