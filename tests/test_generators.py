"""Snapshots of the random generators."""

import random

import numpy as np
import torch
from refusals import refuses

from mnemos import generators
from mnemos.lab.run import checkpoint


def draw():
    return torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal()  # noqa: NPY002


def test_generators_come_back_through_a_file(tmp_path):
    generators.seed(3)
    draw()  # Python's and NumPy's normal numbers are made in pairs: the second one is kept for the next call
    checkpoint.write(tmp_path / "a", generators.take())
    expected = draw()
    generators.seed(4)
    assert draw() != expected
    generators.put(checkpoint.read(tmp_path / "a"))
    assert draw() == expected


def test_another_generator_of_numpys_comes_back(tmp_path):
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(5))
    try:
        checkpoint.write(tmp_path / "a", generators.take())
        expected = draw()
        generators.put(checkpoint.read(tmp_path / "a"))
        assert draw() == expected
    finally:
        np.random.set_bit_generator(before)


def test_processes_draw_differently():
    drawn = []
    for seed in (0, 1):
        for rank in (0, 1):
            generators.seed_process(seed, rank)
            drawn.append((torch.rand(1).item(), random.random(), np.random.rand()))  # noqa: NPY002
    assert len(set(drawn)) == 4


def test_a_seed_below_0_is_refused():
    refuses("seed: expected an integer of at least 0, found -1", generators.generator, -1, 2)


def test_what_is_drawn_inside_leaves_no_trace():
    generators.seed(3)
    expected = draw()
    generators.seed(3)
    with generators.preserve():
        draw()
    assert draw() == expected
