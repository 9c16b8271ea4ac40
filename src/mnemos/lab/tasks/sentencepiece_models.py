"""Models of sentencepiece as a tokenizer.json of the library tokenizers, which a run keeps."""

from typing import Any

from mnemos.libraries import sentencepiece, tokenizers
from mnemos.types import InputError

_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6  # types of pieces
_UNIGRAM, _BPE = 1, 2  # types of models
_KEPT = "\ufdd1"  # no character: it stands for one that a normaliser must not change
LESS = "\ufdd0"  # no character: a unigram model has it for "<", because it would find "</s>" and "<0x41>" in a text


def converted(content: bytes, special: tuple[str, ...], mark: str, source: str) -> str:
    """The tokenizer.json that divides text as a sentencepiece model does (Kudo and Richardson 2018).

    content: that of the .model file. special: the first tokens; they stand for the model's unknown and control pieces,
    and its other pieces follow in their order, so their numbers are new. mark: the beginning of a word; source: the
    file's name, for errors. A special token that is written in a text is text, as in sentencepiece.
    The characters of a text are those of the model, except that a mark combines with the last letter of a character
    that stands for several (Ⅷ and a dot above).
    Unigram models choose the same pieces, or others that are equally probable. Those of byte-pair encoding merge in the
    order of the pieces' scores; where two ways to merge the same piece overlap, the library may choose the other one.
    Raises InputError for another file; for a model of words or characters, with pieces of a user's own, or with ▁
    behind words; and if sentencepiece is not installed.
    """
    proto: Any = sentencepiece()
    model = proto.ModelProto()
    try:
        model.ParseFromString(content)
    except Exception:  # protobuf raises classes of its own
        model.Clear()
    if not model.pieces:
        raise InputError(f"{source}: expected a model of sentencepiece, found another file; name another")
    kind, unknown = model.trainer_spec.model_type, special[-1]
    others = [piece.piece for piece in model.pieces if piece.type not in (_NORMAL, _UNKNOWN, _CONTROL, _BYTE)]
    if kind not in (_UNIGRAM, _BPE) or others or model.trainer_spec.treat_whitespace_as_suffix:
        found = f"the piece {others[0]!r}" if others else "another kind of model"
        raise InputError(
            f"{source}: expected a unigram or BPE model of sentencepiece without user-defined or unused pieces, "
            f"found {found}; train one without, or make a tokenizer with mnemos tokenizer"
        )
    library: Any = tokenizers()
    in_bytes = bool(model.trainer_spec.byte_fallback)
    normal = [piece.piece for piece in model.pieces if piece.type == _NORMAL]
    replaces = kind == _UNIGRAM and ("<" in normal or not in_bytes)
    pieces = [(name, 0.0) for name in special]
    for piece in model.pieces:
        if piece.type in (_NORMAL, _BYTE):
            name = piece.piece.replace("<", LESS) if replaces and piece.type == _NORMAL else piece.piece
            pieces.append((name, piece.score))
    if kind == _UNIGRAM:
        made = library.Tokenizer(library.models.Unigram(pieces, special.index(unknown), byte_fallback=in_bytes))
    else:
        ids = {piece: i for i, (piece, _) in enumerate(pieces)}
        merges = _merges(normal, ids)
        made = library.Tokenizer(
            library.models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=in_bytes)
        )
    made.normalizer = _normalizer(library, model.normalizer_spec, mark, replaces)
    splits = all(mark not in piece[1:] for piece in normal)  # else a piece goes on into the next word
    parts = [library.pre_tokenizers.Metaspace(mark, "never", splits)]
    if kind == _UNIGRAM and not replaces:  # "<" is unknown, and alone in its bytes
        parts.append(library.pre_tokenizers.Split("<", "isolated"))
    made.pre_tokenizer = library.pre_tokenizers.Sequence(parts)
    decoders = [library.decoders.ByteFallback()] if in_bytes else []
    decoders.append(library.decoders.Metaspace(mark, "always" if model.normalizer_spec.add_dummy_prefix else "never"))
    made.decoder = library.decoders.Sequence([*decoders, *([library.decoders.Replace(LESS, "<")] if replaces else [])])
    return str(made.to_str())


def _normalizer(library: Any, spec: Any, mark: str, replaces: bool) -> Any:
    """What the model does before it looks for pieces: its map of characters, spaces, and ▁ before the text."""
    normal = library.normalizers
    parts = _mapped(normal, spec, mark) if spec.precompiled_charsmap else []
    before = [normal.Prepend(" ")] if spec.add_dummy_prefix else []
    if spec.remove_extra_whitespaces:
        spaces = [normal.Replace(library.Regex(rf"\A +|[ {mark}]+\z"), ""), normal.Replace(library.Regex(" {2,}"), " ")]
        parts = [*parts, *spaces, *before]
    else:
        parts = [*before, *parts]  # a text that the map leaves nothing of is a space
    return normal.Sequence([*parts, *([normal.Replace("<", LESS)] if replaces else [])])


def _mapped(normal: Any, spec: Any, mark: str) -> list[Any]:
    """The model's map of characters. The library's own loses marks after a character that the map changes.

    So that it finds none, NFKC and lower case come first, without what the maps of sentencepiece leave as it is.
    """
    mapped = normal.Precompiled(spec.precompiled_charsmap)

    def but(kept: str, normaliser: Any) -> list[Any]:
        left = mapped.normalize_str(kept) == kept
        return [normal.Replace(kept, _KEPT), normaliser, normal.Replace(_KEPT, kept)] if left else [normaliser]

    parts = [normal.Replace(one, " ") for one in (mark, "\r") if mapped.normalize_str(one) == " "]
    parts += but("\uff5e", normal.NFKC()) if "nfkc" in spec.name else []
    parts += but("\u0130", normal.Lowercase()) if spec.name.endswith("_cf") else []
    return [*parts, mapped]


def _merges(pieces: list[str], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Every division of each piece into two others, in the order of the pieces, which is that of their scores."""
    parts = ((piece[:i], piece[i:]) for piece in pieces for i in range(1, len(piece)))
    return [(left, right) for left, right in parts if left in ids and right in ids]
