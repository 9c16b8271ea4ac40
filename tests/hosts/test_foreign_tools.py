"""Cached hosts in tools that are not ours: adapters (LoRA), traces, offloading."""

import pytest
import torch
from decoder_models import plain
from hosts import cached, close, example, run

import mnemos
from mnemos import GRC
from mnemos.memory.gated_cache import caches


@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
@pytest.mark.parametrize("targets", [["query", "value"], ["query", "key", "value", "dense"], "all-linear"])
@pytest.mark.parametrize("preset", ["paper", "official", "mnemos"])
def test_adapters_wrap_the_host_alone(preset, targets):
    """By names that modules of the cache could have too, or all linear maps; at first they add nothing."""
    model, inputs = cached("hf_bert", preset), example("hf_bert")
    peft = pytest.importorskip("peft")  # which imports transformers, as mnemos does first
    expected = run(model, inputs)
    contents = [branch.cache.clone() for branch in caches(model)]
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets))
    wrapped = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    assert len(wrapped) >= 4
    assert not any(".grc." in name for name in wrapped)
    for branch in caches(model):
        branch.requires_grad_(True)
    run(model.train(), inputs).square().sum().backward()  # the gates of a frozen cache have none in eval
    assert all(p.grad is not None for branch in caches(model) for p in branch.parameters())
    used = [p.grad is not None for name, p in model.named_parameters() if "lora_B" in name]
    assert sum(used) >= len(used) - 1  # BERT's pooler is not part of this output
    mnemos.memory.clear_caches(model)
    for branch, content in zip(caches(model), contents, strict=True):
        branch.cache.copy_(content)
    close(run(model.eval(), inputs), expected)


@pytest.mark.parametrize("preset", ["paper", "official", "mnemos"])
@pytest.mark.filterwarnings("ignore")
def test_a_trace_in_grad_mode_has_operators_alone(preset):
    """A format that is made of a trace (TorchScript, ONNX) does not know our functions."""
    model = cached("torch_encoder", preset).layers[0]
    x, other = (example("torch_encoder", seed=seed).args[0] for seed in (2, 7))
    traced = torch.jit.trace(model, x, check_trace=False)
    assert not [node.kind() for node in traced.inlined_graph.nodes() if "Python" in node.kind()]
    close(traced(other), model(other), 1e-6)  # the scale of the scores is a constant in float32
    with torch.no_grad():  # nothing of a frozen cache becomes a constant
        model(x)
        traced = torch.jit.trace(model, x, check_trace=False)
        before = traced(x)
        model.self_attn.grc.to_value.weight.mul_(-2)
        assert not torch.equal(traced(x), before)


CHANGES = {
    "linearised": lambda model: mnemos.linearise(model, window=6, sinks=2, rank=2),
    "stream": lambda model: mnemos.cache(model, GRC(length=4, block=4, scope="stream", mix="heads")),
    "shared": lambda model: mnemos.cache(model, GRC(length=4, block=4, candidate="layernorm_gelu")),
    "frozen": lambda model: mnemos.cache(model, GRC(length=4, block=4, inference="frozen")),
}


class Logits(torch.nn.Module):
    """A decoder as traces call it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(ids, attention_mask=mask, use_cache=False).logits


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["linearised", "stream"])
def test_a_traced_decoder_serves_other_padding(name):
    """What a mask says is not made a constant, whether it has padding or none, and was read before the trace or not."""
    model = plain("llama", num_hidden_layers=1)
    CHANGES[name](model)
    for key, parameter in model.named_parameters():
        if key.endswith(".mix"):
            parameter.data.zero_()  # half open gates
    ids = torch.randint(3, 40, (2, 16), generator=torch.Generator().manual_seed(1))
    valid = torch.ones_like(ids), torch.ones_like(ids)
    valid[1][1, :5] = 0
    causal, itself = torch.ones(16, 16).tril().bool(), torch.eye(16).bool()
    masks = [(causal & one[:, None, None].bool()) | (itself & one[:, None, :, None].bool()) for one in valid]
    with torch.no_grad():
        Logits(model)(ids, masks[0])
        for at_trace, later in (valid, valid[::-1], masks):
            traced = torch.jit.trace(Logits(model), (ids, at_trace), check_trace=False)
            wanted = Logits(model)(ids, later)
            # The scale of the scores is a constant in float32.
            counts = later.diagonal(dim1=-2, dim2=-1)[:, 0] if later.dim() == 4 else later > 0
            torch.testing.assert_close(traced(ids, later)[counts], wanted[counts], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CHANGES)
def test_new_weights_may_be_offloaded(name: str) -> None:
    """accelerate keeps weights elsewhere between the calls of modules, also those that are read without a call."""
    accelerate = pytest.importorskip("accelerate")
    model = plain("llama").float()
    CHANGES[name](model)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "grc" in key or "linearised" in key:
                parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(key)))
    x = torch.randint(3, 40, (2, 17), generator=torch.Generator().manual_seed(1))
    wanted = model(x).logits.detach()
    accelerate.cpu_offload(model, execution_device="cpu")
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    torch.testing.assert_close(model(x).logits.detach(), wanted)
    options = {"max_new_tokens": 3, "do_sample": False, "use_cache": True}
    assert torch.equal(model.generate(x, **options)[:, 17], wanted[:, -1].argmax(-1))
