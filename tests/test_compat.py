"""The private parts of PyTorch that mnemos uses. A failure here after an upgrade says which one has changed."""

import gc
import re
from types import SimpleNamespace

import pytest
import torch
from sources import SOURCE
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import mnemos
from mnemos import GRC, _compat
from mnemos.attention import GatedCacheAttention, SoftmaxConfig
from mnemos.memory.gated_cache import recomputing
from mnemos.models.lstm import LSTM, LSTMConfig
from mnemos.ops import linear_attention

# Where PyTorch keeps private names that an instance or a subclass could reach.
INSTANCES = [nn.Module(), torch.zeros(1), torch.optim.SGD([nn.Parameter(torch.zeros(1))]), torch.ops.aten.add.Tensor]
THEIRS = {name for one in INSTANCES for name in dir(one) if name.startswith("_") and not name.startswith("__")}
THEIRS |= {"_shutdown_workers", "modules_buffers", "require_forward_param_sync"}  # the last two are undocumented


# Imported, below a module of torch, or a name of its classes: read, overridden by a method, or in a string.
PRIVATE = re.compile(
    r"\b(?:torch|nn|F)(?:\.\w+)*\._(?!pytree)[a-zA-Z]|^ *from torch[\w.]*(?:\._\w+| import .*\b_[a-zA-Z])"
    rf"|(?:\.|^ +def |['\"])(?:{'|'.join(THEIRS)})\b",
    re.MULTILINE,
)


def test_nothing_else_names_a_private_part():
    uses = {path: PRIVATE.findall(path.read_text()) for path in SOURCE.rglob("*.py")}
    assert len(uses.pop(SOURCE / "_compat/__init__.py")) > 10  # the search finds them where they are
    assert {str(path): found for path, found in uses.items() if found} == {}


def test_the_search_finds():
    for text in (
        "import torch\ntorch._C._f()",
        "F._pad(x)",
        "from torch.utils import _pytree",
        "x._version",
        "getattr(m, '_parameters')",
        "class A(B):\n    def _apply(self): ...",
    ):
        assert PRIVATE.search(text), text


def test_functions_of_torch_c_and_dictionaries_of_modules_are_there():
    functions = "_transforms_active _is_batched _unseen _dispatch_modes _function_modes _graph_task"
    assert [name for name in functions.split() if getattr(_compat, name) is None] == [], torch.__version__
    names = "_parameters _buffers _modules _forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks"
    assert set(names.split()) <= nn.Module().__dict__.keys(), torch.__version__


def test_other_names_are_there():
    assert torch.zeros(1)._version == 0
    assert torch.ops.aten.add.Tensor._overloadpacket is torch.ops.aten.add
    assert torch.ops.aten.add_.Tensor._schema.arguments[0].alias_info.is_write
    for name in ("forward", "forward_pre", "backward", "backward_pre"):
        assert hasattr(nn.modules.module, f"_global_{name}_hooks")
    names = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
    assert len(_compat.operators(*names, "_unsafe_view", "no_such_operator")) == 3
    assert _compat.packed_products() is not None
    assert _compat.dense_product() is not None
    assert [_compat.is_elementary(one) for one in (torch.ops.aten.mm.default, torch.ops.aten.linear.default)] == [1, 0]
    assert hasattr(iter(torch.utils.data.DataLoader([1], num_workers=1)), "_shutdown_workers")

    def function():
        return 1

    assert torch.compiler.assume_constant_result(function)._dynamo_marked_constant is True


def test_distributed_wrappers_tell_what_they_broadcast():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.BatchNorm1d(3))
        assert wrapped.will_sync_module_buffers()
        assert len(wrapped.modules_buffers) == 3
        assert wrapped.process_group is not None
        assert wrapped.require_forward_param_sync
        _compat.share_buffers(wrapped)
        assert not wrapped.require_forward_param_sync
        _compat.expect_forward(wrapped)
        with wrapped.no_sync():
            wrapped(torch.randn(2, 3))
        assert not _compat.had_forward(wrapped)
        wrapped(torch.randn(2, 3))
        assert _compat.had_forward(wrapped)
        unknown = SimpleNamespace()  # the fallback
        assert _compat.expect_forward(unknown)
        assert _compat.had_forward(unknown)
        del wrapped.modules_buffers
        wrapped.require_forward_param_sync = True
        _compat.share_buffers(wrapped)  # the fallback
    finally:
        # DDP goes before its processes do: the last to let go of them must not hold Python's lock.
        del wrapped
        gc.collect()
        dist.destroy_process_group()


@pytest.mark.parametrize("missing", [None, "_transforms_active", "_is_batched"])
def test_a_transform_is_noticed(monkeypatch, missing):
    if missing:
        monkeypatch.setattr(_compat, missing, None)
    assert _compat.transformed(torch.zeros(2)) == (missing is not None)
    seen = []
    torch.vmap(lambda x: (seen.append(_compat.transformed(x)), x)[1])(torch.zeros(2))
    x = torch.ones(2, requires_grad=True)
    y = x.square()
    y.register_hook(lambda g: seen.append(_compat.transformed(g)))
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)
    assert seen == [True, True]


@pytest.mark.parametrize("missing", [False, True])
def test_modes_are_noticed(monkeypatch, missing):
    if missing:
        monkeypatch.setattr(_compat, "_dispatch_modes", None)
        monkeypatch.setattr(_compat, "_function_modes", None)
    assert _compat.dispatch_mode_active() == _compat.function_mode_active() == missing
    with FlopCounterMode(display=False):
        assert _compat.dispatch_mode_active()
    with torch.device("cpu"):
        assert _compat.function_mode_active()


@pytest.mark.parametrize("name", ["_transforms_active", "_is_batched", "_dispatch_modes", "_graph_task"])
def test_without_a_private_function_results_are_the_same(monkeypatch, name):
    """The gated cache's update, and linear attention, forward and backward."""

    def results():
        torch.manual_seed(0)
        layer = mnemos.attention.GatedCacheAttention(8, 2, grc=mnemos.GRC(length=3))
        x = torch.randn(2, 5, 8, requires_grad=True)
        y = layer(x)[0]
        q = x.view(2, 5, 2, 4)
        z, _ = linear_attention(q, q, q, causal=True)
        (y.sum() + z.square().sum()).backward()
        return [y, z, x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]

    expected = results()
    monkeypatch.setattr(_compat, name, None)
    for a, b in zip(results(), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_is_noticed(monkeypatch, missing, reentrant):
    if missing:
        monkeypatch.setattr(_compat, "_graph_task", None)
    seen = []

    def forward(x):
        seen.append(recomputing())
        return x.exp()

    x = torch.zeros(2, requires_grad=True)
    checkpoint(forward, x, use_reentrant=reentrant).sum().backward()
    assert seen == [False, True]
    assert not recomputing()


def test_what_runs_around_a_forward_or_in_its_place_is_noticed():
    module = nn.Linear(1, 1)
    assert _compat.is_plain(module)
    for name in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
        for register in (getattr(module, f"register_{name}"), getattr(nn.modules.module, f"register_module_{name}")):
            with register(lambda *_: None):
                assert not _compat.is_plain(module)
            assert _compat.is_plain(module)
    module.forward = module.forward
    assert not _compat.is_plain(module)
    del module.forward
    del module.__dict__["_forward_hooks"]
    assert not _compat.is_plain(module)


def test_every_models_state_has_a_name_in_files(tmp_path):
    """torch.export.save stores the structure of states by these names, and loads their classes without their code."""
    softmax = SoftmaxConfig().build(8, 2, causal=True)
    small = {"vocab_size": 9, "dim": 8, "num_heads": 2}
    states = [
        linear_attention(*torch.randn(3, 1, 2, 1, 4))[1],
        GatedCacheAttention(8, 2, softmax, GRC(length=2, scope="stream", block=2), True).initial_state(1),
        mnemos.Transformer(**small).initial_state(1),
        mnemos.Memformer(**small, encoder_layers=1, decoder_layers=1, segment=4).initial_state(1),
        LSTM(LSTMConfig(vocab_size=9, dim=8, layers=1)).initial_state(1),
    ]
    for state in states:
        assert state is not None
        _, structure = _compat.pytree.tree_flatten(state)
        assert _compat.pytree.treespec_loads(_compat.pytree.treespec_dumps(structure)) == structure
    torch.save(states[0], tmp_path / "inputs")  # examples of which are in the file of a program
    assert type(torch.load(tmp_path / "inputs", weights_only=True)) is type(states[0])


def test_hooks_before_a_forward_and_on_gradients_are_found():
    module = nn.Linear(2, 2)
    hook = lambda _, args: (args[0] * 0,)  # noqa: E731
    module.register_forward_pre_hook(hook)
    x = torch.ones(1, 2)
    assert torch.equal(module(x)[0], module.bias)
    hooks = _compat.pre_hooks_of(module)
    (key,) = [key for key, found in hooks.items() if found is hook]
    del hooks[key]
    assert not torch.equal(module(x)[0], module.bias)
    assert _compat.gradient_hooks_of(module.bias) == []
    module.bias.register_hook(torch.neg)
    assert _compat.gradient_hooks_of(module.bias) == [torch.neg]
