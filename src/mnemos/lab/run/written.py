"""The memories of segments that a model's configuration may hold, which `--unwritten` and `--baselines` find."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from mnemos.config import mapped
from mnemos.memory.associations import AssociationsConfig
from mnemos.memory.slots import SlotsConfig
from mnemos.memory.tokens import TokensConfig

T = TypeVar("T")


class SegmentMemory(NamedTuple):
    """How the memory of such a configuration is measured and named."""

    size: str  # the field that is the number of slots or tokens, 0 for no memory
    noun: str  # what reports call it, in the plural
    absent: Mapping[str, Any] = MappingProxyType({})  # what else a configuration without the memory sets


_UNWRITTEN = MappingProxyType({"write": False})  # 0 tokens must be meant, see `memory.tokens.check_count`
# The configurations of segment memories, each with the name of its size's field and what reports call the memory.
SEGMENT_MEMORIES: dict[type, SegmentMemory] = {
    SlotsConfig: SegmentMemory("slots", "slots"),
    AssociationsConfig: SegmentMemory("tokens", "associations", _UNWRITTEN),
    TokensConfig: SegmentMemory("tokens", "memory tokens", _UNWRITTEN),
}


def stop_writing(model: T) -> T:
    """A model's configuration with every memory of segments never written; itself if there is none to switch."""
    for cls, kind in SEGMENT_MEMORIES.items():
        model = mapped(model, cls, partial(_changed, fields={"write": False}, size=kind.size))
    return model


def remove_memories(model: T) -> T:
    """A model's configuration without its memories of segments that are written; itself if there is none."""
    for cls, kind in SEGMENT_MEMORIES.items():
        model = mapped(model, cls, partial(_changed, fields={kind.size: 0, **kind.absent}, size=kind.size))
    return model


def _changed(memory: Any, fields: dict[str, Any], size: str) -> Any:
    """A memory that is written, with other values; another one as it is."""
    return replace(memory, **fields) if memory.write and getattr(memory, size) else memory
