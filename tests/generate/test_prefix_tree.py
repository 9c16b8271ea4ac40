"""Trees of states for shared prefixes: equality with reading everything, tokens read, bounded memory."""

import pytest
import torch
from refusals import refuses

import mnemos
from mnemos import GRC, PrefixTree, Stream, Transformer
from mnemos.attention.linear import LinearConfig
from mnemos.attention.softmax import SoftmaxConfig

SIZES = {"vocab_size": 11, "dim": 16, "layers": 2, "num_heads": 2, "mlp": 24, "max_length": 60}
KINDS = {
    "linear": {"attention": LinearConfig()},
    "softmax": {},
    "cached": {"attention": SoftmaxConfig(window=5), "cache": GRC(length=3, block=4, scope="stream")},
}


def built(kind: str = "linear", seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(**SIZES | KINDS[kind]).double().eval()


def ids(t: int, seed: int) -> torch.Tensor:
    return torch.randint(11, (t,), generator=torch.Generator().manual_seed(seed))


def prompts() -> list[torch.Tensor]:
    """Lengths below, at and above the end of a block of 8; beginnings that are shared, and one whole prompt."""
    common, other = ids(20, 1), ids(3, 2)
    tails = [(20, 7), (20, 12), (17, 4), (8, 0), (5, 0), (20, 7)]
    found = [torch.cat([common[:n], ids(t, 3 + i)]) for i, (n, t) in enumerate(tails)]
    return [*found[:5], found[0], other]


def same(found: Stream, rows: list[torch.Tensor]) -> None:
    for i, row in enumerate(rows):
        alone = Stream(found.model).prefill(row[None])
        one = found.select(torch.tensor([i]))
        torch.testing.assert_close(one.predict(), alone.predict(), rtol=1e-10, atol=1e-10)
        assert torch.equal(one.generate(3, temperature=0)[0], alone.generate(3, temperature=0)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_with_one_beginning_are_read_once(kind):
    rows, model = prompts(), built(kind)
    tree = PrefixTree(model, block=8)
    same(tree.prefill(rows), rows)
    whole = [*rows[:5], rows[6]]
    blocks = {tuple(row[: n * 8].tolist()) for row in whole for n in range(1, len(row) // 8 + 1)}
    assert tree.read == 8 * len(blocks) + sum(len(row) % 8 for row in whole)
    assert tree.read + tree.found == sum(map(len, rows))
    before = tree.read
    longer = [torch.cat([rows[1], ids(9, 30)]), rows[3]]
    same(tree.prefill(longer), longer)
    assert tree.read - before == len(longer[0]) - 32  # the prompt's 32 tokens were read before
    stream = tree.prefill(longer[0][None])
    assert torch.equal(stream.last, longer[0][None, -1:])
    assert tree.read - before <= len(longer[0]) - 32 + 8


def test_memory_is_bounded_and_the_oldest_go_first():
    rows, model = [ids(16, seed) for seed in range(3)], built()
    tree = PrefixTree(model, block=8)
    tree.prefill(rows[:1])
    small = PrefixTree(model, block=8, memory=tree.size)
    for row in rows:
        same(small.prefill([row]), [row])
        assert small.size <= small.memory
        assert len(small) == 2
    before = small.read
    small.prefill(rows[2:])
    assert small.read == before
    small.prefill(rows[:1])
    assert small.read == before + 16
    two = PrefixTree(model, block=8, memory=2 * tree.size)
    for row in (rows[0], rows[1], rows[0], rows[2]):  # the second is the oldest when the last needs room
        two.prefill([row])
    before = two.read
    two.prefill(rows[:1])
    assert two.read == before
    by_token = PrefixTree(model, block=1)
    same(by_token.prefill([rows[0][:5]]), [rows[0][:5]])
    same(by_token.prefill([rows[0][:7]]), [rows[0][:7]])
    assert by_token.read == 7
    none = PrefixTree(model, block=8, memory=0)
    same(none.prefill(rows), rows)
    assert (len(none), none.size) == (0, 0)


def test_wrong_input_of_a_tree_is_one_line():
    model = built()
    tree = PrefixTree(model)
    for words, call in (
        ("at least one", lambda: tree.prefill([])),
        ("found list of 1 list", lambda: tree.prefill([[1, 2]])),
        ("float32", lambda: tree.prefill([torch.ones(3)])),
        ("found 0 to 11", lambda: tree.prefill([torch.arange(12)])),
        ("T at least 1", lambda: tree.prefill([ids(0, 0)])),
        ("'4' and 5", lambda: PrefixTree(model, "4", 5)),
        ("0 and 5", lambda: PrefixTree(model, 0, 5)),
        ("same_length", lambda: PrefixTree(Transformer(**SIZES, attention=mnemos.RelativeConfig(), position="none"))),
    ):
        refuses(words, call)
    tree.prefill([ids(3, 1)])
    with torch.no_grad():
        model.head.weight[0, 0] += 1
    refuses("the weights with which the tree was made, found others; make a new tree", tree.prefill, [ids(3, 1)])
