"""Memories in existing models of torch.nn, timm and Hugging Face.

`cache` adds gated caches and `uncache` takes them out; `carry` reads segments with a cache per row; `remember` adds
memory tokens. `merge_updates` adds the low-rank updates of a linearised decoder to its weights. `save`, `load` and
`from_pretrained` are for cached models, `parameter_groups` for learning rates, `register_host` for more attentions.
"""

from typing import TYPE_CHECKING

from mnemos.face import lazy

if TYPE_CHECKING:  # imported when they are first asked for; see `mnemos.face`
    from .attach import cache as cache
    from .attach import uncache as uncache
    from .branch import HostBranch as HostBranch
    from .encoder_segments import carry as carry
    from .groups import parameter_groups as parameter_groups
    from .host import Call as Call
    from .host import DecoderHost as DecoderHost
    from .host import Host as Host
    from .known_hosts import register_host as register_host
    from .linearising import merge_updates as merge_updates
    from .pretrained import from_pretrained as from_pretrained
    from .pretrained import load as load
    from .pretrained import save as save
    from .remembering import Remembering as Remembering
    from .remembering import Segmented as Segmented
    from .remembering import SegmentedState as SegmentedState
    from .remembering import remember as remember
    from .report import Report as Report
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
