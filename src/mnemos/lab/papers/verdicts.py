"""Was it reproduced? A row for each table, figure and sentence of the papers, which pages and `mnemos reproduce` print.

`here` has our numbers as <file|path|format>, which tools/page_tables.py fills from results/: the parts of a path are
keys, positions, or KEY=VALUE for the one entry of a list with that value; ~ stands for /; A ÷ B is a ratio.
"""

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
    return tuple(row for row in _VERDICTS.get(paper, ()) if claim is None or claim in row.claim.split())


_VERDICTS = {
    "cached_transformers": (
        Verdict(
            "✗",
            "Table 1, ViT: accuracy",
            "experiment table1",
            "ViT-S 79.9 → 81.3",
            "CIFAR-10: <cached_experiment|tables/0/rows/=no cache/test accuracy, %|.1f> → <cached_experiment|tables/0/rows/=cached/test accuracy, %|.1f>, difference <cached_experiment|tables/1/rows/minus=no cache/difference|+.1f> (<cached_experiment|tables/1/rows/minus=no cache/from|+.1f> to <cached_experiment|tables/1/rows/minus=no cache/to|+.1f>)",
            "Six seeds: the paper's gain is excluded. MNIST alike; digits undecided.",
        ),
        Verdict(
            "?",
            "Table 1, PVT and Swin",
            "table1",
            "+0.5 to +3.3",
            "digits: PVT v2 +0.3 (−0.3 to +0.8), Swin −1.6 (−12.4 to +9.2)",
            "Five seeds of short runs; PVT v2 is near its ceiling.",
        ),
        Verdict(
            "–",
            "ImageNet, COCO, WikiText-103 (Tables 1, 3, 5, 7, 8)",
            "table7 table8",
            "",
            "",
            "Recipes at the paper's sizes exist; not trained.",
        ),
        Verdict(
            "≈",
            "Cost (Table 9)",
            "costs table9",
            "+10 to 15 %",
            "inference <cached_costs|min:tables/2/rows/*/+ %|+.0f> to <cached_costs|max:tables/2/rows/*/+ %|+.0f> %, training <cached_costs|min:tables/1/rows/*/+ %|+.0f> to <cached_costs|max:tables/1/rows/*/+ %|+.0f> %, parameters <cached_costs|min:tables/0/rows/*/+ %|+.0f> to <cached_costs|max:tables/0/rows/*/+ %|+.0f> %",
            "Inference agrees, training costs more.",
        ),
        Verdict(
            "≈",
            "Table 2: gated beats keys and values",
            "experiment table2",
            "80.0 → 81.3",
            "<cached_experiment|tables/1/rows/minus=keys and values/difference|+.1f> (<cached_experiment|tables/1/rows/minus=keys and values/from|+.1f> to <cached_experiment|tables/1/rows/minus=keys and values/to|+.1f>)",
            "Because a cache of keys and values loses to no cache.",
        ),
        Verdict(
            "✗",
            "Regularises across samples",
            "experiment",
            "a smaller gap",
            "gap <cached_experiment|tables/0/rows/=cached/gap, points|.1f>, without <cached_experiment|tables/0/rows/=no cache/gap, points|.1f> points",
            "Weak test: the gap is small.",
        ),
        Verdict(
            "–",
            "Table 3: detection",
            "table3",
            "+4.1 to +4.6 box AP",
            "shapes, box AP: +1.3 (−12.1 to +14.7)",
            "COCO not run; generated shapes decide nothing.",
        ),
        Verdict(
            "✗",
            "Table 4: translation",
            "table4",
            "+0.2 to +0.6 BLEU",
            "Multi30k <multi30k_paper|rows/0|±.1f>; learned constant <multi30k_paper|rows/1|±.1f>",
            "The paper's cache loses; IWSLT not run.",
        ),
        Verdict(
            "?",
            "Table 5: language, base",
            "table5",
            "−4.6 % perplexity",
            "<cached_table5|tables/0/rows/=Transformer-XL base/here|s> → <cached_table5|tables/0/rows/=Transformer-XL base, cached/here|s>; never written <cached_table5|tables/0/rows/=Transformer-XL base, cached, never written/here|s>",
            "WikiText-2, three seeds; the interval holds both signs.",
        ),
        Verdict(
            "?",
            "Table 5: MT and RMT",
            "table5",
            "24.0 → 23.99, 23.95",
            "<cached_table5|tables/0/rows/=Transformer-XL base, MT-cached/here|s>, <cached_table5|tables/0/rows/=Transformer-XL base, RMT-cached/here|s>",
            "Memory tokens ahead, recurrent ones behind; not shown.",
        ),
        Verdict(
            "?",
            "Table 6: ListOps",
            "table6",
            "+0.6 to +1.4",
            "<cached_table6|tables/0/rows/=Transformer/here|s> → <cached_table6|tables/0/rows/=Transformer/here cached|s> %",
            "Three attentions, three seeds: intervals hold 0 and the paper's gains; never written is as good.",
        ),
        Verdict(
            "≈",
            "Table 10: ratio of the cache",
            "table10",
            "75.1 to 78.5 %",
            "accuracies of one seed: <cached_table10|tables/1/rows/ratio=0.125/accuracy|.1f> to <cached_table10|tables/1/rows/ratio=0.25/accuracy|.1f> %",
            "FLOPs within 4 % up to ½; accuracies undecided, one seed.",
        ),
        Verdict(
            "?",
            "Figures 1, 4, 5: cost, maps, gates",
            "figure1 figure4 figure5",
            "",
            "correlations of the maps <cached_figure4|tables/0/rows/layer=blocks.0/correlation|+.2f>, <cached_figure4|tables/0/rows/layer=blocks.1/correlation|+.2f>, <cached_figure4|tables/0/rows/layer=blocks.2/correlation|+.2f>, <cached_figure4|tables/0/rows/layer=blocks.3/correlation|+.2f>",
            "One seed each; gates hardly moved in 500 updates.",
        ),
        Verdict(
            "✓",
            "Not in the paper: a cache per stream",
            "",
            "",
            "recall of pairs <bench_memory|benchmarks/name=mqar/rows/name=window/mean|.2f> → <bench_memory|benchmarks/name=mqar/rows/name=gated-cache/mean|.2f>; never written <bench_memory|benchmarks/name=mqar/rows/name=gated-cache-unwritten/mean|.2f>",
            "Three seeds.",
        ),
        Verdict(
            "✗",
            "Not in the paper: novels",
            "",
            "",
            "<text_state|rows/name=text-state-cached/against/difference|+.3f> bits a byte",
            "Behind Transformer-XL's own memory of the same size.",
        ),
    ),
    "linear_transformers": (
        Verdict(
            "✓",
            "Figure 1: time",
            "figure1",
            "linear in the length",
            "8,192 tokens: linear <linear_figure1|tables/0/rows/N=8192/linear|.0f>, softmax <linear_figure1|tables/0/rows/N=8192/softmax|,.0f>, LSH-1 <linear_figure1|tables/0/rows/N=8192/lsh-1|.0f> ms",
            "Linear grows with the length, softmax with its square.",
        ),
        Verdict(
            "≈",
            "Figure 1: memory",
            "figure1",
            "linear in the length",
            "linear <linear_figure1|tables/1/rows/N=8192/linear|.0f>, softmax <linear_figure1|tables/1/rows/N=8192/softmax|.0f>, LSH-1 <linear_figure1|tables/1/rows/N=8192/lsh-1|.0f> MiB",
            "PyTorch's fused softmax needs as little.",
        ),
        Verdict(
            "✓",
            "§3.3.1: gradient at constant memory",
            "",
            "no state per token",
            "one float a token and head",
            "128 and 1,024 tokens.",
        ),
        Verdict(
            "≈",
            "Figure 2: copying",
            "figure2",
            "as softmax, LSH worse",
            "test loss <copy_figure2|tables/0/rows/=softmax/test loss, nats|.0e> softmax, <copy_figure2|tables/0/rows/=linear/test loss, nats|.0e> linear, <copy_figure2|tables/0/rows/=lsh-4/test loss, nats|.0e> LSH-4",
            "All copy; the same loss is not shown.",
        ),
        Verdict(
            "✓",
            "Table 1, Figure 5: bits a dimension",
            "experiment",
            "softmax .621, linear .644, LSH-1 .745",
            "<linear_experiment|tables/0/rows/=softmax/bits~dim|.3f>, <linear_experiment|tables/0/rows/=linear/bits~dim|.3f>, <linear_experiment|tables/0/rows/=lsh-1/bits~dim|.3f>",
            "The paper's order, three seeds; behind softmax from 2,700 updates on.",
        ),
        Verdict(
            "?",
            "Table 1: LSH-4",
            "table1",
            ".676",
            "<mnist_pixels|rows/name=mnist-pixels-small-lsh-4/mean|.3f/0.6931471805599453>, linear <mnist_pixels|rows/name=mnist-pixels-small-linear/mean|.3f/0.6931471805599453>",
            "One seed.",
        ),
        Verdict(
            "≈",
            "Table 1: images a second; one image",
            "table1 latency",
            "317 times softmax; one image 13.2",
            "<writing_images|images~s and best batch/linear/0 ÷ images~s and best batch/softmax/0|.0f> times, with kept keys <writing_images|images~s and best batch/linear/0 ÷ images~s and best batch/softmax, cached/0|.1f>; one image <linear_latency|tables/0/rows/=softmax/relative to linear|.1f>, with kept keys <linear_latency|tables/0/rows/=softmax, cached/relative to linear|.1f>",
            "Most of the factor is keys that softmax does not keep. Estimated, untrained.",
        ),
        Verdict(
            "≈",
            "§4.2: 1,000 times as fast",
            "cifar10",
            "4,462 times",
            "<cifar_pixels|tables/1/rows/=softmax/linear is faster by|,.0f> times; with kept keys <cifar_pixels|tables/1/rows/=softmax, cached/linear is faster by|.1f>",
            "Estimated, untrained.",
        ),
        Verdict(
            "✓",
            "§4.2.1: constant memory",
            "constant_memory",
            "10,000 images at once",
            "<linear_constant_memory|tables/0/rows/bytes read=783/linear|,.0f> bytes at every position; 10,000 images in <linear_constant_memory|tables/1/rows/3/peak GiB|.1f> GiB",
            "LSH and all 783 steps not run.",
        ),
        Verdict(
            "?",
            "Table 2: CIFAR-10, bits",
            "cifar10",
            "3.40 linear, 3.47 softmax",
            "<cifar_pixels|tables/0/rows/=linear/bits~dim|.2f>, <cifar_pixels|tables/0/rows/=softmax/bits~dim|.2f>",
            "500 updates at 16 × 16, one seed; the paper's table is not in the text at hand.",
        ),
        Verdict(
            "✗",
            "Table 3: speech, error",
            "speech",
            "softmax 5.1, linear 8.1, LSTM 10.9",
            "<speech|tables/0/rows/=softmax/token error rate, %|s>, <speech|tables/0/rows/=linear/token error rate, %|s>, LSTM <speech|tables/0/rows/=bilstm/token error rate, %|s> %",
            "The LSTM is first, not last. Spoken digits, five seeds; rates not tuned.",
        ),
        Verdict(
            "≈",
            "Table 3: speech, time",
            "speech",
            "linear the fastest",
            "<speech|tables/0/rows/=linear/seconds per epoch|.1f> s an epoch, softmax <speech|tables/0/rows/=softmax/seconds per epoch|.1f>",
            "2.8 times at 2,400 frames; no order at 54.",
        ),
        Verdict("✗", "Figure 3: digits", "figure3", "clean digits", "", "Several are no digit; small model, by eye."),
    ),
    "memformer": (
        Verdict(
            "✓",
            "Table 1: the memory helps",
            "experiment",
            "1.745 → 1.594 perplexity",
            "<memformer_experiment|tables/1/rows/minus=without memory/difference|+.3f> nats (<memformer_experiment|tables/1/rows/minus=without memory/from|+.3f> to <memformer_experiment|tables/1/rows/minus=without memory/to|+.3f>)",
            "MNIST at 14 × 14, five seeds.",
        ),
        Verdict(
            "✓",
            "Table 1: ahead of Transformer-XL",
            "experiment",
            "1.611 → 1.555",
            "<memformer_experiment|tables/1/rows/minus=Transformer-XL/difference|+.3f> nats (<memformer_experiment|tables/1/rows/minus=Transformer-XL/from|+.3f> to <memformer_experiment|tables/1/rows/minus=Transformer-XL/to|+.3f>)",
            "Equal parameters, one learning rate.",
        ),
        Verdict(
            "?",
            "Table 1: ahead of a Transformer",
            "table1",
            "1.569 → 1.555",
            "<memformer_table1|tables/1/rows/=Transformer decoder/perplexity|s> → <memformer_table1|tables/1/rows/=Memformer 4+8/perplexity|s>",
            "Digits, three seeds; not shown after Holm.",
        ),
        Verdict(
            "✓",
            "Table 1: ahead of an LSTM",
            "table1",
            "1.698 → 1.555",
            "<memformer_table1|tables/1/rows/=LSTM/perplexity|s> → <memformer_table1|tables/1/rows/=Memformer 4+8/perplexity|s>",
            "Digits, three seeds.",
        ),
        Verdict(
            "✗",
            "Table 1: forgetting helps",
            "experiment",
            "1.630 → 1.594",
            "<memformer_experiment|tables/1/rows/minus=without forgetting/difference|+.3f> nats (<memformer_experiment|tables/1/rows/minus=without forgetting/from|+.3f> to <memformer_experiment|tables/1/rows/minus=without forgetting/to|+.3f>)",
            "Seed by seed at most .0005: the paper's gain is excluded.",
        ),
        Verdict(
            "?", "Table 1: slots, τ, heads, layers", "table1", "", "", "No difference is shown; digits, three seeds."
        ),
        Verdict(
            "✗",
            "Table 1: a tenth of the FLOPs",
            "table1",
            "5.0 against 49.1 G",
            "<memformer_table1|tables/0/rows/=Memformer 4+8/GFLOP|.1f> against <memformer_table1|tables/0/rows/=Transformer-XL memory=784/GFLOP|.1f> G",
            "Half, counted; more than the Transformer's.",
        ),
        Verdict(
            "?",
            "Table 2: perplexity of text",
            "table2",
            "22.74; Transformer-XL 23.67",
            "<memformer_table2|tables/2/rows/=Memformer 4+16/perplexity|.2f>; <memformer_table2|tables/2/rows/=Transformer-XL base memory=32/perplexity|.2f>",
            "Reversed order; one seed, 600 updates.",
        ),
        Verdict(
            "?",
            "Not in the paper: a fact 4,096 tokens later",
            "recall",
            "",
            "replay <recall|tables/0/rows/=Memformer, replay/right, %|.1f> %, horizon 1 <recall|tables/0/rows/=Memformer, horizon 1/right, %|.1f> %",
            "One seed; a guess is right in 6 %.",
        ),
        Verdict(
            "✗",
            "Not in the paper: novels at equal time",
            "",
            "",
            "<text_state|rows/name=text-state-memformer/against/difference|+.3f> bits a byte",
            "Behind Transformer-XL of the same state; three seeds.",
        ),
        Verdict(
            "≈",
            "Table 2: 3.2 times as fast",
            "table2",
            "3.2",
            "<memformer_table2|tables/1/rows/=Transformer-XL ~ Memformer/ms per generated token|.2f> times",
            "On one thread of a CPU, untrained.",
        ),
        Verdict(
            "✓",
            "Table 3: replay",
            "table3",
            "memory 1 : .61 : .45, speed 1 : .48 : .90",
            "memory 1 : <memformer_table3|tables/0/rows/=GC/of BPTT's|.2f> : <memformer_table3|tables/0/rows/=MRBP/of BPTT's|.2f>, speed 1 : <memformer_table3|tables/0/rows/=GC/relative speed|.2f> : <memformer_table3|tables/0/rows/=MRBP/relative speed|.2f>",
            "Back-propagation, checkpointing, replay: faster and smaller.",
        ),
        Verdict("≈", "Figure 4: drift to the end", "figure4", "", "", "Holds for a bias shorter than the slot."),
        Verdict(
            "✓",
            "Figure 5: FLOPs by length",
            "figure5",
            "linear",
            "8,192 tokens: <memformer_figure5|tables/0/rows/tokens=8,192/Memformer|.0f> G, Transformer <memformer_figure5|tables/0/rows/tokens=8,192/Transformer|.0f>",
            "Below 1,024 tokens Memformer's are the most.",
        ),
        Verdict(
            "≈",
            "Figure 5: memory",
            "figure5",
            "8.1 times less",
            "<memformer_figure5|tables/1/rows/-2/Transformer-XL ~ Memformer|.1f> times less; the state alone <memformer_figure5|tables/1/rows/-4/Transformer-XL ~ Memformer|.1f>",
            "Running models on a CPU.",
        ),
        Verdict(
            "✗",
            "Figure 6: 60 to 80 % of slots hold",
            "figure6",
            "60 to 80 %",
            "<memformer_figure6|tables/0/rows/0/share, %|.0f> %",
            "Short trainings, bounds of our own.",
        ),
        Verdict(
            "?",
            "Figures 7, 8: what slots read; horizon; number",
            "figure7 figure8",
            "a horizon of 1 is the worst",
            "<memformer_figure8|tables/0/rows/horizon=1/perplexity|.2f>; longer <memformer_figure8|tables/0/rows/horizon=4/perplexity|.2f> to <memformer_figure8|tables/0/rows/horizon=32/perplexity|.2f>",
            "One seed, 150 updates; Figure 7 shows nothing.",
        ),
    ),
}
