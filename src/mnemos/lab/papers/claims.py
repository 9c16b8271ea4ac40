"""Papers and their claims as data: names, statements, the paper's numbers, and the function that reproduces each."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from mnemos.errors import near_name
from mnemos.types import InputError

Values = Mapping[str, tuple[float, ...]]
_Entry = TypeVar("_Entry")


@dataclass(frozen=True)
class Claim:
    """One table or figure of a paper.

    about: what it measures. make: "module:function", as text, so that claims are listed without importing what trains;
    the function takes the claim and the options and returns a `Finding`. says: what is claimed. columns: the meaning of
    the numbers in each row of `values`. measures: it times or counts models and trains none, so that it takes no data,
    steps or seeds.
    """

    name: str
    about: str
    make: str
    says: str
    columns: tuple[str, ...] = ()
    values: Values = field(default_factory=dict)
    measures: bool = False

    @property
    def paper_columns(self) -> list[str]:
        return [f"paper {column}" for column in self.columns]


@dataclass(frozen=True)
class Paper:
    """A paper and those of its claims that this library can reproduce."""

    name: str
    title: str
    claims: tuple[Claim, ...]

    def claim(self, name: str) -> Claim:
        """The claim `name`. Raises InputError, with the most similar name, for an unknown one."""
        return choose(name, {claim.name: claim for claim in self.claims}, f"a claim of {self.name}")


def choose(name: str, entries: Mapping[str, _Entry], expected: str) -> _Entry:
    """The entry `name`. Raises InputError, with the most similar name, for an unknown one."""
    if name not in entries:
        hint = near_name(name, entries, "choose one of these")
        raise InputError(f"expected {expected} ({', '.join(entries)}), found {name!r}; {hint}")
    return entries[name]


def _paper(name: str, title: str, text: str) -> Paper:
    """A paper; text: `NAME MODULE:FUNCTION [measures]` of each claim and, indented, about, what it says, its table."""
    claims = []
    for block in re.split(r"\n(?=\S)", text.strip()):
        head, about, *lines = block.split("\n")
        claim, make, *measures = head.split()
        says = " ".join(line.strip() for line in lines if "|" not in line)
        table = [[cell.strip() for cell in line.split("|")] for line in lines if "|" in line] or [[""]]
        # Whole numbers stay whole, so that 313 images a second are not printed as 313.0.
        values = {row: tuple(float(n) if "." in n else int(n) for n in numbers) for row, *numbers in table[1:]}
        make = f"{__package__}.{name}.{make}"
        columns = tuple(table[0][1:])
        claims.append(Claim(claim, about.strip(), make, says, columns, values, bool(measures)))
    return Paper(name, title, tuple(claims))


_PAPERS = (
    _paper(
        "cached_transformers",
        "Cached Transformers: Improving Transformers with Differentiable Memory Cache (arXiv 2312.12742)",
        """
figure1 figures:figure1
  accuracy by FLOPs, with and without a cache
  At equal FLOPs, cached models are more accurate than their baselines.
figure4 figures:figure4
  o_self and o_mem of a middle layer, as images
  o_mem shows what the images of a class have in common, o_self what is particular to an image.
figure5 figures:figure5
  σ(λ) by layer and head
  σ(λ) > 0.5 in more than half of the layers; it is lower in the last layers.
table1 tables:classification
  image classification, with and without a cache
  A cache adds 0.5 to 3.3 points of top-1 accuracy on ImageNet-1k.
             | top-1 | top-1 cached | top-5 | top-5 cached
  ViT-S      |  79.9 |         81.3 |  95.0 |         95.5
  PVT-Tiny   |  75.1 |         78.4 |  92.3 |         94.2
  PVT-Small  |  79.9 |         81.8 |  95.0 |         95.9
  PVT-Medium |  81.2 |         83.0 |  95.7 |         96.4
  Swin-T     |  81.2 |         82.1 |  95.5 |         95.9
  PVTv2-B2   |  82.0 |         82.6 |  95.9 |         96.2
  PVTv2-B3   |  83.2 |         83.7 |  96.3 |         96.4
  PVTv2-B4   |  83.6 |         84.1 |  96.3 |         96.6
table2 tables:table2
  no cache, a cache of keys and values, a gated cache
  A cache of keys and values of earlier batches adds −0.3 to +0.1 points, a gated cache 1.4 to 3.3.
            | none | attention-based |  GRC
  ViT-S     | 79.9 |            80.0 | 81.3
  PVT-Tiny  | 75.1 |            74.8 | 78.4
  PVT-Small | 79.9 |            79.6 | 81.8
experiment experiment:experiment
  CIFAR-10 over seeds: a cache beside no cache, equal parameters, a constant, keys and values; and the gap
  A gated cache adds 1.4 points to ViT-S, one of keys and values 0.1; it regularises across samples.
table3 tables:detection measures
  object detection: Mask R-CNN on COCO
  A cache in the backbone adds 3.2 to 4.7 points of AP for boxes and for masks.
                     |  APb | APb50 | APb75 |  APm | APm50 | APm75
  PVT-Tiny           | 36.7 |  59.2 |  39.3 | 35.1 |  56.7 |  37.3
  PVT-Tiny, cached   | 41.0 |  63.4 |  44.8 | 38.3 |  60.4 |  41.1
  PVT-Small          | 40.4 |  62.9 |  43.8 | 36.3 |  60.1 |  40.3
  PVT-Small, cached  | 44.5 |  67.1 |  48.6 | 41.0 |  64.0 |  44.1
  PVT-Medium         | 42.0 |  64.4 |  45.6 | 39.0 |  61.6 |  42.1
  PVT-Medium, cached | 46.6 |  68.2 |  51.0 | 42.3 |  65.3 |  45.5
table4 sequence_tables:table4
  translation: BLEU on IWSLT14 and IWSLT15
  A cache in the encoder adds 0.2 to 0.6 BLEU in each of six tracks.
                      | 14 De-En | 14 Es-En | 14 En-Fr | 15 De-En | 15 En-Vi | 15 Cs-En
  Transformer         |     35.5 |     41.4 |     41.5 |     36.1 |     29.8 |     28.8
  Transformer, cached |     36.0 |     41.8 |     41.7 |     36.3 |     30.2 |     29.4
table5 sequence_tables:table5
  language modelling: test perplexity by words on WikiText-103
  A gated cache lowers the perplexity of Transformer-XL by 1.1 (base) and 0.4 (large).
                                  | perplexity
  Transformer-XL base             |       24.0
  Transformer-XL base, MT-cached  |      23.99
  Transformer-XL base, RMT-cached |      23.95
  Transformer-XL base, cached     |       22.9
  Transformer-XL large            |       18.3
  Transformer-XL large, cached    |       17.9
table6 sequence_tables:table6
  Long ListOps: accuracy of three models, with and without a cache
  A cache adds 1.2 points to a Transformer, 1.4 to BigBird and 0.6 to Reformer.
              | accuracy | accuracy cached
  Transformer |    36.23 |            37.4
  BigBird     |    36.06 |           37.45
  Reformer    |    37.27 |           37.85
table7 tables:detection measures
  object detection: RetinaNet on COCO
  A cache in the backbone adds 3.5 to 3.8 points of AP.
                     |   AP | AP50 | AP75 |  APS |  APM |  APL
  PVT-Tiny           | 36.7 | 56.9 | 38.9 | 22.6 | 38.8 | 50.0
  PVT-Tiny, cached   | 40.2 | 61.1 | 43.1 | 25.0 | 43.7 | 53.4
  PVT-Small          | 40.4 | 61.3 | 43.0 | 25.0 | 42.9 | 55.7
  PVT-Small, cached  | 44.0 | 65.4 | 47.4 | 29.7 | 47.7 | 57.5
  PVT-Medium         | 41.9 | 63.1 | 44.3 | 25.0 | 44.9 | 57.6
  PVT-Medium, cached | 45.7 | 67.1 | 49.1 | 29.0 | 49.3 | 60.2
table8 tables:classification
  ImageNet-22k
  A cache adds 0.8 points to Swin-T.
              | top-1 | top-1 cached | top-5 | top-5 cached
  Swin-T, 22k |  80.9 |         81.7 |  96.0 |         96.4
table9 tables:table9 measures
  throughput and FLOPs
  A cache costs 10 to 15 % more FLOPs and 17 to 19 % of the throughput (V100).
             | train | train cached | test | test cached |   G | G cached
  PVT-Tiny   |   313 |          257 |  930 |         768 | 1.9 |     2.15
  PVT-Small  |   181 |          146 |  689 |         561 | 3.8 |     4.29
  PVT-Medium |   101 |           84 |  393 |         319 | 6.7 |     7.61
table10 tables:table10
  caching ratio
  Accuracy rises with the ratio, but gains little above 0.5.
        |    G | top-1
  0     |  1.9 |  75.1
  0.125 | 1.93 |  75.7
  0.25  | 1.96 |  76.8
  0.5   | 2.15 |  78.4
  1     | 2.97 |  78.5
costs tables:added_costs measures
  parameters and FLOPs that a cache adds, with both lengths
  At ratio 0.5 a cache costs about 10 to 15 % more FLOPs and parameters.
""",
    ),
    _paper(
        "linear_transformers",
        "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention (arXiv 2006.16236)",
        """
figure1 figures:figure1 measures
  time and memory of forward and backward pass by sequence length
  The cost of softmax grows quadratically with the length; that of linear attention and LSH grows linearly.
figure2 figures:figure2
  the copy task: loss by update
  Linear attention converges smoothly to the loss of softmax; LSH does not reach it.
figure3 figures:figure3
  MNIST images: unconditional samples and completions
  Samples have sharp boundaries and no noise; completions keep the stroke's style and width.
table1 tables:likelihood_and_speed
  MNIST byte by byte: bits/dim and images per second
  Linear attention is 0.023 bits behind softmax and generates 317 times as fast.
                  | bits/dim | images/s
  softmax         |    0.621 |     0.45
  softmax, cached |    0.621 |     7.56
  lsh-1           |    0.745 |     0.68
  lsh-4           |    0.676 |     0.27
  linear          |    0.644 |    142.8
experiment experiment:experiment
  MNIST byte by byte over seeds: linear, softmax and LSH-1, and how they are trained (Table 1)
  Linear attention is 0.023 bits behind softmax and 0.101 ahead of LSH with one round.
cifar10 tables:likelihood_and_speed
  CIFAR-10 byte by byte: bits/dim and images per second (Table 2)
  After equal training time, linear attention is better than softmax and generates 4,462 times as fast.
                  | bits/dim | images/s
  softmax         |     3.47 |    0.004
  softmax, cached |     3.47 |     0.32
  lsh-1           |     3.39 |    0.015
  lsh-4           |     3.51 |    0.005
  linear          |      3.4 |    17.85
latency tables:latency measures
  seconds to generate one MNIST image at batch size 1 on a CPU
  Linear attention needs 5.5 s, softmax 72.6 s, and softmax with cached keys and values 7.4 s.
                  | seconds
  softmax         |    72.6
  softmax, cached |     7.4
  linear          |     5.5
constant_memory tables:constant_memory measures
  bytes of state by position, and many MNIST images generated at once
  Linear attention generates 10,000 images at once on one GPU with constant memory; softmax's memory grows.
speech tables:speech
  speech recognition with CTC (Table 3)
  Linear attention is better than an LSTM and LSH, worse than softmax, and the fastest to train.
          | error rate | seconds per epoch
  bilstm  |      10.94 |            1047.0
  softmax |       5.12 |            2711.0
  lsh-4   |       9.33 |            2250.0
  linear  |       8.08 |             824.0
""",
    ),
    _paper(
        "memformer",
        "Memformer: A Memory-Augmented Transformer for Sequence Modeling (arXiv 2010.06891)",
        """
table1 tables:table1
  MNIST byte by byte: FLOPs and perplexity, with ablations
  Memformer is the best model, with a tenth of the FLOPs of the best Transformer-XL. Every component contributes.
  Medians of three runs.
                            | GFLOP | perplexity
  LSTM                      |  52.5 |      1.698
  Transformer decoder       |  41.3 |      1.569
  Transformer-XL memory=56  |   5.6 |       1.65
  Transformer-XL memory=224 |  15.6 |      1.618
  Transformer-XL memory=784 |  49.1 |      1.611
  Memformer 4+8             |   5.0 |      1.555
  Memformer 2+6 memory=64   |   3.9 |      1.594
  Memformer 2+6 memory=32   |   3.9 |        1.6
  Memformer 2+6 memory=16   |   3.9 |      1.604
  Memformer 2+6 memory=1    |   3.9 |      1.627
  Memformer 4+4             |   3.6 |      1.628
  w/o memory                |   1.8 |      1.745
  temperature=1.0           |   3.9 |      1.612
  w/o forgetting            |   3.9 |       1.63
  w/o multi-head            |   3.9 |      1.626
table2 tables:table2
  language modelling: FLOPs, perplexity, and inference compared with Transformer-XL
  Memformer has the best perplexity, with a third of the FLOPs of Transformer-XL with as large a memory. It is 3.2
  times as fast.
                                                  | GFLOP | perplexity
  Transformer-XL base memory=1600                 | 250.0 |      23.95
  Transformer-XL base memory=1024                 | 168.0 |      23.67
  Transformer-XL base memory=512                  |  94.0 |      23.94
  Transformer-XL base memory=256                  |  58.0 |      25.39
  Transformer-XL base memory=128                  |  39.0 |       25.6
  Transformer-XL base memory=32                   |  26.0 |      27.22
  Compressive Transformer memory=512 compress=512 | 172.0 |      23.23
  Memformer 4+16                                  |  54.0 |      22.74
  Memformer 4+12                                  |  48.0 |      23.91
  Memformer memory=512                            |  35.0 |       23.3
  Memformer w/o memory                            |  31.0 |      25.57
table3 tables:table3 measures
  back-propagation through time, gradient checkpointing and memory replay
  Replay needs less than half of the memory of back-propagation through time, at 0.90 of its speed.
       |      MB | relative speed
  BPTT | 16177.0 |            1.0
  GC   |  9885.0 |           0.48
  MRBP |  7229.0 |            0.9
figure4 figures:figure4 measures
  forgetting: the drift of a slot without input to its terminal state
  A slot near its terminal state is forgotten quickly; a slot opposite to it is forgotten slowly.
figure5 figures:figure5 measures
  FLOPs by sequence length, and bytes by memory size
  The FLOPs of Memformer grow linearly with the length. With a large memory the model takes 8.1 times less memory than
  Transformer-XL.
figure6 figures:figure6
  three kinds of slots: they hold, mix or are overwritten
  In the middle of a document, 60 to 80 % of the slots hold their contents and 5 to 10 % are overwritten.
figure7 figures:figure7
  the words that a slot attends to
  A slot that is overwritten attends to named entities and verbs.
figure8 figures:figure8
  perplexity by time horizon and by number of slots
  A horizon of 1 is the worst, longer ones are better, and at 32 almost nothing is gained any more; most of the gain
  from slots is between 1 and 8.
experiment experiment:experiment
  MNIST at 14 x 14: Memformer, its ablations and an equal Transformer-XL over seeds (Table 1, Figure 6)
  Memory and forgetting lower the perplexity, and Memformer is ahead of Transformer-XL; 60 to 80 % of the slots hold.
recall tables:recall
  recall of a fact after 32 segments (not in the paper: a claim of this library)
  Slots carry information from the distant past. With a horizon of 1, no gradient passes through them.
""",
    ),
)
PAPERS = {paper.name: paper for paper in _PAPERS}
