import copy
import json

import numpy as np
import pytest
import torch
from cached_images import PVT, SWIN, VIT, cached, layers, photos, seen
from safetensors.torch import load_file

import mnemos
from mnemos import GRC
from mnemos.lab.evaluate import explain as module
from mnemos.lab.evaluate.records import to_json
from mnemos.lab.tasks.batch import Batch
from mnemos.lab.tasks.images import DigitsConfig
from mnemos.lab.tasks.token_task import TokenTask
from mnemos.models.transformer import HeadConfig


def explain(*arguments):
    """What is recorded, as JSON."""
    return to_json(module.explain(*arguments))


@pytest.mark.parametrize("config", [VIT, PVT], ids=["vit", "pvt"])
def test_a_run_is_explained(config, tmp_path):
    model, task = cached(config, preset="paper"), photos()
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    model.train()
    generator = torch.get_rng_state()
    found = explain(model, task, tmp_path)
    assert model.training
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert json.loads((tmp_path / "explain.json").read_text()) == found
    arrays = load_file(tmp_path / "explain.safetensors")
    assert [e["name"] for e in found["layers"]] == list(layers(model))
    about = found["pictures"]
    assert about["names"] == task.names
    assert about["label"] == [0, 0, 1, 1, 2, 2, 3, 3]
    for i, (at, label) in enumerate(zip(about["index"], about["label"], strict=True)):
        np.testing.assert_array_equal(arrays["pictures"][i].numpy(), task.picture("test", at))
        batch = next(task.batches("test", 24))
        assert batch.targets[at] == label
        assert about["guess"][i] == model.eval()(batch.inputs[at][None])[0].argmax()
    assert found["middle"] == (len(found["layers"]) - 1) // 2
    for i, entry in enumerate(found["layers"]):
        assert arrays[f"self.{i}"].shape == arrays[f"memory.{i}"].shape == (8, *entry["maps"]["grid"])
        assert entry["share"] == pytest.approx(torch.sigmoid(layers(model)[entry["name"]].mix).tolist())
    # The maps are those of these pictures.
    chosen = torch.stack([next(task.batches("test", 24)).inputs[i] for i in about["index"]])
    name, one = next(iter(seen(model, chosen).items()))
    words = one.o_mem.mean(-1)[:, layers(model)[name].prefix :]
    torch.testing.assert_close(words.view_as(arrays["memory.0"]), arrays["memory.0"])
    if config is VIT:
        again = tmp_path / "again"
        again.mkdir()
        explain(model, task, again)
        for file in ("explain.json", "explain.safetensors"):
            assert (again / file).read_bytes() == (tmp_path / file).read_bytes()


def test_a_model_of_another_type_is_explained_as_in_float32(tmp_path):
    """A model that `mnemos.fit` trained stays in the type, and on the device, of its training."""
    model = cached(VIT).double()
    assert explain(model, photos(), tmp_path) == explain(cached(VIT), photos(), tmp_path)
    assert next(model.parameters()).dtype == torch.float64


def test_without_caches_the_controls_of_the_state_alone(tmp_path):
    found = explain(VIT.build(), photos(), tmp_path)
    assert found["memory"] == {"left": "the model keeps no state"}
    assert (found["layers"], found["left"]) == ([], "the model has no gated cache")
    assert [path.name for path in tmp_path.iterdir()] == ["explain.json"]


def test_without_pictures_the_gates_alone(tmp_path):
    sizes = {"dim": 12, "num_heads": 2, "mlp": 12, "max_length": 30, "cache": GRC(length=8)}
    model = mnemos.Transformer(**sizes, causal=True, head=HeadConfig(classes=10, pool="last"))
    found = explain(model, Stand(30), tmp_path)
    assert (found["left"], found["pictures"]) == ("the task has no pictures", None)
    assert not (tmp_path / "explain.safetensors").exists()
    assert [len(entry["share"]) for entry in found["layers"]] == [2] * len(model.blocks)


class Stand(TokenTask):
    def __init__(self, length):
        self.max_length = length

    def size(self, split):
        return 3

    def batches(self, split, batch_size):
        yield Batch(self.example().inputs, torch.zeros(1, dtype=torch.int64))


def test_layers_that_no_figure_can_show_say_why(tmp_path):
    model = cached(VIT)
    layers(model)["host.blocks.0.attn.grc"].grid = None
    found = explain(model, photos(), tmp_path)
    assert found["layers"][0]["maps"] == {"left": "its 16 tokens form no known grid"}
    assert found["middle"] == 1
    windows = explain(cached(SWIN), photos(), tmp_path)["layers"][0]["maps"]
    assert windows == {"left": "its windows have unknown positions in the picture"}


def test_sequences_of_pixels_are_pictures_too(tmp_path):
    task = DigitsConfig(valid_size=20, test_size=40).build()
    pixels = next(task.batches("test", 40)).inputs
    picture = task.picture("test", 7)
    assert (picture.shape, picture.dtype) == ((8, 8, 1), np.uint8)
    np.testing.assert_array_equal(picture.ravel(), np.rint(pixels[7].numpy() * 255 / 16))
    head = HeadConfig(classes=10)
    sizes = {"vocab_size": 17, "dim": 8, "num_heads": 2, "mlp": 8, "max_length": 64, "layers": 1}
    model = mnemos.Transformer(**sizes, causal=False, cache=GRC(length=16), head=head)
    (entry,) = explain(model, task, tmp_path)["layers"]
    assert entry["maps"]["grid"] == [8, 8]
    model.spare = copy.deepcopy(model.blocks[0].attention)
    (_, spare) = explain(model, task, tmp_path)["layers"]
    assert spare["maps"] == {"left": "the model did not call it"}
    model = mnemos.Transformer(**sizes, causal=True, cache=GRC(length=16), head=HeadConfig(classes=10, pool="last"))
    found = explain(model, task, tmp_path)
    assert found["layers"][0]["maps"] == {"left": "its cache changes along the sequence"}
    assert (found["pictures"], found["middle"]) == (None, None)
    assert found["left"] == "no layer's tokens have known positions in the picture"


def test_smaller_pictures_keep_their_shape():
    big = torch.randint(0, 256, (2, 200, 100, 3), dtype=torch.uint8)
    small = module.smaller(big, 50)
    assert small.shape == (2, 50, 25, 3)
    torch.testing.assert_close(small.float().mean((1, 2)), big.float().mean((1, 2)), atol=2, rtol=0)
    assert module.smaller(big, 200) is big
    assert module.smaller(big[:, :, :1], 90).shape == (2, 90, 1, 3)
    stripes = torch.tensor([0, 0, 0, 240], dtype=torch.uint8).repeat(8).view(1, 1, 32, 1).expand(1, 32, 32, 1)
    assert (module.smaller(stripes, 8)[:, :, 1:-1] == 60).all(), "each pixel counts"


def test_pictures_are_of_as_many_classes_as_there_are():
    """One of each class in turn, and no more batches than it takes."""

    class Rows(Stand):
        read = 0

        def batches(self, split, batch_size):
            for inputs in torch.arange(len(self.labels)).split(self.length):
                self.read += 1
                yield Batch(inputs, self.labels[inputs])

    def chosen(length, labels):
        task = Rows(1)
        task.length, task.labels = length, labels
        index, labels, inputs = module.choose_pictures(task)
        assert inputs.tolist() == index
        return index, labels, task.read

    few = torch.tensor([3, 3, 3, 3, 3, 1, 1, 0, 1, 2, 2, 2, 2, 2, 2])
    assert chosen(5, few) == ([7, 5, 6, 8, 9, 10, 0, 1], [0, 1, 1, 1, 2, 2, 3, 3], 3)
    assert chosen(4, torch.arange(15)) == ([*range(8)], [*range(8)], 2)
    assert chosen(1000, torch.zeros(5000, dtype=torch.int64)) == ([*range(8)], [0] * 8, 2)
