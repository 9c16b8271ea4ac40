"""The vocabulary of a run as a tokenizer of Transformers: the same tokens, in the library's own classes."""

from typing import Any

from mnemos import libraries
from mnemos.lab.tasks.preprocessing import Preprocessing
from mnemos.lab.tasks.text import TextPreprocessing
from mnemos.lab.tasks.vocabulary import END as LINE_END
from mnemos.lab.tasks.vocabulary import SubWords, Vocabulary, Words
from mnemos.lab.translation.translate import TranslationPreprocessing
from mnemos.lab.translation.translation_vocabulary import END, PAD, SPECIAL, START, UNKNOWN

BEGIN = "<|start|>"  # the token before a document, where the vocabulary has one of its own


def exported_tokenizers(about: Preprocessing) -> dict[str, Any]:
    """Tokenizers of Transformers by the folder in a checkpoint that they belong to; "" is the checkpoint's own.

    Text gets the start token in front, as the run read its documents; a source of a translation the end token behind.
    Tokens are those of the run. Padding is on the left for text, which a model continues, and on the right for sources.
    {} for a task that reads no text. Raises InputError where the library tokenizers or transformers is missing.
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
    named: dict[str, Any]
    if isinstance(vocabulary, Words):
        made, start, named = _words(library, vocabulary), LINE_END, {}
        if vocabulary.unknown is not None:  # else no word is special: decoding leaves such words out
            # Padding is not <eos>, which is a line feed in the text.
            named = dict.fromkeys(("unk_token", "pad_token"), vocabulary.list[vocabulary.unknown])
    elif isinstance(vocabulary, SubWords):
        made, start = library.Tokenizer.from_str(vocabulary.content), BEGIN
        made.no_truncation()
        made.no_padding()
        made.add_special_tokens([library.AddedToken(BEGIN, special=True, normalized=False)])
        named = {"bos_token": BEGIN, "pad_token": BEGIN, "split_special_tokens": False}  # as the run read the file
    else:
        made, start, named = _bytes(library), BEGIN, {"bos_token": BEGIN, "pad_token": BEGIN}
    made.post_processor = _template(library, f"{start} $A", {start: vocabulary.start})
    return _wrapped(made, padding_side="left", **named)


def _bytes(library: Any) -> Any:
    """Byte b is token b. Byte 0, which text does not hold, is the start token."""
    letters = dict(zip(_printable_bytes(), range(256), strict=True))
    vocabulary = {letter: b for letter, b in letters.items() if b} | {BEGIN: 0}
    made = library.Tokenizer(library.models.BPE(vocabulary, []))
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = library.decoders.ByteLevel()
    made.add_special_tokens([library.AddedToken(BEGIN, special=True, normalized=False)])
    return made


def _printable_bytes() -> list[str]:
    """The character by which the library writes each byte, as GPT-2 does: itself if it is printable Latin-1."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def _words(library: Any, vocabulary: Words) -> Any:
    unknown = None if vocabulary.unknown is None else vocabulary.list[vocabulary.unknown]
    words = {word: i for i, word in enumerate(vocabulary.list)}
    made = library.Tokenizer(library.models.WordLevel(words, **({"unk_token": unknown} if unknown else {})))
    made.normalizer = library.normalizers.Replace("\n", f" {LINE_END} ")
    made.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    # The WordPiece decoder puts a space before each word but the first, and none before words with the prefix. No word
    # begins with this one.
    spaced = library.decoders.WordPiece(prefix="\0", cleanup=False)
    ends = [library.decoders.Replace(end, "\n") for end in (f" {LINE_END}", LINE_END)]
    made.decoder = library.decoders.Sequence([spaced, *ends])
    return made


def _of_translation(content: str) -> Any:
    library: Any = libraries.tokenizers()
    made = library.Tokenizer.from_str(content)
    made.no_truncation()
    made.no_padding()
    made.encode_special_tokens = True
    names = [library.AddedToken(name, special=True, normalized=False) for name in SPECIAL]
    made.add_special_tokens(names)
    made.post_processor = _template(library, f"$A {SPECIAL[END]}", {SPECIAL[END]: END})
    special = {"pad_token": PAD, "bos_token": START, "eos_token": END, "unk_token": UNKNOWN}
    return _wrapped(made, padding_side="right", **{name: SPECIAL[i] for name, i in special.items()})


def _template(library: Any, single: str, tokens: dict[str, int]) -> Any:
    return library.processors.TemplateProcessing(single=single, special_tokens=list(tokens.items()))


def _wrapped(made: Any, **named: Any) -> Any:
    fast: Any = libraries.transformers().PreTrainedTokenizerFast
    return fast(
        tokenizer_object=made,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **{"split_special_tokens": True, **named},  # "</s>" in a text is text
    )
