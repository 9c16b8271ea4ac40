"""Memories in existing models of torch.nn, timm and Hugging Face.

A host is a model of another library; an adapter says how to read the attentions of one of its classes. What `cache`
adds, in the order of reading:

1. `attach`: cache(model), from the attentions that it chooses to the report.
2. What it knows of them: `host` (what an adapter declares), `adapters` (the table), `inputs` (tokens and grids of each
   architecture), or `named` for a module that only the user knows.
3. What it adds to them: `branch`, put in by `hooks`, which read `masks` and `grids`. In a decoder `row_caches` keeps a
   cache for each row.
4. `pretrained` saves and loads all this.

Apart from it: `linearise` gives a decoder a state of constant size (`linearised` is the attention, `linearised_cache`
its state on the decoder's own cache, `linearised_file` a file of what was trained, `ranking` which attentions to leave
whole), and `remembering` puts memory tokens around a decoder.
"""

from typing import TYPE_CHECKING

from mnemos.face import lazy

if TYPE_CHECKING:
    from .adapters import register_host as register_host
    from .attach import Report as Report
    from .attach import cache as cache
    from .attach import uncache as uncache
    from .branch import HostBranch as HostBranch
    from .branch import carry as carry
    from .branch import parameter_groups as parameter_groups
    from .host import Call as Call
    from .host import DecoderHost as DecoderHost
    from .host import Host as Host
    from .linearise import merge_updates as merge_updates
    from .linearised_file import load_adapter as load_adapter
    from .linearised_file import save_adapter as save_adapter
    from .pretrained import from_pretrained as from_pretrained
    from .pretrained import load as load
    from .pretrained import save as save
    from .remembering import Remembering as Remembering
    from .remembering import Segmented as Segmented
    from .remembering import SegmentedState as SegmentedState
    from .remembering import remember as remember
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
