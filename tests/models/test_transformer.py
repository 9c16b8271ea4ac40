"""The Transformer's assembly: positions, norms, heads, saving, and what it refuses."""

import dataclasses

import pytest
import torch
from refusals import refuses

import mnemos
from mnemos import GRC, BlockSparseConfig, InputError, Transformer, TransformerConfig, libraries
from mnemos.attention import DeltaConfig, LinearConfig, RelativeConfig, RetentionConfig, SoftmaxConfig
from mnemos.models.transformer import HeadConfig, LearnedPositions, SinusoidalPositions

SMALL = TransformerConfig(vocab_size=11, dim=16, layers=2, num_heads=2, mlp=32, max_length=12)


def model(**fields) -> Transformer:
    torch.manual_seed(0)
    return Transformer(dataclasses.replace(SMALL, **fields)).eval()


def ids(t: int = 9) -> torch.Tensor:
    return torch.randint(11, (2, t), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("built", [mnemos.Transformer, mnemos.Memformer])
def test_with_rms_what_a_block_adds_starts_smaller(built):
    """Xavier's bound, divided by √(2L) of L blocks; with LayerNorm undivided."""
    for norm, factor in (("rms", 4**-0.5), ("pre", 1.0)):
        sizes = {"layers": 2} if built is mnemos.Transformer else {"encoder_layers": 2, "decoder_layers": 2}
        modules = built(vocab_size=11, dim=32, num_heads=2, norm=norm, **sizes).named_modules()
        added = [m.weight for name, m in modules if name.endswith((".output", ".contract")) and "blocks" in name]
        assert len(added) >= 4
        for weight in added:
            assert 0.9 * factor < weight.abs().max() / (6 / sum(weight.shape)) ** 0.5 <= factor


@pytest.mark.parametrize("fields", [{"norm": "pre", "activation": "gelu"}, {}])
def test_hooks_see_and_keep_the_same_without_gradient(fields):
    transformer = model(**fields)
    for part in transformer.modules():
        if isinstance(part, torch.nn.GELU):
            part.approximate = "tanh"
    without_hooks, kept = torch.no_grad()(transformer)(ids())[0], ({}, {})
    for name, part in transformer.named_modules():
        part.register_forward_hook(lambda part, x, y, name=name: kept[torch.is_grad_enabled()].update({name: y}))
    torch.testing.assert_close(transformer(ids())[0], without_hooks)
    torch.no_grad()(transformer)(ids())
    torch.testing.assert_close(*[{k: y for k, y in one.items() if isinstance(y, torch.Tensor)} for one in kept])


def test_a_row_that_has_all_its_positions_may_be_padded_while_others_go_on():
    transformer, mask = model(position="learned"), torch.ones(2, 12, dtype=torch.bool)
    mask[1, 5:] = False
    _, state = transformer(ids(12), None, mask)
    x, only_second = ids(3), torch.tensor([[False] * 3, [True] * 3])
    y, after = transformer(x, state, only_second)
    assert after.seen.tolist() == [12, 8]
    alone, _ = transformer(torch.cat([ids(12)[1:, :5], x[1:]], 1))
    torch.testing.assert_close(y[1:], alone[:, 5:])
    refuses("12 tokens, found 13", transformer, x, state, ~only_second & (torch.arange(3) == 0))


def test_positions_of_a_stream_compile_without_a_graph_break():
    kinds, given = (LearnedPositions(12, 4), SinusoidalPositions()), (torch.zeros(2, 3, 4), torch.tensor([5, 0]))

    def run(*given):
        return [kind(*given) for kind in kinds]

    torch.testing.assert_close(torch.compile(run, backend="eager", fullgraph=True)(*given), run(*given))


@torch.no_grad()
def test_a_branch_shares_the_keys_of_its_rows():
    """That it says what copied rows say: the searches of language models."""
    network, rows = model(), torch.tensor([0, 0, 2, 5, 4, 4])
    _, before = network(ids(3)[:, :1].repeat(3, 1), network.branch(network(ids(4))[1], 3))
    after = mnemos.select(before, rows)
    assert after.layers[0].k.data_ptr() == before.layers[0].k.data_ptr()
    assert model(causal=False, head=HeadConfig(classes=2)).branch(None, 3) is None


def test_default_positions_suit_the_attention():
    """Rotary where queries and keys can be rotated, none where scores know distances, and sinusoids where neither."""
    for name, fields in (
        ("rotary", {"attention": LinearConfig()}),
        ("none", {"attention": RelativeConfig(memory=3)}),
        ("none", {"attention": RetentionConfig()}),
        ("sinusoidal", {"attention": BlockSparseConfig(block=2), "causal": False, "head": HeadConfig(classes=3)}),
    ):
        assert model(**fields).config.resolved_position == name
    odd = model(dim=14, num_heads=2)  # no pairs of channels to rotate
    assert odd.config.resolved_position == "sinusoidal"
    assert odd.config.embedding_scale == 14**0.5


def test_a_block_is_llamas():
    """With one head's worth of equal weights the default block is that of transformers' Llama."""
    transformers = libraries.transformers()
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    settings = transformers.LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6, tie_word_embeddings=False
    )
    theirs = transformers.LlamaForCausalLM(settings).double().eval()
    ours = Transformer(
        vocab_size=11, dim=16, layers=2, num_heads=4, mlp=24, attention=SoftmaxConfig(kv_heads=2)
    ).double()
    for p in theirs.parameters():
        torch.nn.init.normal_(p)
    with torch.no_grad():
        for p in ours.parameters():
            p.zero_()  # biases
        for ours_, theirs_ in zip(ours.blocks, theirs.model.layers, strict=True):
            a, m = theirs_.self_attn, theirs_.mlp
            # Llama rotates channel i with i + d/2, and this library 2i with 2i + 1.
            q, k = (x.weight.unflatten(0, (-1, 2, 2)).transpose(1, 2).flatten(0, 2) for x in (a.q_proj, a.k_proj))
            ours_.attention.qkv.weight.copy_(torch.cat([q, k, a.v_proj.weight]))
            ours_.attention.output.weight.copy_(a.o_proj.weight)
            for name, part in (("gate", m.gate_proj), ("expand", m.up_proj), ("contract", m.down_proj)):
                getattr(ours_.mlp, name).weight.copy_(part.weight)
            ours_.attention_norm.weight.copy_(theirs_.input_layernorm.weight)
            ours_.mlp_norm.weight.copy_(theirs_.post_attention_layernorm.weight)
        ours.embedding.weight.copy_(theirs.model.embed_tokens.weight)
        ours.final_norm.weight.copy_(theirs.model.norm.weight)
        ours.head.weight.copy_(theirs.lm_head.weight)
        x = ids()
        torch.testing.assert_close(ours(x)[0], theirs(x).logits, atol=1e-5, rtol=1e-5)  # their angles are float32


def test_vectors_in_place_of_tokens():
    """A linear map takes the place of the embedding; gradients are as with tokens."""
    torch.manual_seed(0)
    network = Transformer(vocab_size=3, features=5, dim=16, layers=2, num_heads=2, mlp=32).double()
    x = torch.randn(2, 9, 5, dtype=torch.float64, requires_grad=True)
    first, state = network(x[:, :4])
    torch.testing.assert_close(torch.cat([first, network(x[:, 4:], state)[0]], 1), network(x)[0])
    assert torch.autograd.gradcheck(lambda x: network(x)[0], x, fast_mode=True)
    assert not network.autoregressive
    for wrong in ((ids(),), (x[:, :0],), (x, None, torch.ones(2, 4, dtype=torch.bool)), (x, None, torch.ones(2, 9))):
        with pytest.raises(InputError):
            network(*wrong)


def test_a_stream_goes_on_beyond_the_positions_of_training():
    """Two windows of 4 tokens reach 6 tokens back: what is said is the same after 8 tokens and after 400."""
    network, x = model(attention=SoftmaxConfig(window=4)), ids(400)
    assert network.config.resolved_position == "rotary"
    near, far = network(x[:, -8:])[0][:, -1], network(x)[0][:, -1]
    torch.testing.assert_close(far, near, atol=1e-4, rtol=1e-4)


def test_scaled_embeddings_are_the_embeddings_times_the_root_of_the_width():
    scaled, plain = model(scale_embedding=True), model()
    assert not torch.allclose(scaled(ids())[0], plain(ids())[0])
    with torch.no_grad():
        plain.embedding.weight *= 4
    torch.testing.assert_close(scaled(ids())[0], plain(ids())[0])


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_blocks_of_attention_alone(norm):
    torch.manual_seed(0)
    ours = Transformer(vocab_size=5, dim=16, layers=2, num_heads=2, mlp=0, norm=norm, position="none").eval()
    assert not any("mlp" in name for name, _ in ours.named_parameters())
    x = torch.randint(5, (2, 7))
    y = ours.embedding(x)
    for block in ours.blocks:
        attended = block.attention(block.attention_norm(y) if norm == "pre" else y)[0]
        y = y + attended if norm == "pre" else block.attention_norm(y + attended)
    torch.testing.assert_close(ours(x)[0], ours.head(ours.final_norm(y)))


@pytest.mark.parametrize("pool", ["cls", "mean", "last"])
@pytest.mark.parametrize("mask", [None, torch.tensor([[True] * 5 + [False] * 2, [False] * 3 + [True] * 4])])
def test_a_classifier_reads_one_vector_of_a_row(pool, mask):
    network, seen = model(causal=False, head=HeadConfig(classes=4, pool=pool)), {}
    network.blocks[-1].register_forward_hook(lambda module, args, outputs: seen.update(y=outputs[0]))
    network.final_norm.register_forward_pre_hook(lambda module, args: seen.update(read=args[0]))
    x = torch.randint(5, (2, 7))
    logits = network(x, None, mask)[0]
    valid = [[*range(7)]] * 2 if mask is None else [row.nonzero()[:, 0].tolist() for row in mask]
    for y, read, tokens in zip(seen["y"], seen["read"], valid, strict=True):
        wanted = {"cls": y[0], "mean": y[tokens].mean(0), "last": y[tokens[-1]]}[pool]
        torch.testing.assert_close(read, wanted)
    for row, tokens in enumerate(valid):  # padding in front leaves the class token to be read
        torch.testing.assert_close(network(x[row : row + 1, tokens])[0][0], logits[row])


def test_a_classifier_has_no_weights_to_tie():
    assert model(head=HeadConfig(classes=3, pool="last", tied=True))(ids())[0].shape == (len(ids()), 3)


def test_a_cache_as_long_as_the_sequence():
    causal, whole = model(cache=GRC()), model(cache=GRC(), causal=False, head=HeadConfig(classes=3))
    assert whole.blocks[0].attention.cache.shape[0] == 12
    assert causal.blocks[0].attention.cache.shape[0] == 1, "a causal one is updated several times a sequence"


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda: model(num_heads=3), "num_heads may be 1, 2, 4"),
        (lambda: model(norm="sandwich"), "'pre' or 'post'"),
        (lambda: Transformer(dmi=16), "did you mean 'dim'"),
        (lambda: Transformer(attention=RelativeConfig(), position="rotary"), r"position: .*relative"),
        (lambda: Transformer(cache=LinearConfig()), r"model.cache: expected a GRC or None, found LinearConfig\("),
        (lambda: Transformer(attention=LinearConfig), r"found the class LinearConfig; write LinearConfig\(\)"),
        (lambda: Transformer(head={"classes": 3}), r"expected a HeadConfig, found {'classes': 3}; write HeadConfig\("),
        (lambda: model(cache=GRC(), attention=DeltaConfig()), "model.cache: expected an attention of heads.*'delta'"),
        (lambda: model(head=HeadConfig(classes=-1)), "of at least 0, found -1 and 0"),
        (lambda: model(head=HeadConfig(hidden=-1)), "of at least 0, found 0 and -1"),
        (lambda: model(head=HeadConfig(classes=1)), '"last" or "mean" in a causal classifier, found "cls"'),
        (lambda: model(head=HeadConfig(mixture=-1)), "head.mixture"),
        (lambda: model(head=HeadConfig(mixture=1), vocab_size=1), "head.mixture: .*vocab_size 1"),
        (lambda: model(head=HeadConfig(mixture=1, classes=2)), "head.mixture: .*classes 2"),
        (lambda: model(head=HeadConfig(mixture=1, tied=True)), "head.mixture: .*tied True"),
        (lambda: model(head=HeadConfig(mixture=1, cutoffs=(5,))), "head.cutoffs: .*mixture 1"),
        (lambda: model(head=HeadConfig(cutoffs=(5,))), "cutoffs: expected a tied head"),
        (lambda: model(head=HeadConfig(tied=True, cutoffs=(5, 11))), "increasing numbers .* below .*11 .*found 5 11"),
        (lambda: model(head=HeadConfig(classes=2, pool="last", cutoffs=(5,))), "head.cutoffs: .*classes 2"),
        (lambda: model(features=-1), "features: expected 0, .*found -1"),
        (lambda: model(features=3, scale_embedding=True), "found 3 .*scale_embedding True"),
        *(
            (lambda one=one: model(features=3, head=HeadConfig(**one)), "features: .*found 3")
            for one in ({"mixture": 1}, {"tied": True}, {"cutoffs": (5,)})
        ),
        (lambda: model()(ids()[:, :0]), "at least 1"),
        (lambda: model(dropout=1.0), "dropout"),
        (lambda: model(causal=False), "set head.classes"),
        (
            lambda: model(causal=False, attention=SoftmaxConfig(window=4), head=HeadConfig(classes=3, pool="mean")),
            "attention 'softmax': expected causal=True, its only mode",
        ),
        (lambda: model()(torch.zeros(2, 3)), "integers"),
        (lambda: model()(ids(), None, torch.ones(2, 3).bool()), "mask of booleans"),
        (lambda: model()(ids(), (1, 2)), "this model of 2 layers returned, found tuple; use state=None"),
        (lambda: model()(ids(), model(layers=3)(ids())[1]), "of 2 layers returned, found one of 3 layers"),
        (lambda: model()(ids()[:1], model()(ids())[1]), "expected a state of 1 rows, as the tokens have, found 2"),
    ],
)
def test_wrong_input_is_refused_in_one_line(use, words):
    refuses(words, use)


LEAST = {
    Transformer: {"vocab_size": 1, "layers": 1, "mlp": 0, "max_length": 1},
    mnemos.EncoderDecoder: {"vocab_size": 1, "encoder_layers": 1, "decoder_layers": 1, "mlp": 1, "max_length": 1},
    mnemos.Memformer: {"vocab_size": 1, "encoder_layers": 1, "decoder_layers": 1, "mlp": 1, "segment": 1, "cls": 0},
    mnemos.models.RMT: {"vocab_size": 1, "layers": 1, "mlp": 0, "segment": 1},
    mnemos.models.LSTM: {"vocab_size": 1, "dim": 1, "layers": 1},
}


@pytest.mark.parametrize("cls", LEAST)
def test_the_least_sizes_are_built_and_smaller_ones_refused(cls):
    least = LEAST[cls]
    sizes = {} if cls is mnemos.models.LSTM else {"dim": 4, "num_heads": 2}
    network, x = cls(**sizes, **least), ids(1) * 0
    x = mnemos.models.Pair(x, x) if cls is mnemos.EncoderDecoder else x
    assert network(x)[0].shape == (2, 1, 1)
    for name, size in least.items():
        refuses(f"{name}: expected at least {size}.*, found {size - 1}", cls, **least | {name: size - 1})
