"""A gated cache per row in an encoder, carried from call to call (`mnemos.hosts.carry`)."""

import torch
from decoder_models import plain
from hosts import build
from refusals import refuses
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mnemos
from mnemos import GRC
from mnemos.hosts import carry
from mnemos.ops.gated_cache.reference import reference_attend, reference_mix, reference_resample, reference_update
from mnemos.types import select

STREAM = GRC(length=3, scope="stream", gate_init=0.3)


def bert(grc: GRC | None = STREAM, layers: int = 1) -> nn.Module:
    model = build("hf_bert")
    model.encoder.layer = model.encoder.layer[:layers]
    if grc is not None:
        mnemos.cache(model, grc)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".grc." in name:
                    parameter += 0.3 * torch.randn_like(parameter)
    return model


def expected_row(branch: nn.Module, x: Tensor, y: Tensor, cache: Tensor, valid: int) -> tuple[Tensor, Tensor]:
    """Eq. 2 to 5 for one row: x, y [T, D] and its cache [Tm, Dm] to the mixed output and the new cache."""
    weights = {f"W_{n}": m.weight for n, m in zip("urc", parts(branch), strict=True)}
    weights |= {f"b_{n}": m.bias for n, m in zip("urc", parts(branch), strict=True)}
    weights |= {"gain": branch.candidate_norm.weight, "shift": branch.candidate_norm.bias}
    slots, width = cache.shape
    new = reference_update(reference_resample(x[:valid, :width], slots), cache, weights, "layernorm_gelu")
    asked = (branch.to_query(x[:, :width]), branch.to_key(new), branch.to_value(new))
    q, k, v = (part.unflatten(-1, (branch.num_heads, -1)) for part in asked)
    heads = torch.stack([reference_attend(q[:, h], k[:, h], v[:, h]) for h in range(branch.num_heads)], 1)
    o_mem = branch.lift(heads.flatten(1)).unflatten(-1, (branch.num_heads, -1))
    return reference_mix(o_mem, y.unflatten(-1, (branch.num_heads, -1)), branch.mix).flatten(1), new


def parts(branch: nn.Module) -> tuple[nn.Module, ...]:
    return branch.update_gate, branch.reset_gate, branch.candidate


def test_segments_are_the_equations_with_gradients_through_the_state():
    model = bert()
    attention = model.encoder.layer[0].attention.self
    found: list[Tensor] = []
    attention.register_forward_hook(lambda module, args, output: found.append(output[0]))
    plain = bert(None)
    plain.load_state_dict(model.state_dict(), strict=False)
    segments = [torch.randint(30, (3, t)) for t in (5, 4, 3)]
    valid = torch.ones(3, 4, dtype=torch.long)
    valid[1, 3:], valid[2] = 0, 0  # one row is padded, one has no token: it keeps its cache
    masks = [None, valid, None]
    state, caches = None, torch.zeros(3, 3, 12).double()
    for x, mask in zip(segments, masks, strict=True):
        _, state = carry(model, state, x, mask)
        hidden = model.embeddings(x)
        own = plain.encoder.layer[0].attention.self(hidden, None if mask is None else mask[:, None, None].bool())[0]
        counts = [x.shape[1]] * 3 if mask is None else mask.sum(1).tolist()
        rows = [
            expected_row(attention.grc, *row) if row[-1] else (found[-1][i], row[2])
            for i, row in enumerate(zip(hidden, own, caches, counts, strict=True))
        ]
        expected, caches = (torch.stack(part) for part in zip(*rows, strict=True))
        some = torch.tensor(counts) > 0
        torch.testing.assert_close(found[-1][some], expected[some], rtol=1e-9, atol=1e-9)
    (name,) = state
    assert name == "encoder.layer.0.attention.self.grc"
    torch.testing.assert_close(state[name], caches, rtol=1e-9, atol=1e-9)
    wanted = [p for part in parts(attention.grc) for p in part.parameters()]  # of the last output alone
    weights = torch.randn_like(expected)
    got, right = (torch.autograd.grad((y * weights).sum(), wanted, retain_graph=True) for y in (found[-1], expected))
    for a, b in zip(got, right, strict=True):
        assert b.abs().max() > 1e-6
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_rows_go_on_alone_and_a_call_without_state_begins_new_rows():
    model = bert(layers=2)
    first, second = torch.randint(30, (3, 7)), torch.randint(30, (3, 5))
    alone = model(second).last_hidden_state
    _, state = carry(model, None, input_ids=first)
    kept = {name: caches.clone() for name, caches in state.items()}
    whole, _ = carry(model, state, input_ids=second)
    rows = torch.tensor([2, 0])
    some, _ = carry(model, select(state, rows), input_ids=second[rows])
    torch.testing.assert_close(some.last_hidden_state, whole.last_hidden_state[rows])
    assert (whole.last_hidden_state - alone).abs().max() > 1e-3
    torch.testing.assert_close(model(second).last_hidden_state, alone, rtol=0, atol=0)
    assert all(torch.equal(state[name], kept[name]) for name in kept)


def test_a_cache_that_is_never_written_stays_as_it_started():
    model = bert(STREAM.unwritten())
    first, second = torch.randint(30, (2, 7)), torch.randint(30, (2, 7))
    _, state = carry(model, None, first)
    output, after = carry(model, state, second)
    assert not any(caches.any() for caches in (*state.values(), *after.values()))
    assert torch.equal(output.last_hidden_state, model(second).last_hidden_state)


def test_what_has_no_rows_to_carry_is_refused():
    x = torch.randint(30, (3, 7))
    model, decoder = bert(), plain("gpt2")
    mnemos.cache(decoder, STREAM)
    state = carry(model, None, x)[1]
    refuses(r"expected a state of 2 rows of \[3, 12\], found \[3, 3, 12\]", carry, model, state, x[:2])
    refuses(r"expected a state of encoder\..*, found other", carry, model, {"other": torch.zeros(3, 4, 12)}, x)
    refuses("found caches that all rows share", carry, bert(GRC(length=4)), None, x)
    refuses("found none of its caches", carry, bert(None), None, x)
    refuses(r"causal decoder.*mnemos\.functional", carry, decoder, None, x)
    refuses("windows of this attention are rows", mnemos.cache, build("timm_swin"), GRC(length=4, scope="stream"))


def test_activation_checkpointing_is_around_the_call_and_not_inside():
    model = bert().train()
    x = torch.randint(30, (3, 7))
    state = {name: caches.detach() + 0.1 for name, caches in carry(model, None, x)[1].items()}

    def read(carries: bool = True) -> Tensor:
        torch.manual_seed(1)  # dropout
        output = carry(model, state, x)[0] if carries else model(x)
        return output.last_hidden_state.square().sum()

    def gradient(loss: Tensor) -> list[Tensor]:
        return torch.autograd.grad(loss, list(model.encoder.parameters()), allow_unused=True)

    for a, b in zip(gradient(checkpoint(read, use_reentrant=False)), gradient(read()), strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b)
    inside = checkpoint(read, False, use_reentrant=False)
    refuses(r"expected activation checkpointing around.*mnemos\.replay", gradient, inside)
