"""The memory's controls and the gates' probe: they change what they say, and nothing else."""

import itertools
from dataclasses import replace

import pytest
import torch

from mnemos import GRC, Transformer
from mnemos.lab.evaluate.controls import CONTROLS, controls
from mnemos.lab.evaluate.gates import measure_gates
from mnemos.lab.evaluate.scores import evaluate
from mnemos.lab.tasks.batch import Batch
from mnemos.memory.gated_cache import caches
from mnemos.models.transformer import HeadConfig

HEAD = HeadConfig(classes=3)


def model(cache: GRC | None) -> Transformer:
    torch.manual_seed(0)
    network = Transformer(
        vocab_size=7, dim=8, layers=2, num_heads=2, mlp=8, max_length=6, causal=False, head=HEAD, cache=cache
    )
    network(torch.randint(7, (4, 6)))
    return network


def batches() -> list[Batch]:
    torch.manual_seed(1)
    return [Batch(torch.randint(7, (5, 6)), torch.randint(3, (5,))) for _ in range(3)]


@pytest.mark.parametrize("preset", ["paper", "official", "mnemos"])
def test_controls_are_what_they_say_and_leave_the_model_alone(preset):
    network = model(GRC(preset=preset)).eval()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    whole = evaluate(network, batches())
    found = controls(network, batches)
    assert set(found) == set(CONTROLS)
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert evaluate(network, batches()) == whole
    for name, scores in found.items():
        with torch.no_grad():
            for cache in caches(network):
                if name == "emptied":
                    cache.cache.zero_()
                elif name == "closed":
                    cache.mix.fill_(-torch.inf)
        if name != "exchanged":
            assert evaluate(network, batches())["loss"] == scores["loss"]
        assert scores["loss"] != whole["loss"]
        network.load_state_dict(before)


def test_a_cache_that_is_never_written_is_no_content():
    network = model(GRC(preset="paper")).eval()
    first, second = caches(network)
    second.grc = replace(second.grc, write=False)  # as where `mnemos.cache` was called for each of them
    found = controls(network, batches)
    with torch.no_grad():
        first.cache.zero_()
    assert evaluate(network, batches())["loss"] == found["emptied"]["loss"]


@pytest.mark.parametrize("cache", [GRC(write=False), GRC(scope="stream")], ids=["unwritten", "stream"])
def test_a_model_that_stores_no_content_has_none_to_change(cache):
    network = model(cache)
    found = controls(network, batches)
    with torch.no_grad():
        for one in caches(network):
            one.mix.fill_(-torch.inf)
    assert found == {"closed": {name: value for name, value in evaluate(network, batches()).items() if name != "count"}}


def test_a_model_without_caches_has_no_controls_and_no_gates():
    assert controls(model(None), batches) == {}
    assert measure_gates(model(None), batches()[0]) is None


@pytest.mark.parametrize("training", [True, False])
def test_the_probe_tells_of_every_gate_and_changes_nothing(training):
    network = model(GRC(gate_init=0.0)).train(training)
    before = [t.clone() for t in itertools.chain(network.parameters(), network.buffers())]
    pending = [c.pending.clone() for c in caches(network)]
    batch = batches()[0]
    random = torch.get_rng_state()
    found = measure_gates(network, batch)
    assert torch.equal(torch.get_rng_state(), random)
    assert network.training == training
    for a, b in zip(before, itertools.chain(network.parameters(), network.buffers()), strict=True):
        assert torch.equal(a, b)
    for a, c in zip(pending, caches(network), strict=True):
        assert torch.equal(a, c.pending)
    assert [layer["name"] for layer in found["layers"]] == ["blocks.0.attention", "blocks.1.attention"]
    for layer in found["layers"]:
        assert layer["mix"] == [0.5, 0.5]
        assert 0 < layer["update"]["mean"] < 1
        assert 0 <= layer["reset"]["saturated"] <= 1


def test_the_effective_rank():
    network = model(GRC(length=4)).eval()
    first, second = caches(network)
    with torch.no_grad():
        first.cache.fill_(-2.0)
        second.cache.copy_(torch.eye(4))
    layers = measure_gates(network, batches()[0])["layers"]
    assert (layers[0]["cache"]["max"], layers[1]["cache"]["max"]) == (2, 1)
    assert layers[1]["cache"]["rms"] == pytest.approx(0.5)
    assert layers[0]["cache"]["rank"] == pytest.approx(1, abs=1e-3)
    assert layers[1]["cache"]["rank"] == pytest.approx(4, rel=1e-5)
    assert layers[0]["cache"]["rms"] == pytest.approx(2)
    second.cache.zero_()
    assert measure_gates(network, batches()[0])["layers"][1]["cache"] == {"rms": 0, "max": 0, "rank": 0}


def test_a_learned_constant_is_measured_without_its_graph(recwarn):
    network = model(GRC(length=4, preset="paper").unwritten())
    torch.set_warn_always(True)
    try:
        first, _ = measure_gates(network, batches()[0])["layers"]
    finally:
        torch.set_warn_always(False)
    assert first["cache"]["max"] == float(caches(network)[0].cache.detach().abs().max())
    assert not recwarn.list


def test_caches_of_streams_are_those_of_the_state():
    """Root mean square, maximum, and the mean over rows of the effective rank."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 7, "dim": 8, "layers": 2, "num_heads": 2, "mlp": 8, "max_length": 6}
    network, x = Transformer(**sizes, cache=GRC(scope="stream", length=3, block=2)), torch.randint(7, (5, 6))
    layers = measure_gates(network, Batch(x, x))["layers"]
    _, state = network.train()(x)
    for found, layer in zip(layers, state.layers, strict=True):
        cache = layer.updates.cache.detach()
        ranks = []
        for row in cache:
            share = torch.linalg.svdvals(row) / torch.linalg.svdvals(row).sum()
            ranks.append(float(torch.exp(-(share * share.log()).sum())))
        wanted = {"rms": cache.square().mean().sqrt(), "max": cache.abs().max(), "rank": sum(ranks) / len(ranks)}
        assert found["cache"] == pytest.approx({name: float(x) for name, x in wanted.items()}, rel=1e-4)
