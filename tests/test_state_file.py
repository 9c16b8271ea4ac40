"""States as files: bit for bit or smaller, of their own model alone."""

import resource

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import mnemos
from mnemos import InputError, Stream, Transformer, tree_file
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
    unloaded = torch.nn.Linear(2, 2, device="meta")
    for words, call in (
        ("of other weights", lambda: mnemos.load_state(file, built(1))),
        ("another configuration", lambda: mnemos.load_state(file, built(mlp=28))),
        ("expected a state of 2 parts", lambda: mnemos.load_state(file, like=(h, h))),
        ("named and ordered as the model's", lambda: mnemos.load_state(file, like=[h] * 7)),
        ("give like=", lambda: mnemos.load_state(file, torch.nn.Linear(2, 2))),
        ("found Stream in the state; give stream.state", lambda: mnemos.save_state(Stream(model), file)),
        ("mnemos.load_state reads it", lambda: Stream.restore(model, file)),
        ("mnemos.Stream.restore reads it", lambda: mnemos.load_state(tmp_path / "stream", model)),
        ("expected a folder .*gone to write in", lambda: mnemos.save_state(h, tmp_path / "gone" / "x")),
        ("expected weights in memory to hash, found none of", lambda: mnemos.save_state(h, file, unloaded)),
        ("found a folder; name a file in it", lambda: mnemos.load_state(tmp_path, model)),
        (r"call save_state\(state, file, model\)", lambda: mnemos.save_state(file, state, model)),
        ("bfloat16, int8 or None, found 'int4'", lambda: mnemos.save_state(h, file, dtype="int4")),
    ):
        with pytest.raises(InputError, match=words) as error:
            call()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(("dtype", "bound", "bits"), [("bfloat16", 2**-8, 16), ("int8", 1 / 2000, 12.6)])
def test_smaller_states_are_right_to_their_bits(tmp_path, dtype, bound, bits):
    state = {"s": torch.randn(3, 2, 24, 64).double(), "odd": torch.randn(3, 5)}
    state |= {"n": torch.arange(3), "v": torch.ones(3)}
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


def _rewritten(file, change) -> None:
    """Write a file again after change(header, tensors), with the hash of what it then has."""
    with safe_open(str(file), "pt") as opened:
        header, tensors = opened.metadata(), {n: opened.get_tensor(n).clone() for n in opened.keys()}  # noqa: SIM118
    change(header, tensors)
    save_file(tensors, str(file), header | {"sha256": tree_file.digest(tensors, header.get("tree", ""))})


@pytest.mark.parametrize("dtype", [None, "bfloat16", "int8"])
def test_a_byte_changed_anywhere_is_an_error_or_changes_nothing(tmp_path, dtype, exhaustive):
    state, file = {"n": 7, "x": torch.randn(2, 3), "i": torch.arange(2)}, tmp_path / "x"
    mnemos.save_state(state, file, torch.nn.Linear(1, 1), dtype)
    whole, saved = file.read_bytes(), mnemos.load_state(file, like=state)
    for place in range(0, len(whole), 1 if exhaustive else 11):
        bit = (1, 32, 128)[place % 3]
        file.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
        try:
            found = mnemos.load_state(file, like=state)
        except InputError:
            continue
        assert found["n"] == 7
        assert all(map(torch.equal, leaves(found), leaves(saved))), place
    for length in range(0, len(whole), 47):
        file.write_bytes(whole[:length])
        with pytest.raises(InputError):
            mnemos.load_state(file, like=state)


def test_a_file_of_other_parts_or_shapes_is_refused_before_it_takes_memory(tmp_path):
    model, file = built(), tmp_path / "x"

    def tensor(name: str, change):
        return lambda header, tensors: tensors.update({f"parts/{name}": change(tensors["parts/2"])})

    def header(name: str, old: str, new: str):
        return lambda header, tensors: header.update({name: header[name].replace(old, new)})

    second = '{"tensor": "parts/2"}'
    for change in (
        tensor("0", lambda x: torch.empty(200_000, 0, dtype=torch.int64)),
        tensor("0", lambda x: torch.empty(2**40, 0, dtype=torch.int64)),
        tensor("0", lambda x: torch.tensor(1)),
        tensor("2", lambda x: torch.cat([x] * 2, 0)),
        tensor("2", lambda x: torch.cat([x] * 2, 1)),
        tensor("2", torch.Tensor.long),
        tensor("99", lambda x: x + 1),
        lambda header, tensors: tensors.pop("parts/2"),
        lambda header, tensors: header.pop("tree"),
        header("tree", second, f'{{"dict": {{"dtype": "float32", "values": {second}}}}}'),
        header("tree", second, f'{{"dict": {{"dtype": "nn", "values": {second}, "scale": 1, "error": 1}}}}'),
        header("tree", second, "2"),
        header("tree", "[", "[["),
        header("tree", "seen", "read"),
        header("tree", "32", "33"),
        header("tree", '"weights": "', '"weights": "0'),
        header("tree", '{"dict"', '{"list"'),
        header("format", "3", "1"),
    ):
        Stream(model).prefill(ids(3)[None]).save(file)
        _rewritten(file, lambda header, tensors: None)
        Stream.restore(model, file)
        _rewritten(file, change)
        started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(InputError) as error:
            Stream.restore(model, file)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - started < 100_000  # kilobytes
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("scale", lambda x: x[:1]),  # this would be broadcast
        ("error", lambda x: x[..., :2].contiguous()),
    ],
)
def test_scales_and_errors_of_other_shapes_are_refused(tmp_path, name, change):
    x, file = torch.randn(2, 3, 5), tmp_path / "x"
    mnemos.save_state(x, file, dtype="int8")
    _rewritten(file, lambda header, tensors: None)
    assert (mnemos.load_state(file, like=x) - x).abs().max() < 1e-2
    _rewritten(file, lambda header, tensors: tensors.update({f"parts/0/{name}": change(tensors[f"parts/0/{name}"])}))
    with pytest.raises(InputError, match=r"found parts that do not fit .*scales of other shapes"):
        mnemos.load_state(file, like=x)


def test_a_state_of_other_names_heads_rows_or_types_is_refused(tmp_path):
    file, x = tmp_path / "x", torch.randn(2, 3, 4)
    mnemos.save_state({"a": x, "b": x + 1}, file)
    for like in (
        {"b": x, "a": x},
        {"a": x, "c": x},
        (x, x),
        {"a": x, "b": x.double()},
        {"a": x, "b": x[:, :2]},
        {"a": x, "b": x[..., 0]},
        {"a": x, "b": 1},
    ):
        with pytest.raises(InputError):
            mnemos.load_state(file, like=like)
    found = mnemos.load_state(file, like={"a": x[:1], "b": x[:1, :0]})  # any rows; tokens where there were none
    assert torch.equal(found["b"], x + 1)
    for other in ({"a": x, "b": x[:1]}, {"a": x, "b": torch.tensor(1.0)}):  # no rows that all share: these shapes alone
        mnemos.save_state(other, file)
        assert all(map(torch.equal, leaves(mnemos.load_state(file, like=other)), leaves(other)))
        with pytest.raises(InputError):
            mnemos.load_state(file, like={"a": x, "b": x})
        with pytest.raises(InputError):
            mnemos.load_state(file, like={"a": x[:1], "b": other["b"]})
    model = built(attention="softmax")
    long, short = (model(ids(t)[None])[1] for t in (9, 4))
    mnemos.save_state(long, file)
    assert all(map(torch.equal, leaves(mnemos.load_state(file, like=short)), leaves(long)))  # any number of tokens
