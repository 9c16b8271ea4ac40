"""Whole models: `logits, state = model(x, state)`.

Each file is one model, read from top to bottom: settings, parts, the model, whose `forward` is the whole computation.
Read `transformer.py` first: the block of all models, and any attention as a language model or a classifier. `shared.py`
has what else models share. `encoder_decoder.py` is translation. `segments.py` has what all models of segments
share, and those with memory tokens (Memory Transformer, RMT, ARMT); `memformer.py` is an encoder that writes slots
beside a decoder; `lstm.py` the baseline. `store.py` is a model on disk.
"""

from typing import TYPE_CHECKING

from mnemos.face import lazy

if TYPE_CHECKING:
    from .encoder_decoder import EncoderDecoder as EncoderDecoder
    from .encoder_decoder import EncoderDecoderConfig as EncoderDecoderConfig
    from .encoder_decoder import EncoderDecoderState as EncoderDecoderState
    from .encoder_decoder import Pair as Pair
    from .lstm import LSTM as LSTM
    from .lstm import LSTMConfig as LSTMConfig
    from .lstm import LSTMState as LSTMState
    from .memformer import Memformer as Memformer
    from .memformer import MemformerConfig as MemformerConfig
    from .memformer import MemformerState as MemformerState
    from .segments import ARMT as ARMT
    from .segments import RMT as RMT
    from .segments import ARMTConfig as ARMTConfig
    from .segments import MemoryTransformer as MemoryTransformer
    from .segments import MemoryTransformerConfig as MemoryTransformerConfig
    from .segments import RMTConfig as RMTConfig
    from .segments import SegmentState as SegmentState
    from .transformer import HeadConfig as HeadConfig
    from .transformer import Transformer as Transformer
    from .transformer import TransformerConfig as TransformerConfig
    from .transformer import TransformerState as TransformerState
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
