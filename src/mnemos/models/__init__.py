"""Whole models: logits, state = model(x, state)."""

from typing import TYPE_CHECKING

from mnemos.face import lazy

if TYPE_CHECKING:  # imported when they are first asked for; see `mnemos.face`
    from .armt import ARMT as ARMT
    from .armt import ARMTConfig as ARMTConfig
    from .encoder_decoder import EncoderDecoder as EncoderDecoder
    from .encoder_decoder import EncoderDecoderConfig as EncoderDecoderConfig
    from .encoder_decoder import EncoderDecoderState as EncoderDecoderState
    from .encoder_decoder import Pair as Pair
    from .lstm import LSTM as LSTM
    from .lstm import LSTMConfig as LSTMConfig
    from .lstm import LSTMState as LSTMState
    from .marian import from_marian as from_marian
    from .memformer import Memformer as Memformer
    from .memformer import MemformerConfig as MemformerConfig
    from .memformer import MemformerState as MemformerState
    from .memory_tokens import RMT as RMT
    from .memory_tokens import MemoryTransformer as MemoryTransformer
    from .memory_tokens import MemoryTransformerConfig as MemoryTransformerConfig
    from .memory_tokens import RMTConfig as RMTConfig
    from .segments import SegmentState as SegmentState
    from .transformer import HeadConfig as HeadConfig
    from .transformer import Transformer as Transformer
    from .transformer import TransformerConfig as TransformerConfig
    from .transformer import TransformerState as TransformerState
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
