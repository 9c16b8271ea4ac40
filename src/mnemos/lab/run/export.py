"""`mnemos export RUN`: a run's model as a checkpoint of Transformers, or as programs of torch.export or ONNX."""

from pathlib import Path
from typing import Any

from mnemos import libraries
from mnemos.atomic import whole_or_none, write_text
from mnemos.config import ModelConfig, to_dict
from mnemos.lab.evaluate.predict import has_preprocessing, read_preprocessing
from mnemos.lab.tasks.preprocessing import Preprocessing
from mnemos.lab.tasks.text import TextPreprocessing
from mnemos.lab.tasks.vocabulary import END as LINE_END
from mnemos.lab.tasks.vocabulary import SubWords, Vocabulary, Words
from mnemos.lab.translation.translate import TranslationPreprocessing
from mnemos.lab.translation.translation_vocabulary import END, PAD, SPECIAL, START, UNKNOWN
from mnemos.models.store import load
from mnemos.programs.export import Target, check_new, export
from mnemos.types import InputError, JSONObject

from .files import Provenance, Result
from .recipe_files import recipe_of_model

HF = "hf"  # of a run, where its checkpoint is by default
BEGIN = "<|start|>"  # the token before a document, where the vocabulary has one of its own

# Of each class: the Auto class of Transformers, and what the Hub calls its work.
_CLASSES = {
    "MnemosForCausalLM": ("AutoModelForCausalLM", "text-generation"),
    "MnemosForSeq2SeqLM": ("AutoModelForSeq2SeqLM", "translation"),
    "MnemosForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
}


def export_run(run: str | Path, out: str | Path | None = None) -> Path:
    """Write the checkpoint of a finished run, or of the folder of a model, to a new or empty folder; returns it.

    The folder has the model with its modeling_mnemos.py, README.md with the run's own numbers and, for text and
    translation, the tokenizer. Raises InputError for a run that is not finished, a model that reads no tokens, damaged
    files of the run, and a folder that is not empty.
    """
    run = Path(run)
    model = load(run)
    out = Path(out) if out is not None else run / HF
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
        generation = exported.generation_config  # the beam search of the run: `lab.translation.translate.beam_config`
        generation.num_beams, generation.length_penalty = about.beams, about.length_penalty
        generation.early_stopping = True
        generation.suppress_tokens = [PAD, START, UNKNOWN]
        generation.max_new_tokens = about.longest + 1
    # The folder of a model alone has no files of a run; a model or data of another package have no recipe here.
    result = Result.read(run) if Result.exists(run) else None
    made = Provenance.read(run) if Provenance.exists(run) else None
    try:
        recipe = to_dict(recipe_of_model(run))
    except InputError:
        recipe = {}
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

    Text and translation add tokenizer.json, for the library tokenizers, which needs no PyTorch, and that of another
    target. Raises InputError as `mnemos.export` does.
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


def _architecture(model: Any) -> Any:
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
        f"export: expected a model of the next token, of translations or with model.head.classes, found "
        f"{config.name!r}, which reads {config.inputs}; use the model's folder with mnemos.load"
    )


def exported_tokenizers(about: Preprocessing) -> dict[str, Any]:
    """Tokenizers of Transformers by the folder in a checkpoint that they belong to; "" is the checkpoint's own.

    Text gets the start token in front and is padded on the left, to be continued; a source of a translation has the end
    token and the padding behind. {} for a task that reads no text. Raises InputError for a missing library.
    """
    if isinstance(about, TextPreprocessing):
        return {"": _of_text(about.vocabulary())}
    if isinstance(about, TranslationPreprocessing):
        found = {"": _of_translation(about.tokenizer)}
        if about.target_tokenizer:
            found["target_tokenizer"] = _of_translation(about.target_tokenizer)
        return found
    return {}


def _of_text(vocabulary: Vocabulary) -> Any:
    library: Any = libraries.tokenizers()
    named: dict[str, Any] = {"bos_token": BEGIN, "pad_token": BEGIN}
    start = BEGIN
    if isinstance(vocabulary, Words):
        unknown = None if vocabulary.unknown is None else vocabulary.list[vocabulary.unknown]
        words = {word: i for i, word in enumerate(vocabulary.list)}
        made = library.Tokenizer(library.models.WordLevel(words, **({"unk_token": unknown} if unknown else {})))
        made.normalizer = library.normalizers.Replace("\n", f" {LINE_END} ")
        made.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
        # The WordPiece decoder puts a space before each word but the first, and none before words with the prefix. No
        # word begins with this one.
        spaced = library.decoders.WordPiece(prefix="\0", cleanup=False)
        ends = [library.decoders.Replace(end, "\n") for end in (f" {LINE_END}", LINE_END)]
        made.decoder = library.decoders.Sequence([spaced, *ends])
        # Padding is not <eos>, which is a line feed in the text. Without an unknown word no word is special: decoding
        # leaves such words out.
        start, named = LINE_END, {} if unknown is None else dict.fromkeys(("unk_token", "pad_token"), unknown)
    elif isinstance(vocabulary, SubWords):
        made = library.Tokenizer.from_str(vocabulary.content)
        made.no_truncation()
        made.no_padding()
        named["split_special_tokens"] = False  # as the run read the file
    else:  # byte b is token b; byte 0, which text does not hold, is the start token
        letters = {letter: b for b, letter in enumerate(_printable_bytes()) if b} | {BEGIN: 0}
        made = library.Tokenizer(library.models.BPE(letters, []))
        made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = library.decoders.ByteLevel()
    if not isinstance(vocabulary, Words):
        made.add_special_tokens([library.AddedToken(BEGIN, special=True, normalized=False)])
    return _wrapped(made, f"{start} $A", {start: vocabulary.start}, padding_side="left", **named)


def _printable_bytes() -> list[str]:
    """The character by which the library writes each byte, as GPT-2 does: itself if it is printable Latin-1."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def _of_translation(content: str) -> Any:
    library: Any = libraries.tokenizers()
    made = library.Tokenizer.from_str(content)
    made.no_truncation()
    made.no_padding()
    made.encode_special_tokens = True
    made.add_special_tokens([library.AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    names = {"pad_token": PAD, "bos_token": START, "eos_token": END, "unk_token": UNKNOWN}
    special = {name: SPECIAL[i] for name, i in names.items()}
    return _wrapped(made, f"$A {SPECIAL[END]}", {SPECIAL[END]: END}, padding_side="right", **special)


def _wrapped(made: Any, template: str, tokens: dict[str, int], **named: Any) -> Any:
    """A tokenizer of Transformers. template: what it puts around a text, with the numbers of those tokens."""
    processors: Any = libraries.tokenizers().processors
    made.post_processor = processors.TemplateProcessing(single=template, special_tokens=list(tokens.items()))
    fast: Any = libraries.transformers().PreTrainedTokenizerFast
    return fast(
        tokenizer_object=made,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **{"split_special_tokens": True, **named},  # "</s>" in a text is text
    )


def model_card(
    name: str,
    config: ModelConfig,
    architecture: str,
    recipe: JSONObject,
    result: Result | None,
    run: Provenance | None,
    reads: bool,
) -> str:
    """README.md of a checkpoint. recipe: JSON, or {}. reads: whether it has a tokenizer. No folder of the data is
    named.
    """
    # --- what the Hub reads, and how the checkpoint is used ---
    auto, pipeline = _CLASSES[architecture]
    tag = f"\npipeline_tag: {pipeline}" if reads else ""
    attention = getattr(config, "attention", None)
    cls = f"`{config.name}`" + (f" with the attention `{attention.name}`" if attention is not None else "")
    code = [
        f"from transformers import {auto}{', AutoTokenizer' if reads else ''}",
        "",
        'folder = "."  # that of this file',
        f"model = {auto}.from_pretrained(folder, trust_remote_code=True)",
    ]
    if reads:
        code += ["tokenizer = AutoTokenizer.from_pretrained(folder)", 'inputs = tokenizer("...", return_tensors="pt")']
        if architecture != "MnemosForSequenceClassification":
            code.append("tokens = model.generate(**inputs, max_new_tokens=100)")
    parts = [
        f"---\nlibrary_name: transformers\ntags:\n- mnemos{tag}\n---",
        f"# {name}",
        f"A model of the library mnemos: {cls}.",
        "It needs the library mnemos; in a clone of it:\n\n```console\npip install '.[hf]'\n```",
        "\n".join(["```python", *code, "```"]),
        "The file modeling_mnemos.py of this checkpoint only imports that library. After `import mnemos.hugging_face` "
        "and `mnemos.hugging_face.register()` it is loaded without `trust_remote_code`.",
    ]

    # --- its numbers, and where it comes from ---
    if result is not None:
        scores = [result.valid, result.test or {}]
        rows = [f"{split} ({result.scored_rows.get(split, 0):,} rows)" for split in ("valid", "test")]
        table = ["| | " + " | ".join(rows) + " |", "|---|---|---|"]
        for metric in result.scores:
            values = (f"{of[metric]:.6g}" if metric in of else "" for of in scores)
            table.append(f"| {metric} | {' | '.join(values)} |")
        table += [f"| {guess} | | {value:.6g} |" for guess, value in result.reference.items()]
        parts += ["## Numbers", "\n".join(table)]
    if run is not None:
        origin = [f"Recipe `{recipe.get('name')}`, seed {run.seed}, {result.steps if result else 0:,} updates."]
        if run.data.get("sha256"):
            names, count = [str(one["name"]) for one in run.data.get("files") or ()][:5], run.data["count"]
            files = ", ".join([*names, *(["…"] if count > len(names) else [])])
            origin.append(f"Data: {count:,} files ({files}); SHA-256 {run.data['sha256']}.")
        origin.append(
            f"Code: mnemos {run.versions.get('mnemos')}, commit {run.commit}, PyTorch {run.versions.get('torch')}, "
            f"{run.threads} threads of {run.cpu}, device {run.device}."
        )
        parts += ["## Origin", "\n".join(origin)]
    return "\n\n".join(parts) + "\n"
