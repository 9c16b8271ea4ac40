"""Models that are not ours, compiled steps, reduced precision, modules with a memory of their own."""

import pytest
import torch
from replay_standins import agree, begin, cell, gradients, plain, segments
from torch import nn
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.nn import functional as F

from mnemos import GRC, InputError, replay
from mnemos.attention import GatedCacheAttention
from mnemos.memory.gated_cache import caches


def both(model, step, pieces, state=None, tolerance=1e-12, **options):
    """The same gradients by the plain loop and by replay, twice: from memories that a rollout has left, too."""
    made = {k: v.clone() for k, v in model.state_dict().items()}
    expected, found = [], []
    for method, kept in ((plain, expected), (replay, found)):
        model.load_state_dict(made)
        if hasattr(model, "last"):
            model.last = torch.zeros_like(model.last)
        torch.manual_seed(3)
        for _ in range(2):
            method(step, pieces, state, **(options if method is replay else {}))
            memory = [b.detach().clone() for b in model.buffers()]
            kept.append(({k: v for k, v in gradients(model).items() if v is not None}, memory))
        kept.append([b.detach().clone() for b in model.state_dict().values()])
    agree(found, expected, tolerance)


@pytest.mark.slow
def test_a_model_of_hugging_face_that_writes_into_its_state():
    from mnemos.libraries import transformers

    torch.manual_seed(0)
    model = transformers().RwkvForCausalLM(transformers().RwkvConfig(vocab_size=11, hidden_size=8, num_hidden_layers=2))

    def step(ids, state):
        copies = None if state is None else [x.clone() for x in state]
        out = model(ids[:, :-1], state=copies, use_cache=True)
        return F.cross_entropy(out.logits.transpose(1, 2), ids[:, 1:]), out.state

    with allow_mutation_on_saved_tensors():
        both(model, step, list(torch.randint(11, (5, 2, 4))), tolerance=2e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_step(dynamic):
    model = cell()
    compiled = torch.compile(lambda x, state: model(x, state), backend="aot_eager", dynamic=dynamic)
    both(model, compiled, segments(4), begin(), module=model)


class Normed(nn.Module):
    """Running statistics, read by the next step where `reads`; a plain attribute that is a memory, too."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.cell, self.norm, self.reads = cell(), nn.BatchNorm1d(5).double(), reads
        self.last = torch.zeros(5, dtype=torch.float64)

    def forward(self, x, state):
        if self.reads:
            x = x - self.norm.running_mean.clone() - self.last
            self.last = x.detach().mean((0, 1))
        return self.cell(self.norm(x.transpose(1, 2)).transpose(1, 2), state)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("options", [{}, {"checkpoints": 2}, {"checkpoints": "sqrt"}])
def test_buffers_are_read_as_they_stood_and_updated_once(reads, options):
    torch.manual_seed(0)
    model = Normed(reads)
    both(model, model, segments(), begin(), **options)
    own = model.norm.running_mean
    before = int(model.norm.num_batches_tracked)
    replay(lambda x, s: model(x, s), segments(), begin(), module=model, **options)
    assert int(model.norm.num_batches_tracked) == before + 7
    assert model.norm.running_mean is own


class Remembering(nn.Module):
    """A tensor that is a plain attribute, None or missing at first."""

    def __init__(self, first) -> None:
        super().__init__()
        self.cell = cell(dropout=0.0)
        if first != "missing":
            self.last = first

    def advance(self, x, state):
        return self.cell.advance(x, state)

    def forward(self, x, state, scale=1.0):
        loss, state = self.cell(x, state)
        last = getattr(self, "last", None)
        self.last = state["h"].detach()
        return scale * (loss if last is None else loss * (last * state["h"]).sum()), state


class Sometimes(Remembering):
    """A plain attribute that is a tensor at first, and after some steps None."""

    def forward(self, x, state):
        loss, state = super().forward(x, state)
        if x.sum() < 0:
            self.last = None
        return loss, state


FIRST = {"zeros": torch.zeros(3, 5, dtype=torch.float64), "None": None, "missing": "missing"}


@pytest.mark.parametrize("kind", [*FIRST, "sometimes None"])
@pytest.mark.parametrize("options", [{}, {"checkpoints": 2}, {"truncate_every": 3}])
def test_a_plain_attribute_is_read_as_it_stood(kind, options):
    first, pieces, found = FIRST.get(kind, FIRST["zeros"]), segments(), []
    assert {bool(x.sum() < 0) for x in pieces[:-1]} == {True, False}
    every = options.get("truncate_every", 10**9)
    for run in (lambda m: plain(m, pieces, begin(), every=every), lambda m: replay(m, pieces, begin(), **options)):
        model = (Remembering if kind in FIRST else Sometimes)(first)
        run(model)
        found.append((gradients(model), model.last))
    agree(found[1], found[0], 1e-12)

    model = Remembering(first)
    with pytest.raises(InputError, match=r"step \d: .* the attribute last of the first pass"):
        replay(model, pieces, begin(), advance=model.advance)
    assert getattr(model, "last", "missing") is first


@pytest.mark.parametrize("preset", ["mnemos", "paper"])
def test_stored_caches_move_once_a_step(preset):
    torch.manual_seed(0)
    layer = GatedCacheAttention(8, 2, grc=GRC(length=4, preset=preset, gate_init=0.0)).double()
    linear = nn.Linear(8, 8).double()
    model = nn.ModuleList([layer, linear])

    def step(x, state):
        x = x if state is None else x + linear(state)[:, None]
        y, _ = layer(x)
        return y.square().mean(), y[:, -1]

    pieces = list(torch.randn(5, 3, 6, 8, dtype=torch.float64))
    both(model, step, pieces, module=model)
    assert all(cache.cache.abs().max() > 0 for cache in caches(model))


def test_a_buffer_that_advance_leaves_alone_is_an_error():
    model = Normed(False)

    def step(x, state):
        _, state = model.cell.walk(x, state)
        return model.norm(state["h"]).square().mean(), state

    with pytest.raises(InputError, match=r"step 5: .* buffer norm\."):
        replay(step, segments(), begin(), advance=model.cell.advance, module=model)


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside):
    """The backward pass runs in the types of the forward, and no cast weight of the first pass is taken for one."""
    model, pieces = cell(torch.float32), segments(4, torch.float32)

    def step(x, state):
        with torch.autocast("cpu", torch.bfloat16, enabled=inside or torch.is_autocast_enabled("cpu")):
            return model(x, state)

    torch.manual_seed(3)
    total: torch.Tensor = torch.zeros(())
    state = begin(torch.float32)
    for piece in pieces:
        with torch.autocast("cpu", torch.bfloat16):
            loss, state = step(piece, state)
        total = total + loss / 4
    total.backward()
    expected = gradients(model)
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        out = replay(step, pieces, begin(torch.float32))
    agree(gradients(model), expected, 1e-5)
    agree(out.loss, total, 1e-6)


def test_cached_parametrizations():
    """No weight that the first pass has computed, without a graph, is taken for one of the second."""
    model = cell(dropout=0.0)
    for linear in (model.keep, model.head):
        nn.utils.parametrizations.weight_norm(linear, "weight")
    with nn.utils.parametrize.cached():
        total, *_ = plain(model, segments(), begin())
    expected = gradients(model)
    with nn.utils.parametrize.cached():
        out = replay(model, segments(), begin())
    agree(gradients(model), expected, 1e-12)
    agree(out.loss, total, 1e-12)


def test_the_backward_pass_is_not_under_autocast():
    """What the step computes in float32 is differentiated in float32."""
    model, found = cell(torch.float32, dropout=0.0), []

    def step(x, state):
        with torch.autocast("cpu", enabled=False):
            return model(x, state)

    for around in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            replay(step, segments(4, torch.float32), begin(torch.float32))
        found.append(gradients(model))
    agree(found[1], found[0], 0.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("offload", [False, True])
def test_on_a_gpu(offload):
    model = cell().cuda()
    pieces, state = [x.cuda() for x in segments(12)], begin()
    state = {"h": state["h"].cuda(), "seen": (state["seen"][0].cuda(), "rows")}
    both(model, model, pieces, state, offload=offload)
    both(model, model, pieces, state, offload=offload, checkpoints="sqrt")
    with pytest.raises(InputError, match=r"step 5: .* the state of the first pass"):
        replay(model, pieces[:7], state, advance=lambda x, s: {**model.advance(x, s), "h": 1.01 * s["h"]})


@pytest.mark.parametrize("kind", ["scaler", "backward"])
def test_a_scaler_scales_every_gradient_alike(kind):
    model, leaf = cell(dropout=0.0), begin()["h"].clone().requires_grad_()
    replay(model, segments(), {**begin(), "h": leaf})
    expected, start = gradients(model), leaf.grad
    leaf.grad = None
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    options = {"backward": lambda loss: scaler.scale(loss).backward()} if kind == "backward" else {"scaler": scaler}
    out = replay(model, segments(), {**begin(), "h": leaf}, **options)
    agree({k: v / 2**20 for k, v in gradients(model).items()}, expected, 1e-12)
    agree((leaf.grad / 2**20, out.state_grad["h"] / 2**20), (start, start), 1e-12)
