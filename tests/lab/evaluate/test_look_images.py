"""What the viewer records of images: both branches of each layer, and the slots that answered."""

import math

import torch
from cached_images import VIT, cached, layers, photos

from mnemos.lab.evaluate.branches import first_calls
from mnemos.lab.evaluate.explain import choose_pictures
from mnemos.lab.look.images import record_pictures
from mnemos.lab.look.observe import Attended, observing


def test_pictures_have_the_branches_and_the_slots_that_answered():
    model, task = cached(VIT, length=4), photos()
    found = record_pictures(model, task)
    index, _, inputs = choose_pictures(task)
    assert found.pixels.shape[0] == len(index) == len(found.labels)
    name, layer = next(iter(layers(model).items()))
    with torch.no_grad(), observing(model) as calls:
        model(inputs, None)
    weights = next(one for one in calls[name] if isinstance(one, Attended)).weights().mean(1)
    weights = weights.reshape(len(index), -1, 4)[:, layer.prefix :]  # of every image, without class tokens
    one = found.layers[0]
    for k, slot in enumerate(one.slots):
        torch.testing.assert_close(torch.tensor(one.answered[:, k]).flatten(1), weights[..., slot])
    with torch.no_grad():
        first = first_calls(model, layers(model), inputs)[name]
    gate = torch.sigmoid(layer.mix.detach()).repeat_interleave(first.o_self.shape[-1] // layer.num_heads)
    own, memory = (float(x.square().mean().sqrt()) for x in (first.o_self * (1 - gate), first.o_mem * gate))
    assert math.isclose(one.share, memory / (own + memory), rel_tol=1e-4)  # by size, which is not the gate's
    assert math.isclose(one.gate, float(gate.mean()), rel_tol=1e-4)
    assert abs(one.share - one.gate) > 0.01
    assert one.own.shape == one.memory.shape == (len(index), 4, 4)
