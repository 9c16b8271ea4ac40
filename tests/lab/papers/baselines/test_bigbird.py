"""BigBird against its definition and against another library's: values, gradients, padding, the blocks drawn, cost."""

import itertools

import pytest
import torch
from refusals import refuses
from sparse_layers import compare, spoilt, tokens

from mnemos.attention import SoftmaxAttention
from mnemos.lab.papers.baselines.bigbird import (
    BlockSparseAttention,
    BlockSparseConfig,
    block_sparse_attention,
    draw_random_blocks,
)
from mnemos.models import HeadConfig, Transformer

# ---- the operator ----


def inputs(t, b=2, h=2, d=5, m=3, dtype=torch.float64):
    g = torch.Generator().manual_seed(t)
    return [torch.randn(b, t, h, n, generator=g, dtype=dtype).requires_grad_() for n in (d, d, m)]


def holes(t, block):
    """The second row has no valid key in the first and the last block."""
    mask = torch.rand(2, t, generator=torch.Generator().manual_seed(4)) > 0.3
    mask[1, :block] = mask[1, -block:] = False
    return mask


def reference(q, k, v, random_blocks, block, mask=None):
    """The definition, one query at a time, in float64. random_blocks [H, n − 2, R]."""
    b, t, h, d = q.shape
    n = -(-t // block)
    valid = torch.ones(b, t, dtype=torch.bool) if mask is None else mask
    outputs = []
    for row, i, head in itertools.product(range(b), range(t), range(h)):
        own, read = i // block, [*range(n)]
        if 1 <= own < n - 1 and n > 8:
            read = [j for j in read if j in (0, n - 1) or abs(j - own) <= 1]
            read += random_blocks[head, own - 1].tolist()
        keys = [j for part in read for j in range(part * block, min(t, (part + 1) * block)) if valid[row, j]]
        weights = torch.softmax(k[row, keys, head].double() @ q[row, i, head].double() / d**0.5, 0)
        outputs.append(weights @ v[row, keys, head].double() if valid[row, i] else v.new_zeros(v.shape[3]).double())
    return torch.stack(outputs).view(b, t, h, -1)


CASES = [  # tokens, block
    (29, 2),  # 15 blocks, the last one of one token
    (27, 3),  # 9 blocks, one more than a block reads
    (24, 3),  # 8 blocks: dense
    (1, 4),
    (13, 1),  # blocks of one token
]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-tokens")
def test_equals_the_definition(case, masked):
    t, block = case
    given = inputs(t)
    mask = holes(t, block) if masked else None
    given = spoilt(given, mask) if masked else given
    drawn = draw_random_blocks(2, -(-t // block), seed=3)
    y = block_sparse_attention(*given, drawn, block, mask)
    compare(y, reference(*given, drawn, block, mask), given)


@pytest.mark.parametrize("blocks", [9, 40])
def test_random_blocks_are_distinct_and_read_in_no_other_way(blocks):
    drawn = draw_random_blocks(3, blocks, seed=1)
    assert drawn.shape == (3, blocks - 2, 3)
    for head in drawn.tolist():
        for row, found in enumerate(head, 1):
            assert len({*found}) == 3
            assert all(1 <= j < blocks - 1 and abs(j - row) > 1 for j in found)


def test_random_blocks_are_those_of_earlier_versions():
    """A change of these numbers changes trained models."""
    assert draw_random_blocks(1, 12, seed=0)[0, :3].tolist() == [[8, 9, 6], [5, 7, 6], [7, 5, 10]]


def test_wrong_input_is_refused():
    q, k, _ = inputs(29)
    refuses("expected floating v", block_sparse_attention, q, k, torch.zeros(2, 8, 3, 4), draw_random_blocks(2, 15), 2)
    refuses("a block of at least 1, found 0", layer, block=0)
    refuses("causal=False", BlockSparseAttention, 12, 3, causal=True)


# ---- the layer ----


def layer(dropout=0.0, **settings):
    torch.manual_seed(0)
    settings = BlockSparseConfig(**{"block": 2} | settings)
    return BlockSparseAttention(12, 3, dropout=dropout, settings=settings).double()


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
