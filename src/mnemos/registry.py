"""Every name that a command line or a run's recipe.json can say, and the class (or function) it stands for.

Entries are "module:attribute" and are imported when asked for, so that this file imports nothing and
stands at the top of the house. Adding a memory, a task or a recipe is one file and one line here; an
attention or a model that is registered is thereby tested (tests/test_contracts.py runs over them all).
"""

import difflib
import importlib
from typing import Any

from .types import InputError

# A configuration class each: a frozen dataclass with `build(...)`, beside the class that it builds.
ATTENTION = {
    "softmax": "mnemos.attention.softmax:SoftmaxConfig",
    "linear": "mnemos.attention.linear:LinearConfig",
    "lsh": "mnemos.attention.lsh:LSHConfig",
    "relative": "mnemos.attention.relative:RelativeConfig",
}
MODELS = {
    "transformer": "mnemos.models.transformer:TransformerConfig",
    "memformer": "mnemos.models.memformer:MemformerConfig",
    "vit": "mnemos.models.vision.vit:ViTConfig",
    "pvt": "mnemos.models.vision.pvt:PVTConfig",
    "swin": "mnemos.models.vision.swin:SwinConfig",
    "speech": "mnemos.models.speech:SpeechConfig",
    "lstm": "mnemos.models.lstm:LSTMConfig",
    "bilstm": "mnemos.models.recurrent:BiLSTMConfig",
}
DATA = {
    "listops": "mnemos.data.listops:ListOpsConfig",
    "copy": "mnemos.data.copying:CopyConfig",
    "recall": "mnemos.data.recall:RecallConfig",
    "digits": "mnemos.data.images:DigitsConfig",
    "mnist": "mnemos.data.images:MNISTConfig",
    "cifar": "mnemos.data.cifar:CIFARConfig",
    "photos": "mnemos.data.photos:PhotosConfig",
    "text": "mnemos.data.text:TextConfig",
    "pixels": "mnemos.data.pixels:PixelsConfig",
    "spoken": "mnemos.data.spoken:SpokenConfig",
}
# Functions without required arguments that return a Recipe.
RECIPES = {
    "demo": "mnemos.papers.cached_transformers.recipes:demo",
    "demo-cached": "mnemos.papers.cached_transformers.recipes:demo_cached",
    "demo-wider": "mnemos.papers.cached_transformers.recipes:demo_wider",
    "demo-linear": "mnemos.papers.cached_transformers.recipes:demo_linear",
    "text": "mnemos.train.starters:text",
    "text-linear": "mnemos.train.starters:text_linear",
    "text-cached": "mnemos.train.starters:text_cached",
    "text-xl": "mnemos.train.starters:text_xl",
    "text-lstm": "mnemos.train.starters:text_lstm",
    "text-memformer": "mnemos.train.starters:text_memformer",
    "copy": "mnemos.train.starters:copy",
    "copy-small": "mnemos.papers.linear_transformers.copy_claim:copy_small",
    "recall": "mnemos.train.starters:recall",
    "digits": "mnemos.train.starters:digits",
    "mnist": "mnemos.train.starters:mnist",
    "listops": "mnemos.papers.cached_transformers.recipes:listops",
    "listops-cached": "mnemos.papers.cached_transformers.recipes:listops_cached",
}
_VISION = "mnemos.papers.cached_transformers.vision"
for _names, _arms in (
    ("digits-vit digits-pvt mnist-vit mnist-pvt cifar-vit cifar-pvt photos-vit", " -cached -wider -attention-cache"),
    ("digits-swin mnist-swin cifar-swin", " -cached -wider"),
    ("imagenet-vit-s imagenet-pvt-tiny imagenet-pvt-small", " -cached -attention-cache"),
    ("imagenet-pvt-medium imagenet-pvt-v2-b2 imagenet-pvt-v2-b3 imagenet-pvt-v2-b4", " -cached"),
    ("imagenet-swin-t imagenet-22k-swin-t", " -cached"),
):
    RECIPES |= {_n + _a: f"{_VISION}:{_n}{_a}" for _n in _names.split(" ") for _a in _arms.split(" ")}
_IMAGES = "mnemos.papers.linear_transformers.image_recipes"
RECIPES |= {
    "mnist-pixels": f"{_IMAGES}:mnist_pixels",
    "mnist-pixels-softmax": f"{_IMAGES}:mnist_pixels_softmax",
    "cifar-pixels": f"{_IMAGES}:cifar_pixels",
    "cifar-pixels-softmax": f"{_IMAGES}:cifar_pixels_softmax",
    "mnist-pixels-small": f"{_IMAGES}:mnist_pixels_small",
    "mnist-pixels-small-softmax": f"{_IMAGES}:mnist_pixels_small_softmax",
    "mnist-pixels-small-mixture": f"{_IMAGES}:mnist_pixels_small_mixture",
    "cifar-pixels-small": f"{_IMAGES}:cifar_pixels_small",
    "digits-pixels": f"{_IMAGES}:digits_pixels",
    "photos-pixels": f"{_IMAGES}:photos_pixels",
}
_SPEECH = "mnemos.papers.linear_transformers.speech_recipes"
for _arm in ("softmax", "linear", "lsh", "bilstm"):
    RECIPES |= {f"{_n}-{_arm}": f"{_SPEECH}:{_n}-{_arm}" for _n in ("speech", "spoken-digits")}
_MEMFORMER = "mnemos.papers.memformer"
RECIPES |= {
    "mnist-memformer-small": f"{_MEMFORMER}.recipes:mnist-memformer-small",
    "digits-memformer": f"{_MEMFORMER}.recipes:digits-memformer",
    "wikitext-memformer": f"{_MEMFORMER}.recipes:wikitext_memformer",
    "wikitext-xl": f"{_MEMFORMER}.recipes:wikitext_xl",
    "recall-memformer": f"{_MEMFORMER}.recall_claim:recall_memformer",
}
_ARMS = " -8-slots -2+6 -2+6-32-slots -2+6-16-slots -2+6-1-slot -4+4 -no-memory -temperature-1 -no-forgetting -one-head"
for _n, _arms in (("mnist-memformer", _ARMS), ("mnist", "-lstm -transformer -xl-56 -xl-224 -xl-784")):
    RECIPES |= {_n + _a: f"{_MEMFORMER}.recipes:{_n}{_a}" for _a in _arms.split(" ")}
KINDS = {"attention": ATTENTION, "model": MODELS, "data": DATA, "recipe": RECIPES}


def names(kind: str) -> list[str]:
    """The names registered under a kind: "attention", "model", "data" or "recipe"."""
    return list(KINDS[kind])


def load(kind: str, name: str) -> Any:
    """What a name stands for. Raises InputError, with the nearest right name, where there is none."""
    entries = KINDS[kind]
    if name not in entries:
        near = difflib.get_close_matches(name, entries, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(entries)}"
        raise InputError(f"no {kind} is called {name!r}; {hint}")
    module, attribute = entries[name].split(":")
    return getattr(importlib.import_module(module), attribute)
