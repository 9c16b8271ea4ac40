"""Training and beam search of `mnemos.EncoderDecoder` beside transformers' MarianMTModel of the same shape and weights.

    python benchmarks/translation.py [--shapes small iwslt] [--batches 1 32] [--rounds 5] [--threads 1] [--out FILE]

Shapes: "small" has 4 + 4 layers, width 128, MLP 256; "iwslt" 6 + 6 layers, width 512, MLP 1024; both 4 heads and 10,000
tokens. Sources have 20 to 60 tokens, padded. decode: beam 5, 40 tokens per sentence (random weights end none before),
both in float32. train: forward, backward and AdamW of 32 pairs, with dropout .1 at the same places. First, both must
give the same tokens and scores, and the same loss and gradients. Then each is measured once per round, right after the
other, in an order that rotates. A ratio is their time divided by ours in the same round: median, smallest and largest.

"mnemos bfloat16" and "mnemos int8" search with a copy of the decoder's matrices in fewer bits (`mnemos.fused_step`).

clock: "cpu", the CPU time of the process, which other programs disturb less than the wall clock; with one thread the
two mean the same. CTranslate2 is measured too if it is installed (float32, and int8 beside it); it is no dependency.
"""

import argparse
import copy
import functools
import importlib.util
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from command import beside, command, write
from torch import Tensor
from torch.nn import functional as F

from mnemos import BeamConfig, EncoderDecoder, Pair, beam_search, fused_step, libraries
from mnemos.lab.measure.timing import race
from mnemos.lab.translation.marian import from_marian

SHAPES = {"small": (128, 4, 256), "iwslt": (512, 6, 1024)}  # width, layers on each side, MLP
VOCABULARY, HEADS, BEAMS, LENGTH, TRAINED = 10_000, 4, 5, 40, 32
EOS, PAD = 0, VOCABULARY - 1
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
Run = Callable[[], Any]


def host(shape: str, dropout: float) -> Any:
    """A MarianMTModel with random weights, in training mode."""
    torch.manual_seed(0)
    width, layers, mlp = SHAPES[shape]
    found, sides = libraries.transformers(), ("encoder", "decoder")
    sizes = {f"{side}_{name}": size for side in sides for name, size in (("layers", layers), ("ffn_dim", mlp))}
    sizes |= {f"{side}_attention_heads": HEADS for side in sides}
    drops = {name: dropout for name in ("dropout", "attention_dropout", "activation_dropout")}
    tokens = {"pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": PAD, "forced_eos_token_id": None}
    config = found.MarianConfig(
        vocab_size=VOCABULARY, d_model=width, scale_embedding=True, init_std=0.05, **sizes, **drops, **tokens
    )
    model = found.MarianMTModel(config)
    with torch.no_grad():
        model.model.shared.weight[PAD] = 0  # as CTranslate2 begins every sentence
    return model


def sources(rows: int) -> tuple[Tensor, Tensor]:
    """Sentences of 20 to 60 tokens (40 if there is one), and which are not padding."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(20, 61, (rows,), generator=generator) if rows > 1 else torch.tensor([40])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    tokens = torch.randint(1, PAD, mask.shape, generator=generator)
    return tokens.masked_fill(~mask, PAD), mask


def decoders(theirs: Any, ours: EncoderDecoder, rows: int) -> dict[str, Run]:
    """A beam search over all sentences by each library."""
    source, mask = sources(rows)
    start = torch.full((rows, 1), PAD)
    config = BeamConfig(eos=EOS, beams=BEAMS, n_best=1, max_length=LENGTH, stopping="heuristic")
    settings = {"num_beams": BEAMS, "max_new_tokens": LENGTH, "early_stopping": False, "length_penalty": 1.0}

    def transformers() -> Any:
        with torch.inference_mode():
            return theirs.generate(
                input_ids=source,
                attention_mask=mask.long(),
                return_dict_in_generate=True,
                output_scores=True,
                do_sample=False,
                **settings,
            )

    def mnemos(step: Any = None) -> Any:
        with torch.no_grad():
            return beam_search(ours, ours.encode(source, mask), start, config, step=step)

    expected, found = transformers(), mnemos()
    for row, tokens, score in zip(found, expected.sequences, expected.sequences_scores, strict=True):
        best = row[0]
        assert best.tokens.tolist() == tokens[1 : 1 + len(best.tokens)].tolist(), (best, tokens)
        assert abs(best.score - score.item()) < 1e-3, (best.score, score)
    return {
        "mnemos": mnemos,
        "transformers": transformers,
        **{f"mnemos {kind}": functools.partial(mnemos, fused_step(ours, kind)) for kind in ("bfloat16", "int8")},
        **ctranslate2(theirs, source, mask, found[0][0].tokens.tolist()),
    }


def ctranslate2(theirs: Any, source: Tensor, mask: Tensor, expected: list[int]) -> dict[str, Run]:
    """The same search by CTranslate2, if it is installed; in float32 its first translation must be as expected."""
    if not importlib.util.find_spec("ctranslate2"):
        return {}
    import ctranslate2 as peer

    names, found = [f"t{i}" for i in range(PAD)], {}  # it has no padding token
    texts = [[names[t] for t in row[keep].tolist()] for row, keep in zip(source, mask, strict=True)]
    given = {"beam_size": BEAMS, "max_decoding_length": LENGTH, "min_decoding_length": LENGTH}
    for kind in ("float32", "int8"):
        spec = peer.converters.transformers.MarianMTLoader().get_model_spec(copy.deepcopy(theirs))
        spec.config.bos_token = spec.config.eos_token = spec.config.decoder_start_token = names[EOS]
        spec.config.unk_token = names[1]
        spec.register_source_vocabulary(names), spec.register_target_vocabulary(names)
        with tempfile.TemporaryDirectory() as folder:
            spec.validate(), spec.optimize(quantization=kind), spec.save(folder)
            translator = peer.Translator(folder, compute_type=kind, intra_threads=torch.get_num_threads())
        found[f"ctranslate2 {kind}"] = lambda t=translator: t.translate_batch(texts, max_batch_size=64, **given)
    tokens = found["ctranslate2 float32"]()[0].hypotheses[0]
    assert tokens == [names[t] for t in expected], (tokens, expected)
    return found


def trainers(theirs: Any, ours: EncoderDecoder, dropout: bool) -> dict[str, Run]:
    """An update of each model on the same pairs."""
    source, mask = sources(TRAINED)
    target, valid = source.roll(1, 0), mask.roll(1, 0)
    inputs = torch.cat([torch.full((TRAINED, 1), PAD), target[:, :-1]], 1)
    labels = target.masked_fill(~valid, -100)

    def step_of(model: Any, loss_of: Run) -> Run:
        model.train()
        optimiser = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)

        def step() -> Tensor:
            optimiser.zero_grad()
            loss = loss_of()
            loss.backward()
            optimiser.step()
            return loss.detach()

        return step

    def their_loss() -> Tensor:
        return theirs(
            input_ids=source, attention_mask=mask.long(), decoder_input_ids=inputs, labels=labels, use_cache=False
        ).loss

    def our_loss() -> Tensor:
        logits, _ = ours(Pair(source, inputs, mask))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    if not dropout:
        expected, found = their_loss(), our_loss()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        expected.backward(), found.backward()
        pairs = [(ours.head.weight.grad[:PAD], theirs.lm_head.weight.grad[:PAD])]  # theirs has none for inputs PAD
        pairs += [(ours.decoder[0].mlp.expand.bias.grad, theirs.model.decoder.layers[0].fc1.bias.grad)]
        for a, b in pairs:
            torch.testing.assert_close(a.norm(), b.norm(), rtol=1e-3, atol=0)
    return {"mnemos": step_of(ours, our_loss), "transformers": step_of(theirs, their_loss)}


def main() -> None:
    parser = command(
        __doc__, choices={"shapes": SHAPES, "clock": CLOCKS}, shapes=list(SHAPES), rounds=5, threads=1, clock="cpu"
    )
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32], help="of decoding; none: training alone")
    parser.add_argument("--train", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: dict[str, Any] = {}
    for shape in options.shapes:
        runs = {}
        theirs = host(shape, 0.0)
        ours = from_marian(theirs)
        if options.train:
            trained, dropped = copy.deepcopy(theirs), host(shape, 0.1)  # decoding has weights that are still the same
            runs["train, dropout 0"] = lambda a=trained: trainers(a, from_marian(a), False)
            runs["train, dropout .1"] = lambda a=dropped: trainers(a, from_marian(a), True)
        for batch in options.batches:
            runs[f"decode, batch {batch}"] = lambda a=theirs, b=ours, n=batch: decoders(a.eval(), b.eval(), n)
        for name, make in runs.items():
            row = rows[f"{shape}, {name}"] = beside(
                race(make(), options.rounds, CLOCKS[options.clock], least=0.0), "mnemos"
            )
            cells = "  ".join(
                f"{one} {1e3 * found['seconds']:.0f} ms ({found['ratio']:.2f}x, {found['range'][0]:.2f} to "
                f"{found['range'][1]:.2f})"
                for one, found in row.items()
            )
            print(f"{shape}, {name}: {cells}", flush=True)
    settings = {"rounds": options.rounds, "threads": options.threads, "clock": options.clock, "beams": BEAMS}
    write(options.out, {**settings, "tokens": LENGTH, "rows": rows})


if __name__ == "__main__":
    main()
