"""The optional libraries, imported when first needed: `libraries.onnx()` is the module `onnx`.

Each call raises InputError with the install command if the library is missing. Below: what of transformers, timm and
torchvision differs between versions or is private.
"""

import contextlib
import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from mnemos.errors import UntestedVersion, install_command
from mnemos.types import InputError

TRIED = ("5.23", "5.24")  # the versions of transformers; the extras `hf` and `vision` of pyproject.toml take no others
# The versions, MAJOR.MINOR, with which the tests have run; another one is told once, when it is imported.
TESTED = {"transformers": TRIED, "timm": ("1.0",)}
CACHE_NAMES = ("cache", "past_key_values")  # what they call a model's cache, the newest first; see `cache_name`
ATTENTIONS = "ALL_ATTENTION_FUNCTIONS"
_declared: torch.library.Library | None = None  # PyTorch removes a library's operators when the object is deleted


def _import(name: str, extra: str) -> ModuleType:
    """The library. Raises InputError with the install command if it is missing."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise InputError(
            f"expected the library {name}, found that it is not installed; run: {install_command(extra)}"
        ) from None
    tell_untested(name, getattr(module, "__version__", ""))
    return module


accelerate = functools.partial(_import, "accelerate", "trainer")
mlflow = functools.partial(_import, "mlflow", "mlflow")
onnx = functools.partial(_import, "onnx", "onnx")
onnxscript = functools.partial(_import, "onnxscript", "onnx")
pillow = functools.partial(_import, "PIL", "vision")
pyarrow = functools.partial(_import, "pyarrow", "data")
pycocotools = functools.partial(_import, "pycocotools", "detection")
sacrebleu = functools.partial(_import, "sacrebleu", "translation")
sacremoses = functools.partial(_import, "sacremoses", "translation")
sklearn = functools.partial(_import, "sklearn", "data")
tensorboard = functools.partial(_import, "tensorboard", "tensorboard")
tokenizers = functools.partial(_import, "tokenizers", "text")
vl_convert = functools.partial(_import, "vl_convert", "lab")  # which has Vega-Lite
wandb = functools.partial(_import, "wandb", "wandb")


def timm() -> ModuleType:
    """The module `timm`. Raises InputError with the install command if it is missing."""
    torchvision()
    return _import("timm", "vision")


def torchvision() -> ModuleType:
    """The module `torchvision`. Raises InputError with the install command if it is missing.

    If torchvision was built for another PyTorch (for example PyPI's torchvision with a CPU-only PyTorch), its compiled
    operators do not load and its import fails. This function then defines the missing operators: `nms` and `roi_align`
    in PyTorch (`mnemos._compat.torchvision_operators`), so models, detectors, transforms and libraries that import
    torchvision work. A call of any other compiled operator raises torchvision's error that it could not be loaded.
    """
    try:
        return _import("torchvision", "vision")
    except RuntimeError as error:
        if "torchvision::" not in str(error) or "does not exist" not in str(error):
            raise
    from mnemos._compat import torchvision_operators

    global _declared
    if _declared is None:
        _declared = torchvision_operators.declare()
    module = _import("torchvision", "vision")
    torchvision_operators.let_torchvision_call_them()
    return module


def transformers() -> ModuleType:
    """The module `transformers`. Raises InputError with the install command if it is missing."""
    if importlib.util.find_spec("torchvision") is not None:
        torchvision()  # transformers imports torchvision if it is installed
    return _import("transformers", "hf")


def cache_name() -> str:
    """What the installed transformers calls the cache of a model: as an argument, and as a field of outputs.

    "cache" from 5.24 on, "past_key_values" before.
    """
    fields = transformers().modeling_outputs.CausalLMOutputWithPast.__dataclass_fields__
    return next(name for name in CACHE_NAMES if name in fields)


def other_version(expected: str, found: str, fix: str = "") -> InputError:
    """The error where the installed transformers differs from the versions tried in something that is used.

    expected: what of transformers is needed, as in "functional: expected the caches of". found: what there is instead.
    """
    tried = f"transformers {' or '.join(TRIED)} (the versions tried)"
    return InputError(f"{expected} {tried}, found {found}; {fix or 'run: ' + install_command('hf')}")


@contextlib.contextmanager
def loaded_weights(*modules: nn.Module) -> Iterator[None]:
    """Inside, parameters that accelerate keeps on the CPU or on disk between the calls of these modules are in place.

    For code that reads them without a call. Tensors that were read stay as they are; the modules' are gone afterwards.
    """
    hooked = [module for module in modules if "_hf_hook" in module.__dict__]
    for module in hooked:
        module._hf_hook.pre_forward(module)  # type: ignore[operator, union-attr]
    try:
        yield
    finally:
        for module in hooked:
            module._hf_hook.post_forward(module, ())  # type: ignore[operator, union-attr]


@functools.cache
def tell_untested(name: str, version: str) -> None:
    """Warn, once in a process, of a version of a library that is none of `TESTED`."""
    tested = TESTED.get(name)
    if tested and ".".join(version.split(".")[:2]) not in tested:
        warnings.warn(
            f"mnemos was tested with {name} {' and '.join(tested)}, found {version or 'none'}: compare results, or "
            "install one of these",
            UntestedVersion,
            stacklevel=4,
        )


class AttentionTable:
    """In place of Transformers' table of attention functions, `ATTENTIONS` in the files of models: `wrap` of each."""

    def __init__(self, theirs: Any, wrap: Callable[[Any], Any]) -> None:
        self._theirs, self._wrap = theirs, wrap

    def get_interface(self, name: str, default: Any) -> Any:
        return self._wrap(self._theirs.get_interface(name, default))

    def __getitem__(self, name: str) -> Any:
        return self.get_interface(name, None)


def with_globals(function: Any, others: dict[str, Any]) -> Any:
    """A copy of the function whose global names mean these objects; one that wraps another wraps a copy of it.

    Nothing is changed in the function's module, so other callers of the function see what they saw before.
    """
    wrapped, names, cells = getattr(function, "__wrapped__", None), function.__globals__, function.__closure__
    if wrapped is None:
        # Without its name torch.compile reads the names from these globals, and not from the module of that name.
        names = {name: x for name, x in names.items() if name != "__name__"} | others
    else:
        inner = with_globals(wrapped, others)
        cells = tuple(CellType(inner) if cell.cell_contents is wrapped else cell for cell in cells)
    copy: Any = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    if wrapped is None:
        del copy.__wrapped__
    else:
        copy.__wrapped__ = inner
    return copy
