"""mnemos: memory for transformers. Every layer and model is called as `y, state = layer(x, state)`.

The files beside this one are the base. `types`, to be read first, says what a state is and what layers and models
declare; `config` and `registry` are settings and the names that they have in files and on the command line; `atomic`,
`tree_file` and `state_file` write files that are whole or absent: any, nested values, states; `_compat` and `libraries`
hold what is used of the private parts of PyTorch and of other libraries; `face` is how packages list their names.
Names are imported when they are first used, so `import mnemos` alone does not load torch.
"""

from typing import TYPE_CHECKING

from .face import lazy

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import attention as attention
    from . import generate as generate
    from . import hosts as hosts
    from . import hugging_face as hugging_face
    from . import lab as lab
    from . import libraries as libraries
    from . import memory as memory
    from . import models as models
    from . import native as native
    from . import ops as ops
    from . import programs as programs
    from . import registry as registry
    from . import testing as testing
    from . import trainers as trainers
    from . import types as types
    from .attention.compressive import CompressiveConfig as CompressiveConfig
    from .attention.linear import LinearConfig as LinearConfig
    from .attention.recurrent import DeltaConfig as DeltaConfig
    from .attention.recurrent import GatedDeltaConfig as GatedDeltaConfig
    from .attention.recurrent import GLAConfig as GLAConfig
    from .attention.recurrent import KimiDeltaConfig as KimiDeltaConfig
    from .attention.recurrent import Mamba2Config as Mamba2Config
    from .attention.recurrent import RetentionConfig as RetentionConfig
    from .attention.relative import RelativeConfig as RelativeConfig
    from .attention.softmax import SoftmaxConfig as SoftmaxConfig
    from .config import AttentionConfig as AttentionConfig
    from .config import ModelConfig as ModelConfig
    from .errors import InputError as InputError
    from .generate.beam import BeamConfig as BeamConfig
    from .generate.beam import beam_search as beam_search
    from .generate.fused import fused_step as fused_step
    from .generate.prefix import PrefixTree as PrefixTree
    from .generate.stream import Stream as Stream
    from .hosts.adapters import register_host as register_host
    from .hosts.attach import cache as cache
    from .hosts.attach import uncache as uncache
    from .hosts.linearise import linearise as linearise
    from .hosts.linearise import unlinearise as unlinearise
    from .hosts.ranking import rank_attentions as rank_attentions
    from .hosts.remembering import remember as remember
    from .hugging_face import fast as fast
    from .hugging_face import functional as functional
    from .lab.look.viewer import look as look
    from .lab.papers.baselines.bigbird import BlockSparseConfig as BlockSparseConfig
    from .lab.papers.baselines.reformer import ReformerConfig as ReformerConfig
    from .lab.run.fit import fit as fit
    from .lab.run.recipe import OptimConfig as OptimConfig
    from .lab.run.recipe import Recipe as Recipe
    from .lab.run.recipe import TrainConfig as TrainConfig
    from .lab.run.recipe import recipe as recipe
    from .lab.tasks.batch import Batch as Batch
    from .lab.tasks.metrics import CorpusMetric as CorpusMetric
    from .lab.tasks.metrics import SumMetric as SumMetric
    from .lab.tasks.task import DataConfig as DataConfig
    from .lab.tasks.task import Sampling as Sampling
    from .lab.tasks.task import Task as Task
    from .lab.translation.translate import TrainedTranslator as TrainedTranslator
    from .lab.translation.translate import Translation as Translation
    from .lab.translation.translate import translate as translate
    from .lab.vision.detect import detect as detect
    from .memory.associations import AssociationsConfig as AssociationsConfig
    from .memory.gated_cache import GRC as GRC
    from .memory.slots import SlotsConfig as SlotsConfig
    from .memory.tokens import TokensConfig as TokensConfig
    from .memory_replay import replay as replay
    from .models.encoder_decoder import EncoderDecoder as EncoderDecoder
    from .models.encoder_decoder import EncoderDecoderConfig as EncoderDecoderConfig
    from .models.encoder_decoder import Pair as Pair
    from .models.lstm import LSTM as LSTM
    from .models.lstm import LSTMConfig as LSTMConfig
    from .models.memformer import Memformer as Memformer
    from .models.memformer import MemformerConfig as MemformerConfig
    from .models.segments import ARMT as ARMT
    from .models.segments import RMT as RMT
    from .models.segments import ARMTConfig as ARMTConfig
    from .models.segments import MemoryTransformer as MemoryTransformer
    from .models.segments import MemoryTransformerConfig as MemoryTransformerConfig
    from .models.segments import RMTConfig as RMTConfig
    from .models.store import load as load
    from .models.store import save as save
    from .models.transformer import HeadConfig as HeadConfig
    from .models.transformer import Transformer as Transformer
    from .models.transformer import TransformerConfig as TransformerConfig
    from .ops.positions import Rotary as Rotary
    from .programs.export import export as export
    from .registry import register as register
    from .state_file import load_state as load_state
    from .state_file import save_state as save_state
    from .types import State as State
    from .types import add_auxiliary_loss as add_auxiliary_loss
    from .types import collect_auxiliary_losses as collect_auxiliary_losses
    from .types import detach as detach
    from .types import join as join
    from .types import reset as reset
    from .types import select as select
else:
    __getattr__, __dir__, __all__ = lazy(__name__, "__version__")
