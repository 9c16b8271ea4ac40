"""A model without values: its modules, names and shapes, for counting and comparing, at no cost of initialisation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mnemos import generators
from mnemos.config import ModelConfig


def skeleton(config: ModelConfig) -> nn.Module:
    """The model that a configuration describes, on the CPU, with arbitrary values in its parameters.

    The parameters are never written, so the system gives them no memory, and random generators stay as they are. The
    meta device would do the same, but the first operation on it imports PyTorch's compiler, which takes seconds.
    """
    with generators.preserve(), _WithoutValues():
        model: nn.Module = config.build()
    return model


def keep_tables(model: Any) -> None:
    """Let a model with layers of other libraries have what they compute and do not save, such as positions, from meta.

    Built on the meta device, these buffers have no values, and no load_state_dict gives them any; after it, they are
    computed from the configuration again.
    """
    if any(x.is_meta for x in model.buffers()):
        model.register_load_state_dict_post_hook(_compute_tables)


def _compute_tables(model: Any, _: object) -> None:
    with torch.device("cpu"):
        fresh = skeleton(model.config)
    own, saved = dict(model.named_buffers()), model.state_dict().keys()
    for name, x in fresh.named_buffers():
        if name in own and name not in saved:
            part, _, last = name.rpartition(".")
            setattr(model.get_submodule(part), last, x.to(next(model.parameters()).device, own[name].dtype))


class _WithoutValues(TorchFunctionMode):
    """A mode in which operations that write into a parameter, such as those of `torch.nn.init`, do nothing."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        target = args[0] if args else given.get("tensor")
        name = getattr(func, "__name__", "")
        writes = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        return target if writes and isinstance(target, nn.Parameter) else func(*args, **given)
