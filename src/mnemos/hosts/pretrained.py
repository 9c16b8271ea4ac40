"""Models with memories on disk: `from_pretrained` for Hugging Face's, `save` and `load` for cached ones of any."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mnemos.atomic import check_file, read_text, replacing, write_json
from mnemos.config import from_dict
from mnemos.json_text import parse
from mnemos.libraries import transformers
from mnemos.memory.gated_cache import GRC
from mnemos.modes import plain_module, uncompiled
from mnemos.types import InputError

from .attach import SavedSizes, apply
from .branch import HostBranch
from .hooks import RECORD
from .linearise import RECORD as LINEARISED
from .linearise import linearise
from .linearised import Linearised, Settings

_EXPECTED = "_keys_to_ignore_on_load_unexpected"  # of Hugging Face's model classes: patterns of names
_INHERITED = object()
_RECORD = "caches.json"


def from_pretrained(cls: Any, folder: str | Path, **options: Any) -> nn.Module:
    """`cls.from_pretrained(folder, **options)` for a model that was saved with its caches, or linearised.

        model.save_pretrained(folder)                   # a model that mnemos.cache() or linearise() was called on
        model = mnemos.hosts.from_pretrained(ViTForImageClassification, folder)

    The class's own from_pretrained also reads the folder: it returns the host without these and warns of their unused
    weights. `cls` may differ from the saved class: the base model of one with a head, or the reverse. Raises InputError
    if the folder has no such model, or lacks the weights of its caches or states.
    """
    options = {"trust_remote_code": False, **options}  # else Transformers asks on the standard input
    with _expect_branches(_find_class(cls, folder, options)):
        model = cls.from_pretrained(folder, **options)
    if has_caches(model):  # RememberingForCausalLM builds the caches of its decoder
        return model
    record, states = getattr(model.config, "mnemos", None), model.config.__dict__.pop(LINEARISED, ())
    if record is None and not states:
        raise InputError(
            f"{folder}: expected a model saved with its caches or linearised, found none recorded in config.json; "
            "use cls.from_pretrained"
        )
    if record is not None:
        apply_record(model, record, folder)
    names = [name for name, _ in model.named_modules()]
    for one in states:
        settings = one["settings"]
        if new := {*settings} - {field.name for field in fields(Settings)}:
            raise InputError(
                f"{folder}: expected the settings of linearise that this version knows, found {', '.join(sorted(new))} "
                "in config.json; update mnemos"
            )
        linearise(model, **settings, where=[_find_module(name, names, folder) for name in one["names"]])
    stored = _read_stored(Path(folder))
    for name, module in model.named_modules():
        if isinstance(module, HostBranch | Linearised) and module.state_dict():
            alike = [one for one in stored if one.endswith(f".{_split_name(name)[1][-1]}")]
            module.load_state_dict(stored[_find_stored(name, alike, folder)])
    return model


def save(model: nn.Module, folder: str | Path) -> None:
    """Write a cached model of any library to a folder: the settings of its caches, and all weights (safetensors).

        mnemos.hosts.save(vit, folder)
        vit = mnemos.hosts.load(timm.create_model("vit_small_patch16_224"), folder)

    Pending updates are promoted. Each file is written completely or not at all. Raises InputError if `cache` was not
    called on this model.
    """
    from safetensors.torch import save_model

    model = plain_module(model, "hosts.save")
    record = model.__dict__.get(RECORD)
    if record is None:
        raise InputError(
            "expected the model that mnemos.cache() was called on, found none of its caches; save that one"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "model.safetensors") as temporary:
        save_model(model, str(temporary))
    write_json(folder / _RECORD, record)


def load(model: nn.Module, folder: str | Path) -> nn.Module:
    """Give a host without caches the caches that `save` wrote, in place, and all weights; returns the model.

    The model is built as the saved one was before `cache`. Raises InputError if the folder is another one, or
    damaged, or its weights are those of another model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    folder = Path(folder)
    if not (folder / _RECORD).is_file() or not (folder / "model.safetensors").is_file():
        raise InputError(f"{folder}: expected {_RECORD} and model.safetensors, as mnemos.hosts.save writes them")
    inner = uncompiled(model)
    for one in _read_record(folder / _RECORD):
        _apply(inner, one, folder, f"{_RECORD}: grc")
    try:
        load_model(plain_module(model, "hosts.load"), str(folder / "model.safetensors"))
    except (SafetensorError, RuntimeError, OSError) as error:
        raise InputError(
            f"{folder}: expected this model's weights, found others ({str(error).splitlines()[0]}); build the model as "
            "it was saved"
        ) from None
    return model


def _read_record(path: Path) -> list[dict[str, Any]]:
    """The settings of each call of `cache`, as `save` wrote them."""
    try:
        found = parse(read_text(path))
    except ValueError as error:  # not UTF-8, or not JSON
        raise InputError(f"{path}: expected JSON, found a damaged file ({error}); save the model again") from None
    if not isinstance(found, list) or not all(_is_record(one) for one in found):
        raise InputError(f"{path}: expected the settings of caches, found others; save the model again")
    return found


def _is_record(one: object) -> bool:
    """Whether JSON says what a call of `cache` made: its settings, and the sizes of each cache by its module's name."""
    if not isinstance(one, dict) or not {"grc", "caches"} <= one.keys() or not isinstance(one["caches"], dict):
        return False
    return all(isinstance(sizes, dict) and {*sizes} == {*SavedSizes._fields} for sizes in one["caches"].values())


def has_caches(model: nn.Module) -> bool:
    """Whether `cache` was called on a model, or on a part of it."""
    return any(isinstance(module, HostBranch) for module in model.modules())


def find_record(model: nn.Module) -> dict[str, Any] | None:
    """The settings of all caches of a model, whatever part of it `cache` was called on; None: it has none."""
    found = [one for module in model.modules() for one in vars(module).get(RECORD, ())]
    return {**found[0], "more": found[1:]} if found[1:] else found[0] if found else None


def apply_record(model: nn.Module, record: dict[str, Any], folder: str | Path) -> None:
    """Give a model the caches that were recorded of it, or of a model around it, with new weights."""
    for one in [record, *record.get("more", ())]:
        _apply(model, one, folder, "config.json: mnemos.grc")


def _apply(model: nn.Module, one: dict[str, Any], folder: str | Path, where: str) -> None:
    names = [name for name, _ in model.named_modules()]
    known = {_find_module(name, names, folder): SavedSizes(**sizes) for name, sizes in one["caches"].items()}
    apply(model, from_dict(GRC, one["grc"], where), where=list(known), saved=known)


def _find_class(cls: Any, folder: str | Path, options: dict[str, Any]) -> Any:
    """The class of the model that an Auto class of Hugging Face reads, or the base class of all models."""
    if hasattr(cls, _EXPECTED):
        return cls
    told = {name: options[name] for name in ("trust_remote_code", "revision", "subfolder") if name in options}
    config = options.get("config") or transformers().AutoConfig.from_pretrained(folder, **told)
    found = getattr(cls, "_model_mapping", {}).get(type(config), None)
    return found if hasattr(found, _EXPECTED) else transformers().PreTrainedModel


@contextlib.contextmanager
def _expect_branches(owner: Any) -> Iterator[None]:
    """Inside the `with`, Hugging Face does not report weights of caches and states as unexpected, but all others."""
    before = vars(owner).get(_EXPECTED, _INHERITED)
    setattr(owner, _EXPECTED, [*(getattr(owner, _EXPECTED) or ()), r"(^|\.)(grc|linearised)\."])
    try:
        yield
    finally:
        if before is _INHERITED:
            delattr(owner, _EXPECTED)
        else:
            setattr(owner, _EXPECTED, before)


def _read_stored(folder: Path) -> dict[str, dict[str, Tensor]]:
    """The tensors of caches and states in a folder: {name of the branch in the files: {name in it: tensor}}."""
    from safetensors import safe_open

    found: dict[str, dict[str, Tensor]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        check_file(path)
        with safe_open(str(path), "pt") as file:
            for key in file.keys():  # noqa: SIM118
                for kind in ("grc", "linearised"):
                    above, branch, part = f".{key}".rpartition(f".{kind}.")
                    if branch:
                        found.setdefault(f"{above}.{kind}".removeprefix("."), {})[part] = file.get_tensor(key)
    return found


def _find_module(name: str, names: Iterable[str], folder: str | Path) -> str:
    """The name in this model of a recorded module. It differs for a base model that was saved inside another."""
    found = [one for one in names if one == name or one.endswith(f".{name}") or (one and name.endswith(f".{one}"))]
    if not found:
        raise InputError(
            f"{folder}: expected a module {name!r}, which has a cache or a state in the folder, found none; "
            "use the class that was saved"
        )
    return name if name in found else max(found, key=len)


def _find_stored(name: str, stored: Iterable[str], folder: str | Path) -> str:
    """The name in the files of a branch. The library writes files with names that its modules had in older versions.

    Only words inside a name differ; its numbers and its last two parts are the same.
    """
    names = list(stored)
    if not names:
        raise InputError(
            f"{folder}: expected the weights of {name!r} in *.safetensors, found weights of no cache or "
            "state; the class's own from_pretrained drops them: read the original folder with "
            "mnemos.hosts.from_pretrained and save it again"
        )
    found = [one for one in names if one == name] or [one for one in names if _split_name(one) == _split_name(name)]
    if len(found) != 1:
        raise InputError(
            f"{folder}: expected the weights of {name!r} in *.safetensors, found none; save the model again, with "
            "save_original_format=False"
        )
    return found[0]


def _split_name(name: str) -> tuple[list[str], list[str]]:
    parts = name.split(".")
    return [part for part in parts if part.isdigit()], parts[-2:]
