"""Text that a trained model writes after real beginnings, for reports."""

import codecs
import unicodedata
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from mnemos.generate.stream import Stream
from mnemos.modes import evaluating
from mnemos.types import RecurrentModel

from .vocabulary import Bytes, Vocabulary

TEXTS, GIVEN, WRITTEN = 3, 120, 280  # documents, and tokens of each that are given and written
TEMPERATURE = 0.8


def written_texts(
    model: nn.Module, documents: Sequence[Sequence[int] | NDArray[np.integer]], vocabulary: Vocabulary | None = None
) -> list[dict[str, str]]:
    """What the model writes after the first tokens of some documents: [{"given", "wrote"}]. Bytes by default.

    The documents are evenly spaced among those of at least `GIVEN` tokens. Returns [] for a model that cannot write (it
    is not autoregressive or has no state), and where no document is long enough. The same weights write the same text.
    Cost: `WRITTEN` steps of the model, with `TEXTS` rows.
    """
    long = [document for document in documents if len(document) >= GIVEN]
    writes = isinstance(model, RecurrentModel) and model.autoregressive and model.state_kind != "none"
    if not long or not writes:
        return []
    count = min(TEXTS, len(long))
    chosen = [[int(token) for token in long[i * (len(long) - 1) // max(1, count - 1)][:GIVEN]] for i in range(count)]
    vocabulary = vocabulary or Bytes()
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(0)
    with evaluating(model):
        stream = Stream(model).prefill(torch.tensor([[vocabulary.start, *text] for text in chosen], device=device))
        tokens, _ = stream.generate(WRITTEN, temperature=TEMPERATURE, generator=generator)
    decode = vocabulary.decode
    return [_decoded(decode(given), decode(row)) for given, row in zip(chosen, tokens.tolist(), strict=True)]


def _decoded(given: bytes, wrote: bytes) -> dict[str, str]:
    """The two parts as text. A character that is cut between them belongs to the second one."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return {"given": _visible(decoder.decode(given)), "wrote": _visible(decoder.decode(wrote, final=True))}


def _visible(text: str) -> str:
    """Control characters as �, except line ends and tabs; Windows' line ends become plain ones."""
    text = text.replace("\r\n", "\n")
    return "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)
