"""A signature names the tensor that does not fit, what was expected and what was found."""

import pytest
import torch

from mnemos.errors import InputError
from mnemos.ops.signature import MOST, Signature

CHECK = Signature(
    "f", "; use g", q="B T K D", decay="B T H | B T H D ?", mask="B T bool ?", index="B T int ?", s="B H ?"
)
Q, H = torch.zeros(2, 3, 1, 4), 5


def test_sizes_are_returned_by_letter_and_looked_up():
    for _ in range(2):
        assert CHECK(q=Q, mask=None) == {"B": 2, "T": 3, "K": 1, "D": 4}
        sizes = CHECK(q=Q, decay=torch.zeros(2, 3, H, 4), mask=torch.ones(2, 3, dtype=torch.bool), s=torch.zeros(2, H))
        assert sizes == {"B": 2, "T": 3, "K": 1, "D": 4, "H": H}
    for t in range(MOST + 1):  # the memory of what was accepted is bounded
        assert CHECK(q=torch.zeros(1, t, 1, 1))["T"] == t
    assert len(CHECK._accepted) <= MOST


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"q": Q[0]}, r"floating q \[B, T, K, D\], found torch.float32 \[3, 1, 4\]; use g"),
        ({"q": None}, "floating q .*, found None"),
        ({"decay": Q[..., 0, :2, None]}, r"floating decay \[B=2, T=3, H\] or \[B=2, T=3, H, D=4\] or None, found"),
        ({"s": torch.zeros(2, 4, device="meta")}, "all tensors on one device, found cpu and for s meta"),
        ({"mask": torch.ones(2, 2, dtype=torch.bool)}, r"found torch.bool \[2, 2\]"),
        (
            {"decay": torch.zeros(2, 3, H), "s": torch.zeros(2, 4)},
            r"s \[B=2, H=5\] or None, found torch.float32 \[2, 4\]",
        ),
    ],
)
def test_what_does_not_fit_is_named(changed, words):
    with pytest.raises(InputError, match=f"^f: expected .*{words}"):
        CHECK(**{"q": Q, **changed})


def test_a_compiled_call_is_checked_for_any_size():
    compiled = torch.compile(lambda q: CHECK(q=q)["T"] * q, backend="eager", fullgraph=True, dynamic=True)
    assert compiled(Q).shape == Q.shape
    assert compiled(Q[:, :2]).shape == (2, 2, 1, 4)
    with pytest.raises(InputError, match="floating q"):
        CHECK(q=Q.int())
