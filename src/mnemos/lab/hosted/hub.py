"""Host models of Hugging Face and timm by name: their settings as JSON, and their trained weights."""

import contextlib
import json
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mnemos import registry
from mnemos.atomic import check_file, parse, read_text
from mnemos.errors import nearest, one_line
from mnemos.lab.errors import out_of_memory
from mnemos.libraries import timm, transformers
from mnemos.types import InputError

HF, TIMM = "hf:", "timm:"
_DECODER = "AutoModelForCausalLM"
_WRITES = ", which AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER) writes"
_CHOOSE = "choose a model that Transformers has itself"  # where nothing lets its code run: in training
_ALLOW = "if you trust its code, add --trust-remote-code (mnemos chat, linearise), or trust_remote_code=True in Python"
# What a saved configuration says beside the architecture: where it is from, and how it was stored.
_LEFT_OUT = {"_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "mnemos"}
_LEFT_OUT |= {"mnemos_linearised", "id2label", "label2id", "problem_type"}


def is_source(name: str) -> bool:
    """Whether a name is that of a host: hf:NAME, timm:NAME, or the folder of a saved model of Hugging Face."""
    return name.startswith((HF, TIMM)) or "model_type" in _saved_config(Path(name))


def settings_of(source: str) -> str:
    """The settings of a host as JSON, or timm:NAME as it is: what a model is built of without its source.

    source: see `is_source`. Raises InputError for a name or folder without a model, and where the hub is not reached.
    """
    if source.startswith(TIMM):
        _check_timm(source)
        return source
    with _from_hub(source) as name:
        config = transformers().AutoConfig.from_pretrained(name, trust_remote_code=False)
    settings = {name: value for name, value in config.to_diff_dict().items() if name not in _LEFT_OUT}
    return json.dumps(settings, sort_keys=True)


def normalisation(source: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and standard deviation [3] by which pixels in [0, 1] were normalised for a source; None: it does not say."""
    if source.startswith(TIMM):
        with _from_hub(source):
            about: Any = timm().get_pretrained_cfg(source.removeprefix(TIMM))
        return None if about is None else (tuple(about.mean), tuple(about.std))
    transformers()
    from transformers.models.auto.image_processing_auto import get_image_processor_config

    with _from_hub(source) as name:
        saved = get_image_processor_config(name)
        with contextlib.suppress(Exception):  # what its file leaves out are defaults of its class, if that is known
            if saved:
                saved |= vars(transformers().AutoImageProcessor.from_pretrained(name, trust_remote_code=False))
    mean, std = (saved.get(f"image_{one}") for one in ("mean", "std"))
    if not saved.get("do_normalize", True):
        mean, std = 0.0, 1.0
    # --- its numbers are of pixels from 0 to 255 that were multiplied by a factor, and perhaps lowered by 1 ---
    factor = 255 * saved.get("rescale_factor", 1 / 255) if saved.get("do_rescale", True) else 255.0
    lowered = 1.0 if saved.get("rescale_offset") else 0.0
    both = [[one] * 3 if isinstance(one, int | float) else one for one in (mean, std)]
    if not saved or not all(isinstance(one, list | tuple) and len(one) == 3 for one in both):
        return None
    return tuple((one + lowered) / factor for one in both[0]), tuple(one / factor for one in both[1])


def host_config(settings: str) -> Any:
    """The configuration of Transformers that `settings_of` wrote. Raises InputError for other settings."""
    try:
        fields = json.loads(settings)
        return transformers().AutoConfig.for_model(fields.pop("model_type"), **fields)
    except InputError:
        raise
    except Exception as error:  # the library raises errors of its own for settings of the wrong type
        raise InputError(
            f"host: expected the settings of a model of transformers as JSON, found {settings[:60]!r} "
            f"({type(error).__name__}: {one_line(error)}); choose the host with --model hf:NAME"
        ) from None


def host_of(auto: str, config: Any) -> nn.Module:
    """A new model of an Auto class of Transformers. Raises InputError for a configuration of another kind of model."""
    try:
        return getattr(transformers(), auto).from_config(config, trust_remote_code=False)
    except ValueError as error:
        task = auto.removeprefix("AutoModel").replace("For", " for ")  # of an encoder none
        raise InputError(
            f"host: expected a model of transformers{task}, found {config.model_type} ({one_line(error)}); choose "
            "another host"
        ) from None


def host_weights(auto: str, source: str) -> dict[str, Tensor]:
    """The trained weights of a host in single precision, by its own names. Raises InputError as `settings_of`."""
    if source.startswith(TIMM):
        _check_timm(source)
        with _from_hub(source):
            model: nn.Module = timm().create_model(source.removeprefix(TIMM), pretrained=True)
    else:
        model = _read(auto, source, _CHOOSE, trust_remote_code=False, dtype=torch.float32)
    return model.state_dict()


def _read(auto: str, source: str, remedy: str, **named: Any) -> nn.Module:
    with _from_hub(source, remedy=remedy) as name:
        model, read = getattr(transformers(), auto).from_pretrained(name, output_loading_info=True, **named)
    lacking = sorted(read["missing_keys"]) if auto == _DECODER else []  # of another class, heads may be new
    if lacking:  # Transformers would draw them at random
        raise InputError(
            f"{source}: expected the weights of every layer, found none of {', '.join(lacking[:3])}; fetch the files "
            "again"
        )
    return model


def language_model(source: str, trust_remote_code: bool = False) -> tuple[nn.Module, Any]:
    """A trained decoder of Transformers, with its gated caches or linear states, in eval mode, and its tokenizer.

    source: see `is_source`. trust_remote_code: run the Python code that a model brings. Raises InputError as
    `settings_of`, for a folder that does not exist or is damaged, and where there is no tokenizer.
    """
    from mnemos.hugging_face import register

    check_folder(source, "model")  # of a run of `mnemos linearise`
    register()
    tokenizer = read_tokenizer(source, trust_remote_code)
    return read_decoder(source, trust_remote_code).eval(), tokenizer


def read_config(source: str, trust_remote_code: bool = False) -> Any:
    """The configuration of a model of Transformers. Raises InputError as `language_model`."""
    with _from_hub(source, remedy=_ALLOW) as name:
        return transformers().AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)


def read_tokenizer(source: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model of Transformers. Raises InputError as `language_model`."""
    with _from_hub(source, "a tokenizer" + _WRITES, _ALLOW) as name:
        return transformers().AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def read_decoder(source: str, trust_remote_code: bool = False, **named: Any) -> nn.Module:
    """A trained decoder of Transformers, with its caches or states. Raises InputError as `language_model`."""
    from mnemos.hosts.pretrained import from_pretrained

    named["trust_remote_code"] = trust_remote_code
    if {"mnemos", "mnemos_linearised"} & {*read_config(source, trust_remote_code).to_diff_dict()}:
        with _from_hub(source, remedy=_ALLOW) as name:
            return from_pretrained(getattr(transformers(), _DECODER), name, **named)
    return _read(_DECODER, source, _ALLOW, **named)


def check_folder(source: str, inside: str = "") -> None:
    """Raise InputError if a source is neither hf:NAME nor a saved model. inside: a folder in it that may be meant."""
    folder = Path(source)
    if source.startswith(HF) or "model_type" in _saved_config(folder):
        return
    run = next((one for one in (folder, folder.parent) if (one / "recipe.json").is_file()), None)
    if inside and "model_type" in _saved_config(folder / inside):
        found = f"a folder without its config.json; name {folder / inside}"
    elif run is not None:
        found = f"a run of mnemos; mnemos sample {run} uses its model, mnemos export {run} makes it one of Transformers"
    elif folder.is_dir():
        found = "a folder without its config.json; check the path"
    else:
        found = registry.missing_folder(source)
    raise InputError(
        f"{source}: expected the folder of a saved model of Transformers, or {HF}NAME of the hub, found {found}"
    )


def tokenizer_file(source: str) -> str:
    """The tokenizer.json of a host of Hugging Face. Raises InputError if it has none."""
    transformers()
    from transformers.utils import cached_file

    with _from_hub(source, "a tokenizer.json" + _WRITES) as name:
        return str(cached_file(name, "tokenizer.json"))


def _saved_config(folder: Path) -> dict[str, Any]:
    try:
        content = parse(read_text(folder / "config.json"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _check_timm(source: str) -> None:
    library: Any = timm()
    name = source.removeprefix(TIMM)
    if not library.is_model(name.partition(".")[0]):
        near = nearest(name, library.list_models())
        hint = f"did you mean {TIMM}{near}?" if near else "timm.list_models() names them"
        raise InputError(f"{source}: expected the name of a model of timm, found {name!r}; {hint}")


@contextlib.contextmanager
def _from_hub(
    source: str,
    what: str = "a model of the Hugging Face hub, or the folder of a saved one",
    remedy: str = _CHOOSE,
) -> Iterator[str]:
    """Inside, any error of the hub or of the files is an InputError, and no library prints; gives the name to load.

    remedy: for a model that brings Python code, which is not run. Raises InputError for a pipe in a folder. Memory that
    does not suffice is a MemoryError: nothing is wrong with the files.
    """
    transformers()
    from transformers.utils import logging as messages

    hub, own = logging.getLogger("huggingface_hub"), messages.get_verbosity()
    level, bars = hub.level, messages.is_progress_bar_enabled()
    hub.setLevel(logging.CRITICAL)
    messages.set_verbosity(logging.CRITICAL)
    messages.disable_progress_bar()
    try:
        for path in Path(source).iterdir() if Path(source).is_dir() else ():
            check_file(path)  # reading a pipe would wait without end
        yield source.removeprefix(HF)
    except InputError:
        raise
    except Exception as error:  # of a damaged file the libraries raise any exception
        if out_of_memory(error) or "(os error 12)" in str(error):  # the latter of safetensors
            raise MemoryError(f"{source}: {one_line(error)}") from None
        if "trust_remote_code=True" in str(error):
            raise InputError(
                f"{source}: expected a model without Python code of its own, found one that brings some; {remedy}"
            ) from None
        unsafe = isinstance(error, pickle.UnpicklingError)  # its message says how to run the pickle nevertheless
        found = "a pickle that is damaged, or holds more than tensors" if unsafe else one_line(error)
        found = "weights of other shapes than config.json says" if "ignore_mismatched_sizes" in found else found
        fix = "fetch the files again" if Path(source).is_dir() else "check the name and the network"
        raise InputError(f"{source}: expected {what}, found none that can be read ({found}); {fix}") from None
    finally:
        hub.setLevel(level)
        messages.set_verbosity(own)
        if bars:
            messages.enable_progress_bar()
