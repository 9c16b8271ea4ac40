"""Models of sentencepiece as a tokenizer.json of the library tokenizers, which a run keeps."""

from typing import Any

from mnemos.libraries import sentencepiece, tokenizers
from mnemos.types import InputError

_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6  # types of pieces
_UNIGRAM, _BPE = 1, 2  # types of models
_FOLDED = "_cf"  # the names of normalisations that fold the case end with it


def converted(content: bytes, special: tuple[str, ...], mark: str, source: str) -> str:
    """The tokenizer.json that divides text as a sentencepiece model does (Kudo and Richardson 2018).

    content: that of the .model file. special: the first tokens; they stand for the model's unknown and control pieces,
    and its other pieces follow in their order, so their numbers are new. mark: the beginning of a word; source: the
    file's name, for errors. A text in which a special token is written is divided there.
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
    pieces = [(name, 0.0) for name in special]
    pieces += [(piece.piece, piece.score) for piece in model.pieces if piece.type in (_NORMAL, _BYTE)]
    in_bytes = bool(model.trainer_spec.byte_fallback)
    if kind == _UNIGRAM:
        made = library.Tokenizer(library.models.Unigram(pieces, special.index(unknown), byte_fallback=in_bytes))
    else:
        ids = {piece: i for i, (piece, _) in enumerate(pieces)}
        merges = _merges([piece.piece for piece in model.pieces if piece.type == _NORMAL], ids)
        made = library.Tokenizer(
            library.models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=in_bytes)
        )
    made.normalizer = _normalizer(library, model.normalizer_spec)
    first = "always" if model.normalizer_spec.add_dummy_prefix else "never"
    words = library.pre_tokenizers.Metaspace(mark, first, bool(model.trainer_spec.split_by_whitespace))
    # A unigram model would find the special tokens in text.
    inside = "|".join(name.removeprefix("<") for name in special)
    split = library.pre_tokenizers.Split(library.Regex(f"<(?={inside})"), "isolated")
    made.pre_tokenizer = library.pre_tokenizers.Sequence([words, split])
    joined = library.decoders.Metaspace(mark, first)
    made.decoder = library.decoders.Sequence([library.decoders.ByteFallback(), joined]) if in_bytes else joined
    return str(made.to_str())


def _normalizer(library: Any, spec: Any) -> Any:
    parts = [library.normalizers.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []
    if spec.remove_extra_whitespaces:
        parts += [library.normalizers.Replace(library.Regex(" {2,}"), " "), library.normalizers.Strip()]
    if spec.name.endswith(_FOLDED):
        parts.append(library.normalizers.Lowercase())  # changes nothing, and says that the case is folded
    return library.normalizers.Sequence(parts)


def _merges(pieces: list[str], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Every division of each piece into two others, in the order of the pieces, which is that of their scores."""
    parts = ((piece[:i], piece[i:]) for piece in pieces for i in range(1, len(piece)))
    return [(left, right) for left, right in parts if left in ids and right in ids]
