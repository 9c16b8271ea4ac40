"""`mnemos export RUN --to hf`: a run's model as a checkpoint of Transformers, with its tokenizer and a model card."""

import argparse
import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mnemos import libraries
from mnemos.atomic import write_text
from mnemos.config import ModelConfig, to_dict
from mnemos.data.text_preprocessing import TextPreprocessing
from mnemos.data.translation_preprocessing import TranslationPreprocessing
from mnemos.data.translation_vocabulary import END, PAD, START, UNKNOWN
from mnemos.evaluate.predict import has_preprocessing, read_preprocessing
from mnemos.models.store import load
from mnemos.types import InputError, JSONObject

from .exported_tokenizer import exported_tokenizers
from .model_card import model_card
from .recipe_files import recipe_of_model
from .run_files import read_about, read_result

FOLDER = "hf"  # of a run, where its checkpoint is by default
ABOUT = "Write a run's model as a checkpoint of Hugging Face Transformers, with its tokenizer and a model card."


def command(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """`mnemos export`: read the arguments, write the checkpoint and print where it is."""
    parser.add_argument("run", help="the folder of a finished run, or of its model")
    parser.add_argument("--to", choices=("hf",), default="hf", help="hf: Hugging Face Transformers")
    parser.add_argument("--out", metavar="DIR", help=f"the checkpoint's folder; by default RUN/{FOLDER}")
    parser.add_argument("--push", metavar="REPOSITORY", help="also upload the folder to this repository of the Hub")
    options = parser.parse_args(list(arguments))
    out = export_run(options.run, options.out)
    print(out)
    if options.push:
        print(push(out, options.push))


def export_run(run: str | Path, out: str | Path | None = None) -> Path:
    """Write the checkpoint of a finished run, or of the folder of a model, to a new or empty folder; returns it.

    The folder has config.json, model.safetensors, generation_config.json, modeling_mnemos.py (which imports this
    library), README.md with the run's own numbers and, for runs of text and translation, the tokenizer.
    Raises InputError for a run that is not finished, a model that reads no tokens, and a folder that is not empty.
    """
    run = Path(run)
    model = load(run)
    out = Path(out) if out is not None else run / FOLDER
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: expected a new or empty folder, found another; name one with --out, or remove it")
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
    recipe = _found(lambda: to_dict(recipe_of_model(run)))
    found = {"recipe": recipe, "result": _found(lambda: read_result(run)), "run": _found(lambda: read_about(run))}
    name = run.resolve().name
    with _whole_or_none(out):
        exported.save_pretrained(out)
        for folder, tokenizer in tokenizers.items():
            tokenizer.model_max_length = getattr(exported.config, "max_position_embeddings", 10**30)
            tokenizer.save_pretrained(out / folder)
        write_text(out / "README.md", model_card(name, model.config, cls.__name__, found, bool(tokenizers)))
    return out


@contextlib.contextmanager
def _whole_or_none(folder: Path) -> Iterator[None]:
    """If the block raises, what it wrote to a new or empty folder is removed, so that it can be written again."""
    existed = folder.exists()
    try:
        yield
    except BaseException:
        for path in folder.iterdir() if folder.is_dir() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not existed and folder.is_dir():
            folder.rmdir()
        raise


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
    """The beam search of the run: see `mnemos.data.translating.Decoding`."""
    generation.num_beams, generation.length_penalty = about.beams, about.length_penalty
    generation.early_stopping = True
    generation.suppress_tokens = [PAD, START, UNKNOWN]
    generation.max_new_tokens = about.longest + 1


def _found(read: Any) -> JSONObject:
    """What a function reads from a run; {} for the folder of a model alone, which has none of it."""
    try:
        found: JSONObject = read()
    except InputError:
        return {}
    return found
