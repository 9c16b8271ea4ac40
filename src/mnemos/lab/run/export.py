"""`mnemos export RUN`: a run's model as a checkpoint of Transformers, or as programs of torch.export or ONNX."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from mnemos import libraries
from mnemos.atomic import whole_or_none, write_text
from mnemos.config import ModelConfig, to_dict
from mnemos.lab.evaluate.predict import has_preprocessing, read_preprocessing
from mnemos.lab.tasks.text import TextPreprocessing
from mnemos.lab.translation.translate import TranslationPreprocessing
from mnemos.lab.translation.translation_vocabulary import END, PAD, START, UNKNOWN
from mnemos.models.store import load
from mnemos.programs.folder import TARGETS, Target, check_new, export
from mnemos.types import InputError, JSONObject

from .exported_tokenizer import exported_tokenizers
from .files import Provenance, Result
from .model_card import model_card
from .recipe_files import UnreadableRecipeError, recipe_of_model

T = TypeVar("T", Result, Provenance)
FOLDER = "hf"  # of a run, where its checkpoint is by default
ABOUT = "Write a run's model as a checkpoint of Hugging Face Transformers, with its tokenizer and a model card, or as "
ABOUT += "programs of one step and of a prefill, state in and state out."
_TO = "hf: Hugging Face Transformers; onnx; onnxruntime: ONNX with ONNX Runtime's kernel of linear attention; torch: "
_TO += "torch.export (%(default)s)"


def command(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """`mnemos export`: read the arguments, write the folder and print where it is."""
    parser.add_argument("run", help="the folder of a finished run, or of its model")
    parser.add_argument("--to", choices=(FOLDER, *TARGETS), default=FOLDER, help=_TO)
    parser.add_argument("--out", metavar="DIR", help="the new folder; by default RUN and the name of the format")
    about = "with --to hf: also upload the folder to this repository of the Hub"
    parser.add_argument("--push", metavar="REPOSITORY", help=about)
    options = parser.parse_args(list(arguments))
    if options.to != FOLDER:
        if options.push:
            raise InputError(f"--push: expected --to {FOLDER} beside it, found --to {options.to}; leave one out")
        print(export_run_programs(options.run, options.to, options.out))
        return
    out = export_run(options.run, options.out)
    print(out)
    if options.push:
        print(push(out, options.push))


def export_run(run: str | Path, out: str | Path | None = None) -> Path:
    """Write the checkpoint of a finished run, or of the folder of a model, to a new or empty folder; returns it.

    The folder has config.json, model.safetensors, generation_config.json, modeling_mnemos.py (which imports this
    library), README.md with the run's own numbers and, for runs of text and translation, the tokenizer.
    Raises InputError for a run that is not finished, a model that reads no tokens, a damaged recipe.json, result.json
    or run.json, and a folder that is not empty.
    """
    run = Path(run)
    model = load(run)
    out = Path(out) if out is not None else run / FOLDER
    check_new(out)
    cls: Any = _architecture(model)
    about = read_preprocessing(run) if has_preprocessing(run) else None
    tokenizers = {} if about is None else exported_tokenizers(about)
    named: dict[str, Any] = {"segment": about.segment} if isinstance(about, TextPreprocessing) else {}
    if isinstance(about, TranslationPreprocessing):
        named = {"pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END, "decoder_start_token_id": START}
    elif tokenizers:
        # No padding token: where ids come without a mask, Transformers would take the start token for padding.
        named["bos_token_id"] = tokenizers[""].bos_token_id
    exported = cls.of(model, **named)
    if isinstance(about, TranslationPreprocessing):
        _search(exported.generation_config, about)
    recipe, result, made = _recipe(run), _of_run(run, Result), _of_run(run, Provenance)
    name = run.resolve().name
    with whole_or_none(out):
        exported.save_pretrained(out)
        for folder, tokenizer in tokenizers.items():
            tokenizer.model_max_length = getattr(exported.config, "max_position_embeddings", 10**30)
            tokenizer.save_pretrained(out / folder)
        write_text(
            out / "README.md", model_card(name, model.config, cls.__name__, recipe, result, made, bool(tokenizers))
        )
    return out


def export_run_programs(run: str | Path, to: Target, out: str | Path | None = None) -> Path:
    """`mnemos.export` of the model of a finished run, or of the folder of a model; returns the new folder.

    A run of text adds tokenizer.json, for the library tokenizers, which needs no PyTorch; a translation adds that of
    its target, if there is another. Raises InputError as `mnemos.export` does.
    """
    run = Path(run)
    model, out = load(run), Path(out) if out is not None else run / to
    check_new(out)
    tokenizers = exported_tokenizers(read_preprocessing(run)) if has_preprocessing(run) else {}
    with whole_or_none(out):
        export(model, out, to)
        for name, tokenizer in tokenizers.items():
            tokenizer.backend_tokenizer.save(str(out / f"{name or 'tokenizer'}.json"))
    return out


def push(folder: str | Path, repository: str, **named: Any) -> str:
    """Upload an exported folder to a repository of the Hub, which is made if it is missing; returns its address.

    named: of `huggingface_hub.HfApi.create_repo`, such as private=True or token="...".
    """
    libraries.transformers()
    from huggingface_hub import HfApi

    library = HfApi(token=named.pop("token", None))
    made = library.create_repo(repository, exist_ok=True, **named)
    library.upload_folder(repo_id=made.repo_id, folder_path=str(folder), commit_message="A model of mnemos")
    return str(made)


def _architecture(model: Any) -> Any:
    """The class of Transformers for a model."""
    from mnemos import hugging_face

    config: ModelConfig = model.config
    if config.inputs == "pairs":
        return hugging_face.MnemosForSeq2SeqLM
    if config.inputs == "tokens" and model.autoregressive:
        return hugging_face.MnemosForCausalLM
    head: Any = getattr(config, "head", None)
    if config.inputs == "tokens" and hasattr(head, "classes"):
        return hugging_face.MnemosForSequenceClassification
    raise InputError(
        f"export: expected a model that reads tokens, found {config.name!r}, which reads {config.inputs}; use the "
        "model's folder with mnemos.load"
    )


def _search(generation: Any, about: TranslationPreprocessing) -> None:
    """The beam search of the run: see `mnemos.lab.translation.translate.Decoding`."""
    generation.num_beams, generation.length_penalty = about.beams, about.length_penalty
    generation.early_stopping = True
    generation.suppress_tokens = [PAD, START, UNKNOWN]
    generation.max_new_tokens = about.longest + 1


def _of_run(run: Path, file: type[T]) -> T | None:
    """A file of a run; None for the folder of a model alone, which has none. Raises InputError for a damaged one."""
    try:
        return file.read(run) if file.exists(run) else None
    except InputError as error:
        raise _damaged(error) from None


def _recipe(run: Path) -> JSONObject:
    """The recipe of a run; {} for the folder of a model alone, and where model or data are not of this library.

    Raises InputError for a damaged one.
    """
    try:
        return to_dict(recipe_of_model(run))
    except UnreadableRecipeError as error:
        raise _damaged(error) from None
    except InputError:
        return {}


def _damaged(error: InputError) -> InputError:
    """The error of a damaged file, with what to do for an export."""
    found = str(error).rpartition(";")[0]
    return InputError(f"{found}; remove it to export the model without what it says of the run")
