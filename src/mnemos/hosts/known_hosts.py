"""The attentions that `cache` knows: of torch.nn, torchvision, timm, Hugging Face, and those registered by others."""

import warnings

from mnemos import registry
from mnemos.types import InputError

from . import hugging_face_hosts, timm_hosts, torch_hosts
from .host import Host

_OURS: tuple[Host, ...] = (*torch_hosts.HOSTS, *timm_hosts.HOSTS, *hugging_face_hosts.HOSTS)
_registered: dict[str, Host] = {}


def register_host(host: Host) -> Host:
    """Let `mnemos.cache` add gated caches to another attention class; returns the host.

        mnemos.register_host(Host("their_library.layers:Attention", ("x",), width="dim", heads="num_heads", call=...))

    A plug-in of the entry-point group `mnemos.plugins` may call this function: `mnemos.cache` loads the plug-ins (see
    `mnemos.registry`). Raises InputError if the class has another adapter already.
    """
    before = next((known for known in _OURS if known.kind == host.kind), None) or _registered.get(host.kind)
    if before is not None and before != host:
        raise InputError(
            f"expected a class without an adapter, found {host.kind}, whose calls {_reader(before)} reads already; "
            f"remove that of {_reader(host)}"
        )
    if before is None:
        _registered[host.kind] = host
    return host


def hosts() -> tuple[Host, ...]:
    """Every known attention class, ours first. Loads the plug-ins; warns of those that cannot be loaded."""
    for failure in registry.load_plugins():
        warnings.warn(failure, RuntimeWarning, stacklevel=2)
    return (*_OURS, *_registered.values())


def _reader(host: Host) -> str:
    """Where the function that reads a host's calls is defined."""
    return f"{host.call.__module__}:{getattr(host.call, '__qualname__', type(host.call).__qualname__)}"
