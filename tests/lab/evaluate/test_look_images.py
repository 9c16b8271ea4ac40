"""What the viewer records of images: both branches of each layer, and the slots that answered."""

import torch
from cached_images import VIT, cached, layers, photos

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
    assert one.own.shape == one.memory.shape == (len(index), 4, 4)
