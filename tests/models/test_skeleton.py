"""A model without values has the modules and shapes of the model, at no cost of initialisation."""

import pytest
import torch

from mnemos.memory.gated_cache import GRC
from mnemos.models.memformer import MemformerConfig
from mnemos.models.store import skeleton
from mnemos.models.transformer import TransformerConfig

CONFIGS = [
    TransformerConfig(vocab_size=11, dim=16, layers=2, num_heads=2, max_length=8, cache=GRC()),
    MemformerConfig(vocab_size=11, dim=16, num_heads=2),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_modules_names_and_shapes_are_those_of_the_model(config):
    model, bare = config.build(), skeleton(config)
    assert {n: (p.shape, p.dtype) for n, p in bare.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in model.named_parameters()
    }
    assert [(n, type(m), m.extra_repr()) for n, m in bare.named_modules()] == [
        (n, type(m), m.extra_repr()) for n, m in model.named_modules()
    ]


def test_no_memory_is_touched_and_no_random_number_is_drawn():
    before = torch.get_rng_state()
    resource = pytest.importorskip("resource")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bare = skeleton(TransformerConfig(vocab_size=300_000, dim=1024, layers=1, num_heads=2, max_length=8))
    assert sum(p.numel() for p in bare.parameters()) > 300_000_000  # 1.2 GB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 300_000  # KiB on Linux; less on macOS
    assert torch.equal(before, torch.get_rng_state())
