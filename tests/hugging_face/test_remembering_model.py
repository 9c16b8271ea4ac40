"""A decoder with memory tokens in `generate`: the segments written out, beams, padding, drafts, and a saved copy."""

import pytest
import torch
from functional_models import build
from refusals import refuses

import mnemos
from mnemos.hosts import Segmented
from mnemos.hugging_face import RememberingForCausalLM
from mnemos.libraries import transformers

SEGMENT, NEW = 4, 6
IDS = torch.randint(3, 17, (2, 9), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(IDS)
MASK[1, :3] = 0
ROWS = (IDS[:1], IDS[1:, 3:])
OPTIONS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(params=["GPT2", "Llama"])
def network(request):
    return RememberingForCausalLM.of(mnemos.remember(build(request.param), 3), segment=SEGMENT)


def in_segments(remembering, ids):
    """The definition: each segment in a call of its own."""
    memory, found = None, []
    for part in ids.split(SEGMENT, 1):
        logits, memory = remembering(part, memory)
        found.append(logits)
    return torch.cat(found, 1)


def test_it_generates_over_segments_and_is_saved(network, tmp_path):
    expected = []
    for row in ROWS:
        for _ in range(NEW):
            row = torch.cat([row, in_segments(network.remembering, row)[:, -1:].argmax(-1)], 1)
        expected.append(row[0, -NEW:])
    network.remembering.model.config.name_or_path = str(tmp_path)  # of a host that was loaded from there
    network = RememberingForCausalLM.of(network.remembering, segment=SEGMENT)
    network.save_pretrained(tmp_path)
    assert str(tmp_path) not in (tmp_path / "config.json").read_text()
    loaded = transformers().AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (loaded.config.tokens, loaded.config.segment) == (3, SEGMENT)
    found = loaded.generate(IDS, attention_mask=MASK, max_new_tokens=NEW, **OPTIONS)
    assert torch.equal(found[:, -NEW:], torch.stack(expected))
    drafted = loaded.generate(IDS[:1], prompt_lookup_num_tokens=2, max_new_tokens=NEW, **OPTIONS)
    assert torch.equal(drafted, found[:1])
    beams = loaded.generate(IDS, attention_mask=MASK, num_beams=3, max_new_tokens=NEW, **OPTIONS)[:, -NEW:]
    config = mnemos.BeamConfig(beams=3, max_length=NEW, stopping="heuristic")
    for row, tokens in zip(ROWS, beams, strict=True):
        assert torch.equal(tokens, mnemos.beam_search(network.model, None, row, config)[0][0].tokens)


def cached(model):
    mnemos.cache(model, mnemos.GRC(scope="stream", length=3, block=2))


def linearised(model):
    mnemos.linearise(model, window=3, sinks=1, rank=2, full=lambda name, _: ".1." in name)


@pytest.mark.each_value
@pytest.mark.parametrize("part", ["decoder", "wrapper", "network"])
@pytest.mark.parametrize(("change", "undo"), [(cached, mnemos.uncache), (linearised, mnemos.unlinearise)])
def test_what_was_done_to_the_decoder_is_saved(network, part, change, undo, tmp_path):
    remembering = network.remembering
    change({"decoder": remembering.model, "wrapper": remembering, "network": network}[part])
    network = network if part == "network" else RememberingForCausalLM.of(remembering, segment=SEGMENT)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    logits, automatic = network(IDS).logits, transformers().AutoModelForCausalLM
    network.save_pretrained(tmp_path / "first")
    loaded = automatic.from_pretrained(tmp_path / "first")
    assert torch.equal(loaded(IDS).logits, logits)
    again = type(loaded)(loaded.config)
    again.load_state_dict(loaded.state_dict())
    assert torch.equal(again.eval()(IDS).logits, logits)
    loaded.save_pretrained(tmp_path / "second")
    assert torch.equal(mnemos.hosts.from_pretrained(automatic, tmp_path / "second")(IDS).logits, logits)
    undo(loaded)
    loaded.save_pretrained(tmp_path / "without")
    assert torch.equal(automatic.from_pretrained(tmp_path / "without")(IDS).logits, loaded(IDS).logits)


def test_its_loss_is_that_of_the_segments(network):
    output = network(IDS, attention_mask=MASK, labels=IDS.masked_fill(MASK == 0, -100))
    logp = [in_segments(network.remembering, row).log_softmax(-1)[0, :-1].gather(1, row[0, 1:, None]) for row in ROWS]
    torch.testing.assert_close(output.loss, -torch.cat(logp).mean(), rtol=1e-4, atol=1e-5)
    output.loss.backward()
    assert network.remembering.memory.start.grad.abs().max() > 0


def test_bad_input(network):
    refuses("segment", Segmented, network.remembering, 0)
    refuses("state that this model returned", network.model, IDS, network.model.initial_state(3))
    refuses(r"mnemos\.remember", RememberingForCausalLM.of, network.remembering.model)
