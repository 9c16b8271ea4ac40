"""Memories in existing models of torch.nn, timm and Hugging Face.

`cache` adds gated caches and `uncache` takes them out; `carry` reads segments with a cache per row; `remember` adds
memory tokens. `merge_updates` adds the low-rank updates of a linearised decoder to its weights. `save`, `load` and
`from_pretrained` are for cached models, `parameter_groups` for learning rates, `register_host` for more attentions.
"""

from .attach import cache, uncache
from .branch import HostBranch
from .encoder_segments import carry
from .groups import parameter_groups
from .host import Call, DecoderHost, Host
from .known_hosts import register_host
from .linearising import merge_updates
from .pretrained import from_pretrained, load, save
from .remembering import Remembering, Segmented, SegmentedState, remember
from .report import Report

__all__ = [
    "Call",
    "DecoderHost",
    "Host",
    "HostBranch",
    "Remembering",
    "Report",
    "Segmented",
    "SegmentedState",
    "cache",
    "carry",
    "from_pretrained",
    "load",
    "merge_updates",
    "parameter_groups",
    "register_host",
    "remember",
    "save",
    "uncache",
]
