"""The FLOPs of a run's updates."""

import copy
from functools import partial
from typing import Any

import numpy as np
import torch

from mnemos import generators
from mnemos.lab.measure.flops import count_flops
from mnemos.memory.gated_cache import hold_caches, promote, stored
from mnemos.types import leaves

from .learner import Learner
from .loop import gradients

_READ = 128  # updates over which FLOPs are averaged: rows that are padded to the longest of a batch differ in length
_COUNTED = 8  # of these, the updates whose FLOPs are counted, each in about the time of an update


def count_update_flops(learner: Learner) -> float | None:
    """FLOPs of an update, the mean over the next `_READ` ones, or as many as the run has (`measure.flops`).

        Σ over segments (forward + backward) + the forwards that memory replay computes again

    Updates whose batches have equal shapes are counted once; of more than `_COUNTED` shapes as many are counted, evenly
    spaced by size, and the others interpolated linearly. The optimiser is not counted. Weights, buffers, the carried
    state and the random generators stay as they are. None for several processes, which share an update.
    """
    if learner.fabric.world_size > 1:
        return None

    promote(stored(learner.model))  # what the last update wrote, as the evaluation that follows would
    buffers = [(buffer, buffer.clone()) for buffer in learner.model.buffers()]
    compiled, learner.with_loss.model = learner.with_loss.model, learner.model  # it would hide its operations
    carried = learner.carried
    first: dict[tuple[torch.Size, ...], list[Any]] = {}
    shapes: list[tuple[torch.Size, ...]] = []
    sizes: dict[tuple[torch.Size, ...], int] = {}
    counted: dict[tuple[torch.Size, ...], float] = {}
    try:
        with generators.preserve(), hold_caches(learner.model):
            # --- the next updates' batches, by the shapes of all their tensors: source and target cost differently ---
            for step in range(learner.count.step, learner.count.step + min(_READ, learner.recipe.train.steps)):
                batches = learner.batches(step)
                tensors = [leaf for batch in batches for leaf in leaves(batch)]
                shapes.append(tuple(x.shape for x in tensors))
                sizes[shapes[-1]] = sum(x.numel() for x in tensors if x.dtype != torch.bool)  # without masks
                first.setdefault(shapes[-1], batches)  # kept: a task may have to begin a pass again to go back to it
            distinct = sorted(sizes, key=lambda shape: (sizes[shape], shape))
            chosen = np.linspace(0, len(distinct) - 1, min(_COUNTED, len(distinct))).round().astype(int)

            # --- the FLOPs of some, from the states of now ---
            for shape in (distinct[i] for i in chosen):
                learner.carried = copy.copy(carried)
                learner.carried.states = list(carried.states)
                counted[shape] = count_flops(partial(gradients, learner, first[shape]))
    finally:
        learner.carried, learner.with_loss.model = carried, compiled
        learner.stepper.zero_grad()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    x, y = [sizes[shape] for shape in counted], list(counted.values())
    return float(np.mean([counted[s] if s in counted else np.interp(sizes[s], x, y) for s in shapes]))
