"""Models with memories on disk: `from_pretrained` for Hugging Face's, `save` and `load` for cached ones of any."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mnemos.atomic import check_file, parse, read_text, replacing, write_json
from mnemos.config import from_dict
from mnemos.errors import one_line
from mnemos.libraries import transformers
from mnemos.memory.gated_cache import GRC
from mnemos.modes import plain_module, uncompiled
from mnemos.types import InputError

from .attach import CONFIG_RECORDS, SavedSizes, add_caches, uncache
from .branch import HostBranch
from .hooks import RECORD
from .linearise import linearise
from .linearised import Linearised

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
    # --- the model; Hugging Face is not to report the weights of caches and states as unexpected, but all others ---
    owner = cls
    if not hasattr(cls, _EXPECTED):  # an Auto class: the class of the model that it reads, or the base of all models
        named = {name: options[name] for name in ("trust_remote_code", "revision", "subfolder") if name in options}
        config = options.get("config") or transformers().AutoConfig.from_pretrained(folder, **named)
        owner = getattr(cls, "_model_mapping", {}).get(type(config), None)
        owner = owner if hasattr(owner, _EXPECTED) else transformers().PreTrainedModel
    before = vars(owner).get(_EXPECTED, _INHERITED)
    setattr(owner, _EXPECTED, [*(getattr(owner, _EXPECTED) or ()), r"(^|\.)(grc|linearised)\."])
    try:
        read = cls.from_pretrained(folder, **options)
    finally:
        if before is _INHERITED:
            delattr(owner, _EXPECTED)
        else:
            setattr(owner, _EXPECTED, before)
    model = read[0] if isinstance(read, tuple) else read  # with output_loading_info: and what was missing
    if any(isinstance(one, HostBranch | Linearised) for one in model.modules()):
        return read  # RememberingForCausalLM builds its decoder's
    # --- its caches and states, with new weights ---
    records = _pop_records(model)
    if not records:
        raise InputError(
            f"{folder}: expected a model saved with its caches or linearised, found none recorded in config.json; "
            "use cls.from_pretrained"
        )
    for name, (caches, states) in records.items():
        part = model.get_submodule(name)
        apply_record(part, caches, folder, "config.json")
        apply_states(part, states, folder)
    # --- their weights in the files: {name of the branch: {name in it: tensor}} ---
    from safetensors import safe_open

    stored: dict[str, dict[str, Tensor]] = {}
    for path in sorted(Path(folder, options.get("subfolder", "")).glob("*.safetensors")):
        check_file(path)
        with safe_open(str(path), "pt") as file:
            if (file.metadata() or {}).get("format", "").startswith("mnemos"):
                continue  # an adapter, which lies beside the model
            for key in file.keys():  # noqa: SIM118
                for child in ("grc", "linearised"):
                    above, inside, part = f".{key}".rpartition(f".{child}.")
                    if inside:
                        stored.setdefault(f"{above}.{child}".removeprefix("."), {})[part] = file.get_tensor(key)
    for name, module in model.named_modules():
        if not isinstance(module, HostBranch | Linearised) or not module.state_dict():
            continue
        alike = [one for one in stored if one.endswith(f".{name.rpartition('.')[2]}")]
        if not alike:
            raise InputError(
                f"{folder}: expected the weights of {name!r} in *.safetensors, found weights of no cache or state; "
                "read the original folder with mnemos.hosts.from_pretrained and save it again, or use "
                "cls.from_pretrained if this model was not changed and only shared its configuration with one that was"
            )
        # The library writes files with names that its modules had in older versions, where only words inside differ.
        same = [name] if name in alike else [one for one in alike if _numbers_and_end(one) == _numbers_and_end(name)]
        if len(same) != 1:
            raise InputError(
                f"{folder}: expected the weights of {name!r} in *.safetensors, found none; save the model again, with "
                "save_original_format=False"
            )
        module.load_state_dict(stored[same[0]])
    return read


def _pop_records(model: nn.Module) -> dict[str, list[list[dict[str, Any]]]]:
    """Remove the notes of `cache` and `linearise` from the configurations of a model and its parts, and return them.

    By the name of the part, which is "" for the model: those of `cache`, and those of `linearise`.
    """
    found: dict[str, list[list[dict[str, Any]]]] = {}
    for name, module in model.named_modules():
        noted = getattr(getattr(module, "config", None), "__dict__", {})
        records = [noted.pop(one, []) for one in CONFIG_RECORDS]
        around = [outer for outer in found if not outer or name.startswith(f"{outer}.")]
        if any(records) and records not in [found[outer] for outer in around]:  # an encoder has a copy of the whole's
            found[name] = records
    return found


def _numbers_and_end(name: str) -> tuple[list[str], list[str]]:
    parts = name.split(".")
    return [part for part in parts if part.isdigit()], parts[-2:]


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
        raise InputError("expected the model that mnemos.cache() was called on, found none; save that one")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "model.safetensors") as temporary:
        save_model(model, str(temporary))
    write_json(folder / _RECORD, record)


def load(model: nn.Module, folder: str | Path) -> nn.Module:
    """Give a host without caches the caches that `save` wrote, in place, and all weights; returns the model.

    The model is built as the saved one was before `cache`. Raises InputError if the folder is another one, or
    damaged, or its weights are those of another model; the host is then as it was. Cost: a copy of its weights on the
    CPU while it reads.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    folder = Path(folder)
    if not (folder / _RECORD).is_file() or not (folder / "model.safetensors").is_file():
        raise InputError(f"{folder}: expected {_RECORD} and model.safetensors, as mnemos.hosts.save writes them")
    inner = uncompiled(model)
    try:
        record = parse(read_text(folder / _RECORD))
    except ValueError as error:  # not UTF-8, or not JSON
        raise InputError(f"{folder / _RECORD}: expected JSON, found a damaged file ({error}); save it again") from None
    weights = {name: x.to("cpu", copy=True) for name, x in inner.state_dict().items() if isinstance(x, Tensor)}
    had_caches = _has_caches(inner)
    try:
        apply_record(inner, record, folder, _RECORD)
        keys = load_model(plain_module(model, "hosts.load"), str(folder / "model.safetensors"), strict=False)
        if apart := [
            f"{len(names)} {what}, such as {names[0]}"
            for what, names in zip(_APART, map(sorted, keys), strict=True)
            if names
        ]:
            raise RuntimeError("; ".join(apart))
    except (InputError, SafetensorError, RuntimeError, OSError) as error:
        if not had_caches and _has_caches(inner):
            uncache(inner)
        inner.load_state_dict(weights, strict=False)
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{folder}: expected this model's weights, found others ({one_line(error)}); build it as saved"
        ) from None
    return model


_APART = "names of the model missing in the file", "names in the file unknown to the model"


def _has_caches(model: nn.Module) -> bool:
    return any(isinstance(module, HostBranch) for module in model.modules())


def find_record(model: nn.Module) -> list[dict[str, Any]]:
    """The settings of all caches of a model, whatever part of it `cache` was called on, in order of the calls."""
    return [one for module in model.modules() for one in vars(module).get(RECORD, ())]


def apply_record(model: nn.Module, record: list[dict[str, Any]], folder: str | Path, file: str) -> None:
    """Give a model the caches that were recorded of it, or of a model around it, with new weights.

    Raises InputError for what is no such record, and names the file that has it.
    """
    try:
        calls = [(one["grc"], {name: SavedSizes(**each) for name, each in one["caches"].items()}) for one in record]
    except (TypeError, KeyError, AttributeError):
        raise InputError(f"{file}: expected the settings of caches, found others; save the model again") from None
    for grc, sizes in calls:
        names = [name for name, _ in model.named_modules()]
        saved_sizes = {_find_module(name, names, folder): each for name, each in sizes.items()}
        add_caches(model, from_dict(GRC, grc, f"{file}: grc"), where=list(saved_sizes), saved_sizes=saved_sizes)


def apply_states(model: nn.Module, states: list[dict[str, Any]], folder: str | Path) -> None:
    """Linearise a model as `list_linearised` has it of this model, or of one around it, with new parameters."""
    names = [name for name, _ in model.named_modules()]
    for one in states:
        where = [_find_module(name, names, folder) for name in one["names"]]
        heads = [name.rpartition(":") for name in one.get("full", ())]
        full = [f"{_find_module(name, names, folder)}:{some}" for name, _, some in heads]
        try:
            linearise(model, **one["settings"], where=where, full=full)
        except TypeError as error:  # a setting that there is not
            raise InputError(f"{folder}: config.json has other settings than linearise: {error}") from None


def _find_module(name: str, names: Iterable[str], folder: str | Path) -> str:
    """The name in this model of a recorded module. It differs for a base model that was saved inside another."""
    alike = [one for one in names if one == name or one.endswith(f".{name}") or (one and name.endswith(f".{one}"))]
    if not alike:
        raise InputError(
            f"{folder}: expected a module {name!r}, which has a cache or a state, found none; build the host as it "
            "was, of the same class and depth"
        )
    return name if name in alike else max(alike, key=len)
