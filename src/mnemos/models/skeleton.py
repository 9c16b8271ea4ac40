"""A model without values: its modules, names and shapes, for counting and comparing, at no cost of initialisation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
