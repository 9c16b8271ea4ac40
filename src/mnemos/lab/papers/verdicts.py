"""Was it reproduced? A row for each table, figure and sentence of the papers, which pages and `mnemos reproduce` print.

`here` has our numbers as <file|path|format>, which tools/page_tables.py fills from results/: the parts of a path are
keys, positions, or KEY=VALUE for the one entry of a list with that value; ~ stands for /; A ÷ B is a ratio.
"""

import re
from typing import NamedTuple

SYMBOLS = {"✓": "seen", "≈": "partly", "✗": "tested and not seen", "?": "undecided", "–": "not run"}


class Verdict(NamedTuple):
    """A row: symbol of `SYMBOLS`, item of the paper, the claims that measure it, the paper's value, ours, a line."""

    symbol: str
    item: str
    claim: str
    paper: str
    here: str
    line: str


def verdicts(paper: str, claim: str | None = None) -> tuple[Verdict, ...]:
    """The rows of a paper, or those that one of its claims measures."""
    rows = (Verdict(*row.groups("")) for row in _ROW.finditer(_VERDICTS.get(paper, "")))
    return tuple(row for row in rows if claim is None or claim in row.claim.split())


_ROW = re.compile(
    r"^(\S) (.+?)(?: \[(.+)\])?\n"  # symbol, item [claims]
    r"(?:  paper: (.+)\n)?"
    r"(?:  here: (.+)\n)?"
    r"  (?!paper: |here: )(.+)\n",  # the line
    re.MULTILINE,
)
_VERDICTS = {
    "cached_transformers": """
✗ Table 1, ViT: accuracy [experiment table1]
  paper: ViT-S 79.9 → 81.3
  here: CIFAR-10: <cached_experiment|tables/0/rows/=no cache/test accuracy, %|.1f> → <cached_experiment|tables/0/rows/=cached/test accuracy, %|.1f>, difference <cached_experiment|tables/1/rows/minus=no cache/difference|+.1f> (<cached_experiment|tables/1/rows/minus=no cache/from|+.1f> to <cached_experiment|tables/1/rows/minus=no cache/to|+.1f>)
  CIFAR-10, a small ViT, six seeds: a gain of 1.4 is excluded.
? Table 1, PVT and Swin [table1]
  paper: PVT +1.8 to +3.3, PVT v2 +0.5 to +0.6, Swin +0.9
  here: CIFAR-10, PVT v2: <cached_pvt_cifar|rows/name=cifar-pvt/mean|.1f/0.01> → <cached_pvt_cifar|rows/name=cifar-pvt-paper/mean|.1f/0.01>, learned constant <cached_pvt_cifar|rows/name=cifar-pvt-paper-constant/mean|.1f/0.01>; difference <cached_pvt_cifar|rows/name=cifar-pvt/against/difference|+.1f/-0.01> (<cached_pvt_cifar|rows/name=cifar-pvt/against/interval/1|+.1f/-0.01> to <cached_pvt_cifar|rows/name=cifar-pvt/against/interval/0|+.1f/-0.01>); digits: Swin −1.6 (−12.4 to +9.2)
  Five seeds: undecided; 0.6 points would need some 25.
– ImageNet, COCO, WikiText-103 (Tables 1, 3, 5, 7, 8) [table3 table7 table8]
  paper: top-1 +0.5 to +3.3; box AP +3.5 to +4.6; 18.3 → 17.9 perplexity
  here: shapes, box AP: +1.3 (−12.1 to +14.7)
  Recipes exist, not trained; generated shapes decide nothing.
≈ Cost (Table 9) [costs table9]
  paper: FLOPs +10 to +15 %; images a second × 0.81 to 0.83
  here: FLOPs inference <cached_costs|min:tables/2/rows/*/+ %|+.0f> to <cached_costs|max:tables/2/rows/*/+ %|+.0f> %, training <cached_costs|min:tables/1/rows/*/+ %|+.0f> to <cached_costs|max:tables/1/rows/*/+ %|+.0f> %, parameters <cached_costs|min:tables/0/rows/*/+ %|+.0f> to <cached_costs|max:tables/0/rows/*/+ %|+.0f> %; images a second × <cached_table9|min:tables/1/rows/*/ratio|.2f> to <cached_table9|max:tables/1/rows/*/ratio|.2f>
  Inference agrees, training costs more.
✗ Cheaper than more width [experiment]
  paper: more efficient than more depth or width
  here: minus a wider ViT: <cached_experiment|tables/1/rows/minus=equal parameters/difference|+.1f> (<cached_experiment|tables/1/rows/minus=equal parameters/from|+.1f> to <cached_experiment|tables/1/rows/minus=equal parameters/to|+.1f>)
  CIFAR-10, six seeds: the wider ViT is no worse.
≈ Table 2: gated beats keys and values [experiment table2]
  paper: 80.0 → 81.3
  here: CIFAR-10: <cached_experiment|tables/1/rows/minus=keys and values/difference|+.1f> (<cached_experiment|tables/1/rows/minus=keys and values/from|+.1f> to <cached_experiment|tables/1/rows/minus=keys and values/to|+.1f>)
  Keys and values lose 1.7 to no cache.
≈ Regularises across samples [experiment]
  paper: less overfitting
  here: 5,000 pictures of CIFAR-10: train − test <cached_few_pictures|rows/name=cifar-vit/gap/mean|.1f> → <cached_few_pictures|rows/name=cifar-vit-paper/gap/mean|.1f> points, difference <cached_few_pictures|cache minus none/gap/difference|+.1f> (<cached_few_pictures|cache minus none/gap/from|+.1f> to <cached_few_pictures|cache minus none/gap/to|+.1f>), learned constant <cached_few_pictures|rows/name=cifar-vit-paper-constant/gap/mean|.1f>, to it <cached_few_pictures|cache minus constant/gap/difference|+.1f> (<cached_few_pictures|cache minus constant/gap/from|+.1f> to <cached_few_pictures|cache minus constant/gap/to|+.1f>); test accuracy <cached_few_pictures|rows/name=cifar-vit/test accuracy, %/mean|.1f> → <cached_few_pictures|rows/name=cifar-vit-paper/test accuracy, %/mean|.1f>, difference <cached_few_pictures|cache minus none/test accuracy, %/difference|+.1f> (<cached_few_pictures|cache minus none/test accuracy, %/from|+.1f> to <cached_few_pictures|cache minus none/test accuracy, %/to|+.1f>)
  Twelve seeds: it fits its pictures less closely, and so does a learned constant; that the samples add to this is not shown, nor better test accuracy.
✗ Table 4: translation [table4]
  paper: +0.2 to +0.6 BLEU
  here: Multi30k: <multi30k_paper|rows/0|±.1f>; learned constant <multi30k_paper|rows/1|±.1f>; none, another run, <multi30k_demo|rows/0|±.1f>
  2 + 2 layers, three seeds: it loses 7 BLEU.
? Table 5: language, base [table5]
  paper: perplexity 24.0 → 22.9
  here: <cached_table5|tables/0/rows/=Transformer-XL base/here|s> → <cached_table5|tables/0/rows/=Transformer-XL base, cached/here|s>; never written <cached_table5|tables/0/rows/=Transformer-XL base, cached, never written/here|s>
  WikiText-2, three seeds: too noisy; a gain of 4.6 % as in the paper would need five seeds.
? Table 5: ahead of memory tokens (MT, RMT) [table5]
  paper: 22.9 against 23.99, 23.95
  here: <cached_table5|tables/0/rows/=Transformer-XL base, cached/here|s> against <cached_table5|tables/0/rows/=Transformer-XL base, MT-cached/here|s>, <cached_table5|tables/0/rows/=Transformer-XL base, RMT-cached/here|s>
  WikiText-2, three seeds: MT is ahead, not shown; the paper's leads would need seven and six seeds.
? Table 6: ListOps [table6]
  paper: +0.6 to +1.4 points
  here: <cached_table6|tables/0/rows/=Transformer/here|s> → <cached_table6|tables/0/rows/=Transformer/here cached|s> %; learned constant <cached_table6|tables/0/rows/=Transformer/never written|s>
  64 to 128 symbols, three seeds: too noisy; 1.2 points would need five seeds. A learned constant is as good.
≈ Table 10: ratio of the cache [table10]
  paper: ratio 0 to 1: 1.90 → 2.97 G, 75.1 → 78.5 %
  here: <cached_table10|tables/0/rows/ratio=0/as the paper counts|.2f> → <cached_table10|tables/0/rows/ratio=1/as the paper counts|.2f> G; digits: <cached_table10|tables/1/rows/ratio=0/accuracy|s>, <cached_table10|tables/1/rows/ratio=0.125/accuracy|s>, <cached_table10|tables/1/rows/ratio=0.25/accuracy|s>, <cached_table10|tables/1/rows/ratio=0.5/accuracy|s>, <cached_table10|tables/1/rows/ratio=1/accuracy|s> %
  FLOPs within 4 % up to ½; accuracy undecided.
? Figure 1: accuracy by cost [figure1]
  paper: the cached curve on top
  here: CIFAR-10, points above the uncached curve: <cached_figure1|tables/1/rows/=cifar-pvt-paper-depth-1/above the uncached curve|s>, <cached_figure1|tables/1/rows/=cifar-pvt-paper-depth-2/above the uncached curve|s>, <cached_figure1|tables/1/rows/=cifar-pvt-paper-depth-4/above the uncached curve|s>
  PVT v2, three depths, 500 updates, five seeds: none is shown; 0.6 points would need 11 to 45.
✗ Figure 4: the branches' maps complement each other [figure4]
  paper: yes, by eye
  here: CIFAR-10: correlation by layer <cached_figure4|tables/0/rows/layer=blocks.0/correlation|+.2f> (sd <cached_figure4|tables/0/rows/layer=blocks.0/correlation, sd|.2f>), <cached_figure4|tables/0/rows/layer=blocks.1/correlation|+.2f> (sd <cached_figure4|tables/0/rows/layer=blocks.1/correlation, sd|.2f>), <cached_figure4|tables/0/rows/layer=blocks.2/correlation|+.2f> (sd <cached_figure4|tables/0/rows/layer=blocks.2/correlation, sd|.2f>)
  Six seeds: no layer has one sign in all of them.
✓ Figure 5: gates [figure5]
  paper: σ(λ) above ½ in most layers, lower in the last
  here: CIFAR-10: <cached_figure5|tables/0/rows/layer=blocks.0/mean|.3f>, <cached_figure5|tables/0/rows/layer=blocks.1/mean|.3f>, <cached_figure5|tables/0/rows/layer=blocks.2/mean|.3f> by layer
  In all three layers of each of six seeds; highest in the first.
✓ Not in the paper: a cache per stream
  here: recall of pairs <bench_memory|benchmarks/name=mqar/rows/name=window/mean|.2f> → <bench_memory|benchmarks/name=mqar/rows/name=gated-cache/mean|.2f>; never written <bench_memory|benchmarks/name=mqar/rows/name=gated-cache-unwritten/mean|.2f>
  Three seeds, recall of pairs.
✗ Not in the paper: a cache per stream on novels
  here: <text_state|rows/name=text-state-cached/against/difference|+.3f> bits a byte
  Behind Transformer-XL's memory of the same size.
""",
    "linear_transformers": """
✓ Figure 1: time [figure1]
  paper: linear in the length
  here: 8,192 tokens: linear <linear_figure1|tables/0/rows/N=8192/linear|.0f>, softmax <linear_figure1|tables/0/rows/N=8192/softmax|,.0f>, LSH-1 <linear_figure1|tables/0/rows/N=8192/lsh-1|.0f> ms
  Linear grows with the length, softmax with its square.
≈ Figure 1: memory [figure1]
  paper: linear in the length
  here: linear <linear_figure1|tables/1/rows/N=8192/linear|.0f>, softmax <linear_figure1|tables/1/rows/N=8192/softmax|.0f>, LSH-1 <linear_figure1|tables/1/rows/N=8192/lsh-1|.0f> MiB; softmax written out, 2,048 tokens: <linear_figure1|tables/1/rows/N=2048/softmax, written out|.0f>
  True beside the paper's softmax; a fused one needs as little.
✓ §3.3.1: gradient at constant memory
  paper: no state per token
  here: kept a token and head: <linear_attention|rows/0/kept, floats a token and head|.1f> floats at 1,024 tokens, <linear_attention|rows/3/kept, floats a token and head|.1f> at 65,536
  No state per token is kept.
≈ Figure 2: copying [figure2]
  paper: as softmax, LSH worse
  here: test loss <copy_figure2|tables/0/rows/=softmax/test loss, nats|.0e> softmax, <copy_figure2|tables/0/rows/=linear/test loss, nats|.0e> linear, <copy_figure2|tables/0/rows/=lsh-4/test loss, nats|.0e> LSH-4
  All copy 64 tokens; equal losses are not shown.
✓ Table 1, Figure 5: bits a dimension [experiment]
  paper: softmax .621, linear .644, LSH-1 .745
  here: <linear_experiment|tables/0/rows/=softmax/bits~dim|.3f>, <linear_experiment|tables/0/rows/=linear/bits~dim|.3f>, <linear_experiment|tables/0/rows/=lsh-1/bits~dim|.3f>; LSH-4, one seed: as linear
  The paper's order, half an epoch, three seeds.
≈ Table 1, §4.2: pictures a second [table1 latency cifar10]
  paper: softmax without kept keys: MNIST 317, CIFAR 4,462 times slower, one picture 13.2; with them 19, 56, 1.3
  here: <writing_images|images~s and best batch/linear/0 ÷ images~s and best batch/softmax/0|.0f>, <cifar_pixels|tables/1/rows/=softmax/linear is faster by|,.0f>, <linear_latency|tables/0/rows/=softmax/relative to linear|.1f>; with them <writing_images|images~s and best batch/linear/0 ÷ images~s and best batch/softmax, cached/0|.1f>, <cifar_pixels|tables/1/rows/=softmax, cached/linear is faster by|.1f>, <linear_latency|tables/0/rows/=softmax, cached/relative to linear|.1f>
  Three tenths to two thirds of the paper's factors; less with kept keys.
✓ §4.2.1: constant memory [constant_memory]
  paper: the same at every position
  here: <linear_constant_memory|tables/0/rows/bytes read=783/linear|,.0f> bytes at every position; 10,000 images in <linear_constant_memory|tables/1/rows/3/peak GiB|.1f> GiB
  A few positions; 10,000 pictures at once fit.
✓ Table 2: CIFAR-10, bits [cifar10]
  paper: 3.40 linear, 3.47 softmax
  here: <cifar_bits|rows/name=cifar-pixels-small/mean|.2f/0.6931472> linear, <cifar_bits|rows/name=cifar-pixels-small-softmax/mean|.2f/0.6931472> softmax; difference <cifar_bits|rows/name=cifar-pixels-small-softmax/against/difference|+.3f/0.6931472> (<cifar_bits|rows/name=cifar-pixels-small-softmax/against/interval/0|+.3f/0.6931472> to <cifar_bits|rows/name=cifar-pixels-small-softmax/against/interval/1|+.3f/0.6931472>)
  16 × 16, seven minutes of training each, four seeds, p .03.
✗ Table 3: speech, error [speech]
  paper: softmax 5.1, linear 8.1, LSH 9.3, LSTM 10.9 %
  here: <speech_rates|rows/name=softmax/mean|.1f>, <speech_rates|rows/name=linear/mean|.1f>, <speech_rates|rows/name=lsh/mean|.1f>, <speech_rates|rows/name=bilstm/mean|.1f> %; linear minus LSTM <speech_rates|differences/2/difference|+.1f> (<speech_rates|differences/2/from|+.1f> to <speech_rates|differences/2/to|+.1f>)
  Spoken digits, five seeds, a rate each: the LSTM is first, not last.
≈ Table 3: speech, time [speech]
  paper: an epoch: linear 824 s, softmax 2,711, LSTM 1,047
  here: <speech|tables/0/rows/=linear/seconds per epoch|.1f> s, softmax <speech|tables/0/rows/=softmax/seconds per epoch|.1f>, LSTM <speech|tables/0/rows/=bilstm/seconds per epoch|.1f>
  Linear is fastest; 54 frames are too few for the factors.
✗ Figure 3: written digits [figure3]
  paper: sharp, no noise
  here: ragged edges; several are no digit
  Two layers, by eye; completions keep the stroke.
✗ Figure 4: completed CIFAR pictures [cifar10]
  here: colours go on, single pixels stand out, no object
  16 × 16, two layers, by eye; softmax's are alike.
""",
    "memformer": """
✓ Table 1: the memory helps [experiment]
  paper: 1.745 → 1.594 perplexity: −.091 nats
  here: <memformer_experiment|tables/1/rows/minus=without memory/difference|+.3f> nats (<memformer_experiment|tables/1/rows/minus=without memory/from|+.3f> to <memformer_experiment|tables/1/rows/minus=without memory/to|+.3f>)
  MNIST at 14 × 14, five seeds.
✓ Table 1: ahead of Transformer-XL [experiment]
  paper: 1.611 → 1.594: −.011 nats
  here: <memformer_experiment|tables/1/rows/minus=Transformer-XL/difference|+.3f> nats (<memformer_experiment|tables/1/rows/minus=Transformer-XL/from|+.3f> to <memformer_experiment|tables/1/rows/minus=Transformer-XL/to|+.3f>)
  MNIST at 14 × 14, five seeds, equal parameters.
✓ Table 1: ahead of a Transformer [table1]
  paper: 1.569 → 1.555: −.009 nats
  here: <memformer_table1_seeds|differences/Memformer 4+8/minus=Transformer decoder/difference|+.3f> nats (<memformer_table1_seeds|differences/Memformer 4+8/minus=Transformer decoder/from|+.3f> to <memformer_table1_seeds|differences/Memformer 4+8/minus=Transformer decoder/to|+.3f>); at equal parameters <memformer_table1_seeds|differences/Memformer 4+8/minus=Transformer decoder, equal parameters/difference|+.3f> (<memformer_table1_seeds|differences/Memformer 4+8/minus=Transformer decoder, equal parameters/from|+.3f> to <memformer_table1_seeds|differences/Memformer 4+8/minus=Transformer decoder, equal parameters/to|+.3f>)
  Digits, eight seeds; at equal parameters less than half of it.
✓ Table 1: ahead of an LSTM [table1]
  paper: 1.698 → 1.555
  here: <memformer_table1|tables/1/rows/=LSTM/perplexity|s> → <memformer_table1|tables/1/rows/=Memformer 4+8/perplexity|s>
  Digits, three seeds, a sixth of its parameters.
✗ Table 1: forgetting helps [experiment]
  paper: 1.630 → 1.594: −.022 nats
  here: <memformer_experiment|tables/1/rows/minus=without forgetting/difference|+.4f> nats (<memformer_experiment|tables/1/rows/minus=without forgetting/from|+.3f> to <memformer_experiment|tables/1/rows/minus=without forgetting/to|+.3f>)
  Five seeds: the paper's gain is excluded.
✗ Table 1: many slots beat one [table1]
  paper: 1.627 → 1.594: −.020 nats
  here: <memformer_table1_seeds|differences/Memformer 2+6 memory=64/minus=Memformer 2+6 memory=1/difference|+.3f> nats (<memformer_table1_seeds|differences/Memformer 2+6 memory=64/minus=Memformer 2+6 memory=1/from|+.3f> to <memformer_table1_seeds|differences/Memformer 2+6 memory=64/minus=Memformer 2+6 memory=1/to|+.3f>)
  Digits, 16 slots, five seeds: the paper's gain is excluded.
✓ Table 1: several heads beat one [table1]
  paper: 1.626 → 1.594: −.020 nats
  here: <memformer_table1_more|differences/Memformer 2+6 memory=64/minus=w~o multi-head/difference|+.3f> (<memformer_table1_more|differences/Memformer 2+6 memory=64/minus=w~o multi-head/from|+.3f> to <memformer_table1_more|differences/Memformer 2+6 memory=64/minus=w~o multi-head/to|+.3f>) nats
  Digits, fifteen seeds: .2 to .7 of the paper's gain.
✗ Table 1: τ and layers [table1]
  paper: −.011 nats to τ = 1, −.021 to 4 + 4 layers
  here: <memformer_table1_more|differences/Memformer 2+6 memory=64/minus=temperature=1.0/difference|+.3f> (<memformer_table1_more|differences/Memformer 2+6 memory=64/minus=temperature=1.0/from|+.3f> to <memformer_table1_more|differences/Memformer 2+6 memory=64/minus=temperature=1.0/to|+.3f>), <memformer_table1_more|differences/Memformer 2+6 memory=64/minus=Memformer 4+4/difference|+.3f> (<memformer_table1_more|differences/Memformer 2+6 memory=64/minus=Memformer 4+4/from|+.3f> to <memformer_table1_more|differences/Memformer 2+6 memory=64/minus=Memformer 4+4/to|+.3f>)
  Digits, fifteen seeds: the paper's gains are excluded; paired by seed, τ = .25 is ahead by .004.
✗ Table 1: a tenth of the FLOPs [table1]
  paper: 5.0 against 49.1 G
  here: <memformer_table1|tables/0/rows/=Memformer 4+8/GFLOP|.1f> against <memformer_table1|tables/0/rows/=Transformer-XL memory=784/GFLOP|.1f> G
  Half, as counted here.
? Table 2: perplexity of text [table2]
  paper: 22.74; Transformer-XL 23.67, Compressive 23.23, without memory 25.57
  here: <memformer_table2|tables/2/rows/=Memformer 4+16/perplexity|.2f>; <memformer_table2|tables/2/rows/=Transformer-XL base memory=1024/perplexity|.2f>, <memformer_table2|tables/2/rows/=Compressive Transformer memory=512 compress=512/perplexity|.2f>, <memformer_table2|tables/2/rows/=Memformer w~o memory/perplexity|.2f>
  Bytes, 600 updates, one seed: Memformer is behind.
≈ Table 2: 3.2 times as fast [table2]
  paper: 3.2 times; 54 against 168 G
  here: <memformer_table2|tables/1/rows/=Transformer-XL ~ Memformer/ms per generated token|.2f> times; <memformer_table2|tables/1/rows/=Transformer-XL ~ Memformer/GFLOP per segment|.1f> times the FLOPs
  Less than half of the factor; untrained, a CPU.
✓ Table 3: replay [table3]
  paper: memory 1 : .61 : .45, speed 1 : .48 : .90
  here: memory 1 : <memformer_table3|tables/0/rows/=GC/relative to BPTT|.2f> : <memformer_table3|tables/0/rows/=MRBP/relative to BPTT|.2f>, speed 1 : <memformer_table3|tables/0/rows/=GC/relative speed|.2f> : <memformer_table3|tables/0/rows/=MRBP/relative speed|.2f>
  Faster and smaller than checkpointing.
≈ Figure 4: drift to the end [figure4]
  paper: slots drift to one terminal state
  here: half of the way after <memformer_figure4|tables/0/rows/0/writes to half of it|s> to <memformer_figure4|tables/0/rows/2/writes to half of it|s> writes
  For short biases, not the paper's.
✓ Figure 5: FLOPs by length [figure5]
  paper: linear
  here: 8,192 tokens: <memformer_figure5|tables/0/rows/tokens=8,192/Memformer|.0f> G, Transformer <memformer_figure5|tables/0/rows/tokens=8,192/Transformer|.0f>, Transformer-XL <memformer_figure5|tables/0/rows/tokens=8,192/Transformer-XL|.0f>
  Linear; it pays from 1,024 tokens on.
≈ Figure 5: memory [figure5]
  paper: 8.1 times less
  here: <memformer_figure5|tables/1/rows/-2/Transformer-XL ~ Memformer|.1f> times less; the state alone <memformer_figure5|tables/1/rows/-4/Transformer-XL ~ Memformer|.1f>
  Running models, on a CPU.
✗ Figure 6: most slots hold [figure6]
  paper: 60 to 80 %
  here: <memformer_figure6|tables/0/rows/0/share, %|.0f> %
  MNIST five seeds, WikiText-2 two; short trainings.
? Figure 7: what slots read [figure7]
  paper: named entities and verbs
  here: nearly even; commas 1.2 to 1.5 times an even share
  WikiText-2 by bytes, two seeds, a slot of each; short trainings.
✓ Figure 8: the horizon of the gradient [figure8]
  paper: 1 is the worst; at 32 the gain is almost gone
  here: 1: <memformer_figure8|tables/0/rows/horizon=1/perplexity|.2f>; 2, 8, 32: <memformer_figure8|tables/0/rows/horizon=2/perplexity|.2f>, <memformer_figure8|tables/0/rows/horizon=8/perplexity|.2f>, <memformer_figure8|tables/0/rows/horizon=32/perplexity|.2f>; 8 minus 1, ten seeds: −.021 nats (−.037 to −.005)
  150 updates; paired by seed, p .02; nothing is gained beyond 8.
✗ Figure 8: many slots [figure8]
  paper: a huge improvement from 1 to 8
  here: slots 1, 8, 64: <memformer_figure8|tables/2/rows/slots=1/perplexity|.2f>, <memformer_figure8|tables/2/rows/slots=8/perplexity|.2f>, <memformer_figure8|tables/2/rows/slots=64/perplexity|.2f>
  Five seeds, 150 updates: 8 minus 1 slots, paired by seed, excludes a gain above 1.5 %; unpaired, above 4.6 %.
✓ Not in the paper: a fact 4,096 tokens later [recall]
  here: replay <recall_seeds|rows/name=recall-memformer/mean|.1f/0.01> % (preset mnemos), <recall_seeds|rows/name=recall-memformer-paper/runs/0/accuracy|.1f/0.01>, <recall_seeds|rows/name=recall-memformer-paper/runs/1/accuracy|.1f/0.01> and <recall_seeds|rows/name=recall-memformer-paper/runs/2/accuracy|.1f/0.01> (paper); horizon 1 <recall_seeds|rows/name=recall-memformer-horizon-1/mean|.1f/0.01> %
  Three seeds, 99 % or more in each; one segment's gradient guesses (6 %); one seed of the paper's settings is near a guess.
✗ Not in the paper: novels at equal time
  here: <text_state|rows/name=text-state-memformer/against/difference|+.3f> bits a byte
  Behind Transformer-XL of the same state; three seeds.
""",
}
