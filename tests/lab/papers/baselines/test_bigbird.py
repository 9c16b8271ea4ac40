"""Block-sparse attention as a layer: beside another library's implementation, its random blocks, caches, models."""

import copy

import pytest
import torch

from mnemos import GRC
from mnemos.attention import GatedCacheAttention, SoftmaxAttention
from mnemos.lab.papers.baselines.bigbird.layer import BlockSparseAttention, BlockSparseConfig
from mnemos.models import HeadConfig, Transformer
from mnemos.types import InputError


def layer(dropout=0.0, **settings):
    torch.manual_seed(0)
    settings = BlockSparseConfig(**{"block": 2} | settings)
    return BlockSparseAttention(12, 3, dropout=dropout, settings=settings).double()


def tokens(t=41, seed=1, rows=2):
    return torch.randn(rows, t, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("t", "padded"), [(48, 0), (60, 9)])
@pytest.mark.parametrize("training", [True, False])
def test_equals_hugging_face_with_equal_weights_and_blocks(t, padded, training, monkeypatch):
    """Values and gradients, of the input and of every weight. In evaluation their random blocks are block 0."""
    from mnemos import libraries

    libraries.torchvision()
    big_bird = pytest.importorskip("transformers.models.big_bird.modeling_big_bird")
    from transformers import BigBirdConfig

    block = 4
    settings = BigBirdConfig(
        hidden_size=12, num_attention_heads=3, block_size=block, num_random_blocks=3, max_position_embeddings=64
    )
    theirs = big_bird.BigBirdBlockSparseAttention(settings, seed=7).double().train(training)
    ours = layer(block=block)
    found_blocks, draw = [], theirs._bigbird_block_rand_mask_with_head
    monkeypatch.setattr(
        theirs, "_bigbird_block_rand_mask_with_head", lambda **given: found_blocks.extend(draw(**given)) or found_blocks
    )
    with torch.no_grad():
        ours.qkv.weight.mul_(4)  # scores that tell tokens apart
        for part, weight, bias in zip(
            (theirs.query, theirs.key, theirs.value), ours.qkv.weight.chunk(3), ours.qkv.bias.chunk(3), strict=True
        ):
            part.weight.copy_(weight)
            part.bias.copy_(bias)
    mask = torch.ones(2, t, dtype=torch.bool)
    mask[0, t - padded :] = False
    blocked, band, rows, keys = big_bird.BigBirdModel.create_masks_for_block_sparse_attn(mask.double(), block)
    x, upstream = tokens(t).requires_grad_(), tokens(t, 5) * mask[..., None]
    wanted = theirs(x, band, rows, keys, blocked, blocked)[0]
    drawn = torch.stack([torch.as_tensor(head).long() for head in found_blocks])
    assert drawn.any() == training
    ours.random_blocks = lambda length, device: drawn
    found = ours.heads(x, None, mask if padded else None)[0].flatten(2)
    torch.testing.assert_close(found[mask], wanted[mask], rtol=1e-9, atol=1e-9)
    expected = torch.autograd.grad(wanted, (x, theirs.query.weight, theirs.key.weight, theirs.value.weight), upstream)
    gradients = torch.autograd.grad(found, (x, ours.qkv.weight), upstream)
    torch.testing.assert_close(gradients[0], expected[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradients[1], torch.cat(expected[1:]), rtol=1e-9, atol=1e-9)


def test_random_blocks_are_the_same_in_training_and_evaluation_and_matter():
    attention, x = layer(), tokens()
    state = torch.get_rng_state()
    first = attention(x)[0]
    assert torch.equal(attention.eval()(x)[0], first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.allclose(layer(seed=1)(x)[0], first)
    drawn = attention.random_blocks(41)
    assert drawn.shape == (3, 19, 3)
    assert len({tuple(head.flatten().tolist()) for head in drawn}) == 3


def test_layers_of_a_model_have_blocks_of_their_own_which_its_configuration_restores():
    def build():
        head = HeadConfig(classes=3)
        sizes = {"vocab_size": 9, "dim": 12, "layers": 3, "num_heads": 3, "mlp": 8, "max_length": 60}
        return Transformer(**sizes, causal=False, head=head, attention=BlockSparseConfig(block=2, seed=4))

    model, other = build(), build()
    drawn = [block.attention.random_blocks(41) for block in model.blocks]
    assert not any(torch.equal(drawn[i], drawn[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    other.load_state_dict(model.state_dict())
    x = torch.randint(9, (2, 40), generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(x)[0], other(x)[0])


def test_a_short_sequence_is_softmax_attention_with_the_same_weights():
    attention, dense, mask = layer(), SoftmaxAttention(12, 3).double(), torch.ones(2, 16, dtype=torch.bool)
    dense.load_state_dict(attention.state_dict())
    mask[0, 11:] = False
    x = tokens(16)
    torch.testing.assert_close(attention(x)[0], dense(x)[0])
    torch.testing.assert_close(attention(x, None, mask)[0][mask], dense(x, None, mask)[0][mask])
    assert not torch.allclose(attention(tokens(17))[0], dense(tokens(17))[0])


def test_padding_beyond_the_pattern_is_never_read():
    attention, x = layer(), tokens(40)
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[0, 25:] = False
    other = torch.where(mask[..., None], x, 100.0)
    torch.testing.assert_close(attention(x, None, mask)[0][mask], attention(other, None, mask)[0][mask])
    assert attention(x, None, torch.zeros_like(mask))[0].isfinite().all()


@pytest.mark.parametrize("scope", ["shared", "stream"])
def test_a_gated_cache_around_it_mixes_its_heads(scope):
    """With the gates shut the layer is what it was; opened, the cache is read, and gradients reach every weight."""
    inner, x = layer(), tokens(40)
    gated = GatedCacheAttention(12, 3, copy.deepcopy(inner), GRC(length=4, scope=scope), causal=False).double()
    with torch.no_grad():
        gated.mix.fill_(-100.0)
    torch.testing.assert_close(gated.eval()(x)[0], inner(x)[0])
    with torch.no_grad():
        gated.mix.fill_(0.0)
    y = gated.train()(x)[0]
    assert not torch.allclose(y, inner(x)[0])
    y.square().sum().backward()
    assert all(p.grad is not None for p in gated.parameters())


@pytest.mark.parametrize("wrong", [{"block": 0}, {"window": 4}, {"random_blocks": -1}, {"global_blocks": 0}])
def test_wrong_settings_are_refused_in_one_line(wrong):
    with pytest.raises(InputError, match="expected block and global_blocks") as error:
        layer(**wrong)
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="causal=False"):
        BlockSparseAttention(12, 3, causal=True)
