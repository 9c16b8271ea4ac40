import numpy as np
import pytest
import torch

from mnemos.lab.evaluate import write_attention
from mnemos.lab.evaluate.explain import explain
from mnemos.lab.evaluate.records import to_json
from mnemos.lab.evaluate.write_attention import HOLDS, OVERWRITES, documents, kinds
from mnemos.lab.look.viewer import Opened, document_of
from mnemos.lab.tasks.task import SPLITS
from mnemos.lab.tasks.text import TextTask
from mnemos.memory.slots import SlotsConfig
from mnemos.models.memformer import Memformer
from mnemos.models.transformer import Transformer


def measured(*arguments):
    """What is measured, as JSON; None for nothing."""
    return to_json(write_attention.measure_write_attention(*arguments))


def text_task(segment=8):
    texts = [b"def one(x):\n    return x + 1\n", b"short", "für ünf\t(2)".encode()]
    arrays = [np.frombuffer(text, np.uint8) for text in texts]
    return TextTask(dict.fromkeys(SPLITS, arrays), segment), arrays


def model(segment=4, **memory):
    torch.manual_seed(0)
    config = {"dim": 16, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 2, "mlp": 16, "segment": segment}
    return Memformer(**config, memory=SlotsConfig(slots=5, **memory))


@pytest.mark.parametrize("segment", [8, 3])
def test_documents_are_read_from_their_start_to_their_end(segment):
    task, arrays = text_task(segment)
    tokens, valid = documents(task, 4, 8, 64)
    end = len(arrays[0])  # within a segment
    assert tokens.shape == valid.shape == (3, end)
    longest_first = sorted(arrays, key=lambda array: -(-len(array) // segment), reverse=True)
    for row, mark, text in zip(tokens, valid, longest_first, strict=True):
        assert mark.tolist() == [i < len(text) for i in range(end)]
        assert row[mark].tolist() == [0, *text[:-1].tolist()]
    tokens, valid = documents(task, 4, 2, 3)
    assert tokens.shape == (2, 12)


def test_a_document_that_is_shorter_than_a_segment_is_looked_at_and_has_no_weights():
    task, arrays = text_task()
    network = model(segment=64)
    assert measured(network, task) is None
    assert set(measured(model(segment=16), task)["shares"]["holds"]) == {0}, "of the only one that is as long"
    opened = Opened("", "", network, task, None, 64)
    assert document_of([opened], 64, None, None, 9).tokens == (0, *arrays[0][:-1].tolist())


def test_weights_are_those_of_each_document_read_alone():
    task, arrays = text_task()
    network = model()
    found = measured(network, task)
    own = [[] for _ in range(7)]
    for text in arrays:
        tokens = torch.tensor([[0, *text[:-1].tolist()]])
        weights, _ = write_attention.writing(network.eval(), tokens)
        for i, one in enumerate(weights[0].mean(1)):
            own[i].append(one[:, 0])
    assert [len(each) for each in own] == [3, 2, 2, 1, 1, 1, 1]
    for i, each in enumerate(own):
        together = torch.cat(each)
        for kind, are in (("holds", together > HOLDS), ("overwrites", together < OVERWRITES)):
            assert found["shares"][kind][i] == pytest.approx(are.float().mean().item(), abs=1e-6)
        assert sum(share[i] for share in found["shares"].values()) == pytest.approx(1, abs=1e-5)
    shown = found["shown"]
    assert (shown["place"], shown["of"]) == (3, 7)
    assert shown["first"] == 4
    assert "".join(word for word, _ in shown["words"]) == bytes(arrays[0][11:27]).decode()
    for one in shown["examples"]:
        assert one["itself"] + sum(one["weights"][:4]) == pytest.approx(1, abs=1e-4)
        assert len(one["weights"]) == 16


@pytest.mark.parametrize(("logit", "kind"), [(60.0, "holds"), (-60.0, "overwrites")])
def test_slots_that_are_made_to_hold_or_to_be_overwritten_are_seen_to(logit, kind, monkeypatch):
    monkeypatch.setattr(write_attention, "SHOWN", 3)
    found = measured(model(self_logit=logit), text_task()[0])
    assert set(found["shares"][kind]) == {1.0}
    assert found["middle"][kind] == 1
    assert found["kinds"][kind]["slots"] == 5
    assert (found["split"], found["shown"]["place"], found["shown"]["of"]) == ("test", 3, 7)
    examples = found["shown"]["examples"]
    assert {one["kind"] for one in examples} == {kind}
    assert len(examples) == 1 + (kind == "holds"), "the one in the middle, and the one that holds least if all do"
    assert {len(one["weights"]) for one in examples} == {4}, "of one segment at least"


def test_only_the_middle_half_of_what_a_document_has_counts():
    itself = torch.ones(2, 8, 3)
    itself[0, 2:6] = 0.0  # a document of 8 segments: its middle half
    read = torch.ones(2, 8, dtype=torch.bool)
    read[1, 1:] = False  # and one of a single segment, all of which is its middle
    itself[1, 1:] = 0.5
    assert kinds(torch.tensor([0.91, 0.9, 0.5, 0.1, 0.09])).tolist() == [0, 1, 1, 1, 2]
    found = to_json(write_attention.summary(itself, read, torch.tensor([1.0, 2.0, 3.0])))
    assert found["shares"]["holds"] == [1, 1, 0, 0, 0, 0, 1, 1]
    assert found["middle"] == pytest.approx({"holds": 0.2, "mixes": 0.0, "overwrites": 0.8})
    assert found["kinds"]["mixes"] == {"slots": 3, "bias": 2.0}
    assert found["kinds"]["holds"] == {"slots": 0, "bias": None}


def test_data_without_a_test_split_are_recorded_as_what_they_are(tmp_path):
    task = text_task()[0]
    task.has_test = False
    assert measured(model(), task)["split"] == "valid"
    assert explain(model(), task, tmp_path).memory.split == "valid"


def test_models_that_write_no_slots_are_left_alone():
    task = text_task()[0]
    for network in (Transformer(dim=8, num_heads=2, mlp=8, layers=1), model(write=False), torch.nn.Linear(2, 2)):
        assert measured(network, task) is None
