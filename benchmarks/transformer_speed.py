"""Speed of the plain Transformer compared with torch.nn.TransformerEncoder and a Hugging Face encoder of equal shape.

    python benchmarks/transformer_speed.py [--pairs 15] [--out results/transformer_speed.json]

All three use the same embedding, head and weights. First, their outputs must agree. A round times each of them once, in
an order that rotates, so that changes of the machine's speed affect all of them equally.
"""

import os
import statistics
from collections.abc import Callable

import torch
from command import command, quartiles, write
from torch import Tensor, nn

from mnemos import Transformer, TransformerConfig, libraries
from mnemos.lab.measure.timing import race
from mnemos.models.transformer import HeadConfig
from mnemos.ops.positions import sinusoids

SHAPES = {
    "demo": {"batch": 64, "tokens": 24, "dim": 64, "layers": 2, "num_heads": 4, "mlp": 128},
    "small": {"batch": 16, "tokens": 256, "dim": 256, "layers": 4, "num_heads": 8, "mlp": 1024},
    "long": {"batch": 4, "tokens": 1024, "dim": 256, "layers": 4, "num_heads": 8, "mlp": 1024},
}
VOCABULARY, CLASSES = 64, 10


class WithEmbedding(nn.Module):
    """A peer's encoder with the embedding, fixed positions and head of our model."""

    def __init__(self, ours: Transformer, encoder: nn.Module, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(ours.embedding.weight.detach().clone(), freeze=False)
        self.register_buffer("positions", sinusoids(torch.arange(tokens), ours.config.dim)[None])
        self.encoder = encoder
        self.norm, self.head = nn.LayerNorm(ours.config.dim), nn.Linear(ours.config.dim, CLASSES)
        self.norm.load_state_dict(ours.final_norm.state_dict())
        self.head.load_state_dict(ours.head.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        y = self.encoder(self.embedding(x) + self.positions)
        y = getattr(y, "last_hidden_state", y)
        return self.head(self.norm(y.mean(1)))


class Ours(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)[0]


def torch_encoder(ours: Transformer) -> nn.Module:
    c = ours.config
    layer = nn.TransformerEncoderLayer(c.dim, c.num_heads, c.mlp, 0.0, "gelu", batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, c.layers, enable_nested_tensor=False)
    for block, peer in zip(ours.blocks, encoder.layers, strict=True):
        peer.self_attn.in_proj_weight.data.copy_(block.attention.qkv.weight)
        peer.self_attn.in_proj_bias.data.copy_(block.attention.qkv.bias)
        copies = [(peer.self_attn.out_proj, block.attention.output), (peer.linear1, block.mlp.expand)]
        copies += [(peer.linear2, block.mlp.contract), (peer.norm1, block.attention_norm), (peer.norm2, block.mlp_norm)]
        for a, b in copies:
            a.load_state_dict(b.state_dict())
    return encoder


class HuggingFace(nn.Module):
    """The layers of the ViT in transformers, in sequence: pre-norm, softmax by scaled_dot_product_attention."""

    def __init__(self, ours: Transformer) -> None:
        super().__init__()
        libraries.transformers()  # also where torchvision was built for another PyTorch
        from transformers import ViTConfig, ViTModel

        c = ours.config
        config = ViTConfig(
            hidden_size=c.dim,
            num_hidden_layers=c.layers,
            num_attention_heads=c.num_heads,
            intermediate_size=c.mlp,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            layer_norm_eps=1e-5,
            attn_implementation="sdpa",
        )
        whole = ViTModel(config, add_pooling_layer=False)
        holder = next(
            m for m in whole.modules() if isinstance(getattr(m, "layers", getattr(m, "layer", None)), nn.ModuleList)
        )
        self.layers = getattr(holder, "layers", getattr(holder, "layer", None))
        for block, peer in zip(ours.blocks, self.layers, strict=True):
            self._copy(block, peer)

    @staticmethod
    def _copy(block: nn.Module, peer: nn.Module) -> None:
        linears = [m for m in peer.modules() if isinstance(m, nn.Linear)]
        norms = [m for m in peer.modules() if isinstance(m, nn.LayerNorm)]
        weights = [*block.attention.qkv.weight.chunk(3), block.attention.output.weight]
        biases = [*block.attention.qkv.bias.chunk(3), block.attention.output.bias]
        weights += [block.mlp.expand.weight, block.mlp.contract.weight]
        biases += [block.mlp.expand.bias, block.mlp.contract.bias]
        for linear, weight, bias in zip(linears, weights, biases, strict=True):
            linear.weight.data.copy_(weight)
            linear.bias.data.copy_(bias)
        for norm, source in zip(norms, (block.attention_norm, block.mlp_norm), strict=True):
            norm.load_state_dict(source.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return x


def contestants(shape: dict[str, int]) -> tuple[dict[str, nn.Module], Tensor, Tensor]:
    torch.manual_seed(0)
    fields = {k: shape[k] for k in ("dim", "layers", "num_heads", "mlp")}
    head = HeadConfig(classes=CLASSES, pool="mean")
    sizes = {"vocab_size": VOCABULARY, "max_length": shape["tokens"], **fields}
    ours = Transformer(TransformerConfig.classic(**sizes, causal=False, head=head))
    models = {
        "mnemos": Ours(ours),
        "torch.nn.TransformerEncoder": WithEmbedding(ours, torch_encoder(ours), shape["tokens"]),
        "transformers ViT": WithEmbedding(ours, HuggingFace(ours), shape["tokens"]),
    }
    x = torch.randint(VOCABULARY, (shape["batch"], shape["tokens"]))
    y = torch.randint(CLASSES, (shape["batch"],))
    sizes = {name: sum(p.numel() for p in m.parameters() if p.requires_grad) for name, m in models.items()}
    assert len(set(sizes.values())) == 1, sizes
    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            wanted = models["mnemos"].train(mode)(x)
            for name, model in models.items():
                torch.testing.assert_close(model.train(mode)(x), wanted, atol=2e-4, rtol=2e-4, msg=name)
    return models, x, y


def work(model: nn.Module, x: Tensor, y: Tensor, mode: str) -> Callable[[], None]:
    if mode == "forward":
        model.eval()

        def run() -> None:
            with torch.no_grad():
                model(x)

        return run
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

    def run() -> None:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def main() -> None:
    parser = command(__doc__, choices={"shapes": SHAPES}, pairs=21, shapes=list(SHAPES))
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    rows = []
    for name in options.shapes:
        models, x, y = contestants(SHAPES[name])
        for mode in ("step", "forward"):
            times = race({n: work(m, x, y, mode) for n, m in models.items()}, options.pairs)
            medians = {n: statistics.median(t) for n, t in times.items()}
            best = min((n for n in medians if n != "mnemos"), key=medians.__getitem__)
            row = {"shape": name, "mode": mode, "ms": {n: 1e3 * m for n, m in medians.items()}, "fastest peer": best}
            rows.append(row | {"ratio to it": quartiles(times, "mnemos", best)})
            print(rows[-1], flush=True)
    write(options.out, {"pairs": options.pairs, "shapes": SHAPES, "rows": rows})


if __name__ == "__main__":
    main()
