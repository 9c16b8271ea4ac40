"""Transcriptions of recordings by a model, with the spoken tokens."""

from collections.abc import Iterable, Sequence

from torch import nn

from mnemos.lab.speech.models.ctc import Transcriber
from mnemos.lab.tasks.batch import Batch, each, to_model
from mnemos.modes import evaluating

SHOWN = 8


def transcriptions(
    model: nn.Module, batches: Iterable[Batch], names: Sequence[str], most: int = SHOWN
) -> list[dict[str, str]]:
    """Transcribe the first row of up to `most` evenly spaced batches: [{"said": spoken, "heard": transcribed tokens}].

    names: the tokens' names. Returns [] for a model that is not a `Transcriber`. The model runs in eval mode; its mode
    is restored.
    """
    if not isinstance(model, Transcriber):
        return []
    found = []
    with evaluating(model):
        for batch in batches:
            one = to_model(each(batch, lambda x: x[:1]), model)
            heard = model.transcribe(one.inputs, one.mask)[0]
            said = [token for token in one.targets[0].tolist() if token >= 0]
            found.append({key: " ".join(names[t] for t in row) for key, row in (("said", said), ("heard", heard))})
    shown = min(most, len(found))
    return [found[i * (len(found) - 1) // max(1, shown - 1)] for i in range(shown)]
