"""What a model that writes down speech heard, beside what was said."""

from collections.abc import Iterable, Sequence

from torch import nn

from mnemos.models.ctc import Transcriber
from mnemos.modes import evaluating

from .batch import Batch, each, fed

SHOWN = 8


def transcriptions(
    model: nn.Module, batches: Iterable[Batch], names: Sequence[str], most: int = SHOWN
) -> list[dict[str, str]]:
    """[{"said", "heard"}] of the first row of up to `most` batches, spread evenly over all; tokens by their names.

    [] for a model that writes nothing down. In eval mode; the model is then as it was.
    """
    if not isinstance(model, Transcriber):
        return []
    found = []
    with evaluating(model):
        for batch in batches:
            one = fed(each(batch, lambda x: x[:1]), model)
            heard = model.transcribe(one.inputs, one.mask)[0]
            said = [token for token in one.targets[0].tolist() if token >= 0]
            found.append({key: " ".join(names[t] for t in row) for key, row in (("said", said), ("heard", heard))})
    shown = min(most, len(found))
    return [found[i * (len(found) - 1) // max(1, shown - 1)] for i in range(shown)]
