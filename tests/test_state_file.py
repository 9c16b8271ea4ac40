"""States as files: bit for bit or smaller, of their own model alone."""

import pytest
import torch

import mnemos
from mnemos import InputError, Stream, Transformer
from mnemos.attention import LinearConfig
from mnemos.types import leaves


def built(seed: int = 0, **fields) -> Transformer:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 11, "dim": 32, "layers": 2, "num_heads": 2, "mlp": 24, "attention": LinearConfig()}
    return Transformer(**sizes | fields).eval()


def ids(t: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(11, (t,), generator=torch.Generator().manual_seed(seed))


def test_a_state_comes_back_bit_for_bit_for_its_own_model_alone(tmp_path):
    model, file = built(), tmp_path / "state"
    with torch.no_grad():
        _, state = model(ids(40).view(2, 20))
    mnemos.save_state(state, file, model)
    for found in (mnemos.load_state(file, model), mnemos.load_state(file, like=model.initial_state(1))):
        assert all(map(torch.equal, leaves(found), leaves(state)))
        assert type(found) is type(state)
    gru = (torch.randn(2, 3), {"count": 4, "empty": None})
    mnemos.save_state(gru, tmp_path / "gru")
    h, rest = mnemos.load_state(tmp_path / "gru", like=(torch.zeros(1, 3), {"count": 0, "empty": None}))
    assert torch.equal(h, gru[0])
    assert rest == gru[1]
    mnemos.save_state(gru[0], tmp_path / "typed", dtype=torch.bfloat16)
    assert torch.equal(mnemos.load_state(tmp_path / "typed", like=gru[0]), gru[0].bfloat16().float())
    Stream(model).prefill(ids(20)[None]).save(tmp_path / "stream")
    for words, call in (
        ("of other weights", lambda: mnemos.load_state(file, built(1))),
        ("another configuration", lambda: mnemos.load_state(file, built(mlp=28))),
        (r"expected a state of 2 parts, found \d", lambda: mnemos.load_state(file, like=(h, h))),
        (r"part 0 of the state as float32 \[B, N\], found int64 \[B\]", lambda: mnemos.load_state(file, like=[h] * 7)),
        ("give like=", lambda: mnemos.load_state(file, torch.nn.Linear(2, 2))),
        ("found Stream in the state; give stream.state", lambda: mnemos.save_state(Stream(model), file)),
        ("found a saved state; mnemos.load_state reads it", lambda: Stream.restore(model, file)),
        ("found a saved stream; mnemos.Stream.restore", lambda: mnemos.load_state(tmp_path / "stream", model)),
        ("found a folder; name a file in it", lambda: mnemos.load_state(tmp_path, model)),
        (r"call save_state\(state, file, model\)", lambda: mnemos.save_state(file, state, model)),
        ("bfloat16, int8 or None, found 'int4'", lambda: mnemos.save_state(h, file, dtype="int4")),
    ):
        with pytest.raises(InputError, match=words) as error:
            call()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(("dtype", "bound", "bits"), [("bfloat16", 2**-8, 16), ("int8", 1 / 2000, 12.6)])
def test_smaller_states_are_right_to_their_bits(tmp_path, dtype, bound, bits):
    state = {
        "s": torch.randn(3, 2, 24, 64).double(),
        "odd": torch.randn(3, 5),
        "n": torch.arange(3),
        "v": torch.ones(3),
    }
    state["s"][1] = 0
    state["s"][2, 0, 0, 0] = 1e4
    mnemos.save_state(state, tmp_path / "x", dtype=dtype)
    found = mnemos.load_state(tmp_path / "x", like=state)
    for name, x in state.items():
        assert found[name].dtype == x.dtype
        assert ((found[name] - x).abs() <= bound * x.abs().amax(-1, keepdim=True)).all()
    assert torch.equal(found["s"][1], state["s"][1])
    assert torch.equal(found["n"], state["n"])
    assert 8 * (tmp_path / "x").stat().st_size < bits * state["s"].numel() + 8 * 1500
    state["s"][0, 0, 0, 0] = torch.inf
    mnemos.save_state(state, tmp_path / "x", dtype=dtype)
    assert torch.equal(mnemos.load_state(tmp_path / "x", like=state)["s"], state["s"])
