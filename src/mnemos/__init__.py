"""mnemos: memory for transformers. Every layer and model is called as `y, state = layer(x, state)`.

Names are imported when they are first used, so `import mnemos` alone does not load torch.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names for type checkers, which do not run `__getattr__`
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
    from .attention.block_sparse import BlockSparseConfig as BlockSparseConfig
    from .attention.compressive import CompressiveConfig as CompressiveConfig
    from .attention.decayed import GLAConfig as GLAConfig
    from .attention.decayed import RetentionConfig as RetentionConfig
    from .attention.delta import DeltaConfig as DeltaConfig
    from .attention.delta import GatedDeltaConfig as GatedDeltaConfig
    from .attention.delta import KimiDeltaConfig as KimiDeltaConfig
    from .attention.linear import LinearConfig as LinearConfig
    from .attention.mamba2 import Mamba2Config as Mamba2Config
    from .attention.reformer import ReformerConfig as ReformerConfig
    from .attention.relative import RelativeConfig as RelativeConfig
    from .attention.softmax import SoftmaxConfig as SoftmaxConfig
    from .config import AttentionConfig as AttentionConfig
    from .config import DataConfig as DataConfig
    from .config import ModelConfig as ModelConfig
    from .errors import InputError as InputError
    from .generate.beam import BeamConfig as BeamConfig
    from .generate.beam import beam_search as beam_search
    from .generate.fused import fused_step as fused_step
    from .generate.prefix_tree import PrefixTree as PrefixTree
    from .generate.stream import Stream as Stream
    from .hosts.attach import cache as cache
    from .hosts.attach import uncache as uncache
    from .hosts.known_hosts import register_host as register_host
    from .hosts.linearising import linearise as linearise
    from .hosts.linearising import unlinearise as unlinearise
    from .hosts.remembering import remember as remember
    from .hugging_face import fast as fast
    from .hugging_face import functional as functional
    from .lab.look.viewer import look as look
    from .lab.run.fit import fit as fit
    from .lab.run.recipe import OptimConfig as OptimConfig
    from .lab.run.recipe import Recipe as Recipe
    from .lab.run.recipe import TrainConfig as TrainConfig
    from .lab.run.recipe import recipe as recipe
    from .lab.tasks.batch import Batch as Batch
    from .lab.tasks.metrics import CorpusMetric as CorpusMetric
    from .lab.tasks.metrics import SumMetric as SumMetric
    from .lab.tasks.task import Sampling as Sampling
    from .lab.tasks.task import Task as Task
    from .lab.translation.translate import TrainedTranslator as TrainedTranslator
    from .lab.translation.translate import Translation as Translation
    from .lab.translation.translate import translate as translate
    from .lab.vision.detect import TrainedDetector as TrainedDetector
    from .lab.vision.detect import detect as detect
    from .memory.associations import AssociationsConfig as AssociationsConfig
    from .memory.grc import GRC as GRC
    from .memory.memory_tokens import TokensConfig as TokensConfig
    from .memory.slots import SlotsConfig as SlotsConfig
    from .memory_replay import replay as replay
    from .models.armt import ARMT as ARMT
    from .models.armt import ARMTConfig as ARMTConfig
    from .models.encoder_decoder import EncoderDecoder as EncoderDecoder
    from .models.encoder_decoder import EncoderDecoderConfig as EncoderDecoderConfig
    from .models.encoder_decoder import Pair as Pair
    from .models.lstm import LSTM as LSTM
    from .models.lstm import LSTMConfig as LSTMConfig
    from .models.memformer import Memformer as Memformer
    from .models.memformer import MemformerConfig as MemformerConfig
    from .models.memory_tokens import RMT as RMT
    from .models.memory_tokens import MemoryTransformer as MemoryTransformer
    from .models.memory_tokens import MemoryTransformerConfig as MemoryTransformerConfig
    from .models.memory_tokens import RMTConfig as RMTConfig
    from .models.store import load as load
    from .models.store import save as save
    from .models.transformer import HeadConfig as HeadConfig
    from .models.transformer import Transformer as Transformer
    from .models.transformer import TransformerConfig as TransformerConfig
    from .ops.rotary import Rotary as Rotary
    from .programs.folder import export as export
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

__version__ = "0.1.0"

_MODULES = {
    "attention.block_sparse": "BlockSparseConfig",
    "attention.compressive": "CompressiveConfig",
    "attention.decayed": "GLAConfig RetentionConfig",
    "attention.delta": "DeltaConfig GatedDeltaConfig KimiDeltaConfig",
    "attention.linear": "LinearConfig",
    "attention.mamba2": "Mamba2Config",
    "attention.reformer": "ReformerConfig",
    "attention.relative": "RelativeConfig",
    "attention.softmax": "SoftmaxConfig",
    "config": "AttentionConfig DataConfig ModelConfig",
    "errors": "InputError",
    "generate.beam": "BeamConfig beam_search",
    "generate.fused": "fused_step",
    "generate.prefix_tree": "PrefixTree",
    "generate.stream": "Stream",
    "hosts.attach": "cache uncache",
    "hosts.known_hosts": "register_host",
    "hosts.linearising": "linearise unlinearise",
    "hosts.remembering": "remember",
    "hugging_face": "fast functional",
    "memory.associations": "AssociationsConfig",
    "memory.grc": "GRC",
    "memory.memory_tokens": "TokensConfig",
    "memory.slots": "SlotsConfig",
    "memory_replay": "replay",
    "models.armt": "ARMT ARMTConfig",
    "models.encoder_decoder": "EncoderDecoder EncoderDecoderConfig Pair",
    "models.lstm": "LSTM LSTMConfig",
    "models.memformer": "Memformer MemformerConfig",
    "models.memory_tokens": "MemoryTransformer MemoryTransformerConfig RMT RMTConfig",
    "models.store": "load save",
    "models.transformer": "HeadConfig Transformer TransformerConfig",
    "ops.rotary": "Rotary",
    "programs.folder": "export",
    "registry": "register",
    "state_file": "load_state save_state",
    "types": "State add_auxiliary_loss collect_auxiliary_losses detach join reset select",
    "lab.look.viewer": "look",
    "lab.run.fit": "fit",
    "lab.run.recipe": "OptimConfig Recipe TrainConfig recipe",
    "lab.tasks.batch": "Batch",
    "lab.tasks.metrics": "CorpusMetric SumMetric",
    "lab.tasks.task": "Sampling Task",
    "lab.translation.translate": "TrainedTranslator Translation translate",
    "lab.vision.detect": "TrainedDetector detect",
}
_NAMES = {name: f"mnemos.{module}" for module, names in _MODULES.items() for name in names.split()}
_ROOMS = {
    *("attention", "generate", "hosts", "hugging_face", "lab", "libraries", "memory", "models", "native", "ops"),
    *("programs", "registry", "testing", "trainers", "types"),
}
LABORATORY = ("lightning_fabric", "matplotlib", "rich", "scipy", "tyro")  # what the extra `lab` of pyproject.toml adds


def find_missing(libraries: Iterable[str]) -> list[str]:
    """Those of some libraries that are not installed."""
    return [name for name in libraries if importlib.util.find_spec(name) is None]


def _list_names() -> list[str]:
    """The public names that have a value here: not those of the laboratory, say, where its libraries are missing."""
    names = {*_NAMES, *_ROOMS, "__version__"}
    if find_missing(LABORATORY):
        names = {name for name in names if not _NAMES.get(name, f"mnemos.{name}").startswith("mnemos.lab")}
    if find_missing(["transformers"]):
        names -= {"fast", "functional"}
    return sorted(names)


__all__ = _list_names()


def _import_name(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"mnemos.{name}")
    # The traceback ends with a name that is alike.
    raise AttributeError(f"module 'mnemos' has no attribute {name!r}", name=name, obj=sys.modules[__name__])


if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept any name, as Any
    __getattr__ = _import_name


def __dir__() -> list[str]:
    return __all__
