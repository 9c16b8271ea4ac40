"""The registry: names used in the command line and in recipe.json, with the class or function that each one names.

There are five kinds of names. "attention", "model" and "data" (tasks) name configuration classes: frozen dataclasses
with `build(...)`, decorated with `register`. "preprocessing" names the classes by which `mnemos predict` reads files,
decorated in the same way. The classes of this package stand in a table here, so that naming one does not import it;
`load` imports only its module. "recipe" names functions that return a `Recipe`, decorated with
`mnemos.lab.run.recipe.recipe`, or made by a function decorated with `mnemos.lab.recipes.family.family`: naming one
imports the modules `_RECIPES`.

Other packages register their entries with the same decorators. The command line finds these packages through the
entry-point group `mnemos.plugins`. Each entry point is a module to import, or a function without arguments to call. In
pyproject.toml:

    [project.entry-points."mnemos.plugins"]
    my-memory = "my_package.my_module"

Plug-ins are loaded when a name is not defined in this package, and for `mnemos list`. A single file needs no package:
`load_file` imports it, for `mnemos train my_file.py` and `--plugin my_file.py`. tests/test_contracts.py tests every
attention and model that this package registers.
"""

import ast
import functools
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from .errors import InputError, nearest
from .face import LABORATORY, find_missing

GROUP = "mnemos.plugins"

# {kind: {name: "module:class"}}, with modules below `mnemos`. `mnemos list` shows the names in this order.
_CLASSES = {
    "attention": {
        "block-sparse": "lab.papers.baselines.bigbird:BlockSparseConfig",
        "compressive": "attention.compressive:CompressiveConfig",
        "delta": "attention.recurrent:DeltaConfig",
        "gated-delta": "attention.recurrent:GatedDeltaConfig",
        "gla": "attention.recurrent:GLAConfig",
        "kimi-delta": "attention.recurrent:KimiDeltaConfig",
        "linear": "attention.linear:LinearConfig",
        "mamba2": "attention.recurrent:Mamba2Config",
        "reformer": "lab.papers.baselines.reformer:ReformerConfig",
        "relative": "attention.relative:RelativeConfig",
        "retention": "attention.recurrent:RetentionConfig",
        "softmax": "attention.softmax:SoftmaxConfig",
    },
    "model": {
        "armt": "models.segments:ARMTConfig",
        "encoder-decoder": "models.encoder_decoder:EncoderDecoderConfig",
        "lstm": "models.lstm:LSTMConfig",
        "memformer": "models.memformer:MemformerConfig",
        "memory-transformer": "models.segments:MemoryTransformerConfig",
        "rmt": "models.segments:RMTConfig",
        "transformer": "models.transformer:TransformerConfig",
        "hosted-decoder": "lab.hosted.decoder:HostedDecoderConfig",
        "hosted-encoder": "lab.hosted.encoder:HostedEncoderConfig",
        "hosted-classifier": "lab.vision.hosted:HostedClassifierConfig",
        "pvt": "lab.vision.classifiers:PVTConfig",
        "swin": "lab.vision.classifiers:SwinConfig",
        "vit": "lab.vision.classifiers:ViTConfig",
        "detector": "lab.vision.detectors:DetectorConfig",
        "bilstm": "lab.speech.models:BiLSTMConfig",
        "speech": "lab.speech.models:SpeechConfig",
    },
    "data": {
        "cifar": "lab.tasks.images:CIFARConfig",
        "copy": "lab.tasks.generated:CopyConfig",
        "mnist": "lab.tasks.images:MNISTConfig",
        "digits": "lab.tasks.images:DigitsConfig",
        "listops": "lab.tasks.listops:ListOpsConfig",
        "listops-answers": "lab.tasks.listops:ListOpsAnswersConfig",
        "mad-recall": "lab.tasks.mad:MADRecallConfig",
        "mad-fuzzy-recall": "lab.tasks.mad:MADFuzzyRecallConfig",
        "mad-copying": "lab.tasks.mad:MADCopyingConfig",
        "mad-compression": "lab.tasks.mad:MADCompressionConfig",
        "mad-memorisation": "lab.tasks.mad:MADMemorisationConfig",
        "mqar": "lab.tasks.recall:MQARConfig",
        "photos": "lab.tasks.photos:PhotosConfig",
        "pixels": "lab.tasks.pixels:PixelsConfig",
        "recall": "lab.tasks.recall:RecallConfig",
        "text": "lab.tasks.text:TextConfig",
        "series": "lab.tasks.series:SeriesConfig",
        "text-classes": "lab.tasks.text_classes:TextClassesConfig",
        "told": "lab.tasks.fact_recall:ToldConfig",
        "shapes": "lab.vision.detection.shapes:ShapesConfig",
        "coco": "lab.vision.detection.coco:COCOConfig",
        "translation": "lab.translation.translation:TranslationConfig",
        "spoken": "lab.speech.spoken:SpokenConfig",
    },
    "preprocessing": {
        "images": "lab.tasks.image_task:ImagePreprocessing",
        "text": "lab.tasks.text:TextPreprocessing",
        "series": "lab.tasks.series:SeriesPreprocessing",
        "text-classes": "lab.tasks.text_classes:TextClassesPreprocessing",
        "detection": "lab.vision.detect:DetectionPreprocessing",
        "translation": "lab.translation.translate:TranslationPreprocessing",
        "recordings": "lab.speech.spoken:SpeechPreprocessing",
    },
}
# Parts of models that the papers' comparisons alone need: they stand in the laboratory, and need its libraries.
_BASELINES = {
    "adaptive softmax": "lab.papers.baselines.adaptive_softmax:AdaptiveSoftmax",
    "mixture of logistics": "lab.papers.baselines.logistic_mixture:LogisticMixture",
}
# The modules that make recipes, those of papers last, as `mnemos list` shows them.
_RECIPES = (
    "lab.recipes.small_tasks",
    "lab.recipes.series",
    "lab.recipes.text",
    "lab.recipes.text_classes",
    "lab.recipes.translation",
    "lab.papers.cached_transformers.recipes",
    "lab.papers.linear_transformers.recipes",
    "lab.papers.memformer.recipes",
)
KINDS = ("attention", "model", "data", "recipe", "preprocessing")
_Class = TypeVar("_Class", bound=type)


class Definition(NamedTuple):
    """Where an entry is defined."""

    module: str
    attribute: str

    def __str__(self) -> str:
        return f"{_files.get(self.module, self.module)}:{self.attribute}"


class _Entry(NamedTuple):
    definition: Definition
    value: Any


_registered: dict[str, dict[str, _Entry]] = {kind: {} for kind in KINDS}
_failures: list[str] | None = None  # None: no plug-in has been loaded yet
_files: dict[str, Path] = {}  # the file of each module that `load_file` imported


# ---- names ----


@functools.cache
def _own(kind: str) -> dict[str, Definition]:
    """Where each entry of this package is defined."""
    if kind != "recipe":
        return {name: Definition(*f"{__package__}.{path}".split(":")) for name, path in _CLASSES[kind].items()}
    for module in _RECIPES:
        importlib.import_module(f"{__package__}.{module}")
    every = [(name, entry.definition) for name, entry in _registered[kind].items()]
    # In the order of `_RECIPES`, whichever module was imported first.
    return {name: one for path in _RECIPES for name, one in every if one.module == f"{__package__}.{path}"}


def definitions(kind: str) -> dict[str, Definition]:
    """Where each entry of a kind is defined, by name: this package's entries first, then those of other packages."""
    _check_kind(kind)
    return _own(kind) | {name: entry.definition for name, entry in _registered[kind].items()}


def names(kind: str) -> list[str]:
    """The names registered under a kind, one of `KINDS`; see `definitions`."""
    return list(definitions(kind))


def missing_folder(name: str | Path) -> str:
    """What an error about a path that is no folder goes on with after "found": it may be the name of a recipe."""
    if Path(name).exists():
        return "a file; name a folder"
    if not find_missing(LABORATORY) and str(name) in names("recipe"):  # the library alone has none
        return f"the name of a recipe; mnemos train {name} trains it: name the folder that it writes"
    return "no such folder; check the path"


def about(kind: str, name: str) -> str:
    """What an entry is, for `mnemos list`: the first line of its docstring.

    An entry that is not imported stays so; its docstring is read from its source file. Raises KeyError for an unknown
    name.
    """
    if name in _registered[kind]:
        return first_line(_registered[kind][name].value.__doc__)
    definition = _own(kind)[name]
    return _first_lines(definition.module).get(definition.attribute, "")


@functools.cache
def _first_lines(module: str) -> dict[str, str]:
    """The first line of the docstring of each class at the top of a module of this package."""
    path = Path(__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    return {node.name: first_line(ast.get_docstring(node)) for node in nodes if isinstance(node, ast.ClassDef)}


def first_line(documentation: str | None) -> str:
    """The first line of a docstring without the final full stop; "" without a docstring."""
    return (documentation or "").strip().partition("\n")[0].strip().removesuffix(".")


def default_name(function: str) -> str:
    """The name of a recipe whose decorator has no name: the function's name with - for _."""
    return function.replace("_", "-")


# ---- entries are added, removed and loaded ----


def register(cls: _Class) -> _Class:
    """Class decorator: register a configuration class under its `kind` and `name`; returns the class.

        @mnemos.register
        @dataclass(frozen=True)
        class DecayConfig(AttentionConfig):
            \"""One line that `mnemos list` shows.\"""

            name: ClassVar[str] = "decay"

    The class derives from `mnemos.AttentionConfig`, `mnemos.ModelConfig` or `mnemos.DataConfig`, or from
    `mnemos.lab.tasks.preprocessing.Preprocessing`, which set `kind`.
    Recipes can then use the class, and recipe.json and `mnemos.load` find it by its name. Raises InputError if the
    class has no kind or name, or if a class defined elsewhere has the name.
    """
    kind, name = getattr(cls, "kind", None), getattr(cls, "name", None)
    if not isinstance(cls, type) or kind not in KINDS or not isinstance(name, str):
        raise InputError(
            f"register: expected a subclass of AttentionConfig, ModelConfig or DataConfig with a class "
            f"variable `name`, found {cls!r:.80}; add the base class or the variable"
        )
    add(kind, name, cls)
    return cls


def add(kind: str, name: str, value: type | Callable[..., object]) -> None:
    """Register a class or function of a kind under a name. `register` and `recipe` call this function.

    The same class or function may be registered again, for example when a module is reloaded. Raises InputError if the
    name belongs to a class or function that is defined elsewhere.
    """
    _check_kind(kind)
    definition = Definition(value.__module__, value.__qualname__)
    before = _registered[kind][name].definition if name in _registered[kind] else None
    if before is None and definition.module.partition(".")[0] != __package__ and name in _own(kind):
        before = _own(kind)[name]
    if before is not None and str(before) != str(definition):
        raise InputError(
            f"expected a new name for the {kind} {definition}, found {name!r}, which belongs to {before}; rename it"
        )
    _registered[kind][name] = _Entry(definition, value)


def remove(kind: str, name: str) -> None:
    """Remove an entry that another package registered. Raises InputError if there is none."""
    _check_kind(kind)
    if name in _own(kind) or _registered[kind].pop(name, None) is None:
        raise InputError(
            f"expected a {kind} that was registered from outside mnemos, found {name!r}; name a registered one"
        )


def load(kind: str, name: str, file: object = None) -> Any:
    """The class or function with a name. Loads the plug-ins if the name is not known without them.

    file: the plug-in's file that defined the name when it was written (`file_of`); it is not loaded here.
    Raises InputError for an unknown name; the message has that file, or the most similar name, and the plug-ins that
    failed to load.
    """
    _check_kind(kind)
    if name in _registered[kind]:
        return _registered[kind][name].value
    if name not in _own(kind):
        load_plugins()
    known = definitions(kind)
    if name in known:
        if name not in _registered[kind]:
            importlib.import_module(known[name].module)
        return _registered[kind][name].value

    if file is not None and is_loaded(str(file)):
        hint = f"its plug-in {file} does not register it: correct the file, or give another with --plugin FILE"
    elif file is not None and Path(str(file)).is_file():
        hint = f"import its plug-in {file} first (in a command: --plugin {file})"
    elif file is not None:
        hint = f"its plug-in {file} is missing: give the file with --plugin FILE"
    elif kind == "recipe" and any(name == default_name(one.attribute) for one in known.values()):
        hint = f"this is a family: mnemos list {name} prints its recipes"
    elif near := nearest(name, known):
        hint = f"did you mean {near!r}?"
    else:
        hint = f"known: {', '.join(known)}" if len(known) <= 20 else "mnemos list prints the known names"
    article = "an" if kind[0] in "aeiou" else "a"
    raise InputError("; ".join([f"expected the name of {article} {kind}, found {name!r}", hint, *load_plugins()]))


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise InputError(f"expected one of the kinds {', '.join(KINDS)}, found {kind!r}; use one of them")


# ---- plug-ins: entry points of other packages, and single files ----


def load_plugins() -> list[str]:
    """Import or call every entry point of the group `mnemos.plugins`, once per process.

    Returns one sentence per plug-in that failed, with its distribution. Entries that a plug-in registered before it
    failed stay registered.
    """
    global _failures
    if _failures is None:
        _failures = []  # before the loop, because a plug-in may itself call `load`
        for point in entry_points(group=GROUP):
            try:
                plugin = point.load()
                if callable(plugin):
                    plugin()
            except (Exception, SystemExit) as error:  # a faulty plug-in must not make the other names unusable
                owner = f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"
                words = f"{type(error).__name__}: {' '.join(str(error).split())}"
                _failures.append(f"the plug-in {point.name!r} of {owner} cannot be loaded: {words}")
    return list(_failures)


def load_baseline(name: str) -> Any:
    """The class or function of a part of models that the papers' comparisons alone need (`_BASELINES`)."""
    module, attribute = _BASELINES[name].split(":")
    return getattr(importlib.import_module(f"{__package__}.{module}"), attribute)


def load_file(file: str | Path) -> list[str]:
    """Import a Python file that registers entries, once per process; returns the names of its recipes.

    The folder of the file is searched for the modules that it imports. Raises InputError for a file that is missing or
    fails; what it has registered is then removed.
    """
    path = Path(file).resolve()
    if path.suffix != ".py" or not path.is_file():
        found = "no such file" if not path.exists() else "another one"
        raise InputError(f"{file}: expected a Python file that registers a plug-in, found {found}; name another")
    module = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if module not in _files:
        _files[module] = path
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        spec = importlib.util.spec_from_file_location(module, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[module] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[module])
        except BaseException as error:
            del sys.modules[module], _files[module]
            for entries in _registered.values():
                for name in [name for name, entry in entries.items() if entry.definition.module == module]:
                    del entries[name]
            if isinstance(error, (Exception, SystemExit)):
                raise failed_in(path, error, file) from error
            raise
    return [name for name, entry in _registered["recipe"].items() if entry.definition.module == module]


def is_loaded(file: str | Path) -> bool:
    """Whether `load_file` has imported this file."""
    return Path(file).resolve() in _files.values()


def file_of(value: type | Callable[..., object]) -> Path | None:
    """The file that `load_file` imported and that defines a class or function; None for those of packages."""
    return _files.get(value.__module__)


def failed_in(path: Path, error: BaseException, called: object = None) -> InputError:
    """The one line of an error that a plug-in's file raised, with the last of its lines that led there.

    called: the file as the user gave it.
    """
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    message = " ".join(str(error).split()).removesuffix(f" ({path.name}, line {line})")
    where = f"line {line}: " if line else ""
    words = message if isinstance(error, InputError) else f"{type(error).__name__}: {message}"
    return InputError(f"{called or path}: {where}{words}; correct the file")
