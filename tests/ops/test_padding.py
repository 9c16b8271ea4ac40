"""The order that brings valid tokens together, in eager mode and in ONNX."""

import pytest
import torch

from mnemos.ops.padding import valid_first, valid_last


class Order(torch.nn.Module):
    def forward(self, mask):
        return valid_first(mask), valid_last(mask)


def test_the_order_is_that_of_a_stable_sort_also_in_onnx(tmp_path):
    masks = torch.rand(4, 9, generator=torch.Generator().manual_seed(0)) < torch.tensor([[0.0], [0.4], [0.8], [1.1]])
    wanted = tuple(keys.long().argsort(dim=1, stable=True) for keys in (~masks, masks))
    assert all(map(torch.equal, Order()(masks), wanted))
    assert all(order.shape == (3, 0) for order in Order()(masks[:3, :0]))
    runtime = pytest.importorskip("onnxruntime")
    torch.onnx.export(Order(), (masks,), str(tmp_path / "order.onnx"), dynamo=False, input_names=["mask"])
    found = runtime.InferenceSession(tmp_path / "order.onnx").run(None, {"mask": masks.numpy()})
    assert all(torch.equal(torch.from_numpy(one), other) for one, other in zip(found, wanted, strict=True))
