"""Beam search, and independent samples, for every model with a state: `mnemos.beam_search`.

From top to bottom: the settings; the search with its loop over tokens; the pieces of a step: candidates, finished
hypotheses and when a sentence is done; and `DecoderStep`, which computes a token of all hypotheses.
"""

import contextlib
import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos._compat import is_plain, packed_products, with_children
from mnemos.config import check_fields
from mnemos.errors import near_arguments
from mnemos.native import codes
from mnemos.ops.checks import check_finite
from mnemos.ops.dense_layer import Linear, dense
from mnemos.types import InputError, Output, Rows, State, likelihood_of, select, take_rows

from .fused import ROWS, DecodeStep, fused_step
from .sampling import checked_settings, draw
from .stream import check_eval

IGNORE = -100  # in a prefix: no token
WAIT = 8  # steps after which a device is synchronised to see whether all sentences are done; on a CPU: every step
GROUP = 64  # columns whose maximum stands for them in `top_tokens`
WIDE = 1024  # columns from which on that is faster than `torch.topk` on a CPU
FEW = 100  # rows up to which the kernel of softmax attention is faster than products of packed matrices
LEAST = 200_000  # weights of a matrix from which on packing saves time; smaller ones stay in the caches
Stopping = Literal["fairseq", "early", "heuristic", "never"]


@dataclass(frozen=True)
class BeamConfig:
    """The settings of `beam_search`.

    Attributes:
        eos: the token that ends a hypothesis; None: all have the greatest length.
        beams: K, the number of hypotheses that are extended per sentence.
        n_best: how many are returned per sentence, at most K.
        max_length: the greatest number of tokens after the prefix, with the end token.
        min_length: the least number of tokens after the prefix, without the end token.
        length_penalty: α in score = Σ log p / lengthᵅ, where the length counts the end token and not the prefix. 0: the
            log-probability itself; above 0 favours longer hypotheses.
        stopping: when a sentence is done. "fairseq": as soon as K hypotheses have ended; at the greatest length the
            running ones take the end token, with its probability. The others are those of transformers, in which the
            best K of all that end are kept, and at the greatest length the running ones count as they are: "early"
            (early_stopping=True): as soon as K have ended; "heuristic" (False): when the best running one would be
            worse than all K if it ended now; "never" ("never"): when it cannot become better than the worst of them.
        no_repeat_ngram: no n tokens in a row occur twice in prefix and hypothesis; 0: allowed.
        forbidden: tokens that never occur, such as padding.
        temperature: 0: beam search. Above 0: K independent samples at this temperature, the best first.
        top_k, top_p: of samples: only the k most probable tokens, or the most probable ones with this probability.
    """

    eos: int | None = None
    beams: int = 5
    n_best: int = 1
    max_length: int = 200
    min_length: int = 0
    length_penalty: float = 1.0
    stopping: Stopping = "fairseq"
    no_repeat_ngram: int = 0
    forbidden: tuple[int, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "BeamConfig")
        checked_settings(self.temperature, self.top_k, self.top_p)
        for name, least in (("beams", 1), ("n_best", 1), ("max_length", 1), ("min_length", 0), ("no_repeat_ngram", 0)):
            if getattr(self, name) < least:
                raise InputError(f"BeamConfig.{name}: expected at least {least}, found {getattr(self, name)}; raise it")
        if self.n_best > self.beams:
            raise InputError(f"BeamConfig.n_best: expected at most beams, {self.beams}, found {self.n_best}; lower it")
        if self.min_length >= self.max_length:
            raise InputError(
                f"BeamConfig.min_length: expected below max_length {self.max_length}, found {self.min_length}; lower it"
            )
        if not math.isfinite(self.length_penalty):
            raise InputError(f"BeamConfig.length_penalty: expected a finite number, found {self.length_penalty}; use 1")
        if self.eos in self.forbidden:
            raise InputError(f"BeamConfig.forbidden: expected tokens other than eos, found {self.eos}; leave it out")


class Hypothesis(NamedTuple):
    """tokens [L] int64 without the prefix, the end token included; score = log_prob / Lᵅ; log_prob = Σ log p, in nats.

    finished: whether it ends with the end token.
    """

    tokens: Tensor
    score: float
    log_prob: float
    finished: bool


@near_arguments
def beam_search(
    model: nn.Module,
    state: State,
    prefix: Tensor,
    config: BeamConfig | None = None,
    generator: torch.Generator | None = None,
    step: DecodeStep | None = None,
    limits: Tensor | None = None,
) -> list[list[Hypothesis]]:
    """The best continuations of B sentences: found[b][i] is the i-th best of sentence b, at most `config.n_best`.

    There are fewer, or none, where constraints leave no token that may come next.

        state = model.encode(source, mask)                                   # an EncoderDecoder
        found = mnemos.beam_search(model, state, bos, BeamConfig(eos=2))     # bos [B, 1]
        found = mnemos.beam_search(language_model, None, prompt, BeamConfig(eos=0, temperature=1.0))

    model: any with `logits, state = model(tokens, state)`, in eval mode. state: of B rows (None: new ones); it is not
    changed. prefix [B, P] int64: the tokens that the hypotheses of a sentence begin with; a shorter one ends with −100.
    They are read and never scored, so a sentence has the same scores alone and in a batch. `generator` draws samples.
    step: what computes single tokens, by default `DecoderStep`: the kernel of `mnemos.fused_step` for few rows, and the
    model with packed matrices for many and where there is no kernel. limits [B] int64: the greatest length of each
    sentence, instead of `config.max_length` for all.

    The prefix is read once per sentence. Then a step extends K hypotheses of every sentence by the model's state: the
    rows of the best continuations are taken by `select`, which copies no keys and values in `EncoderDecoder` and
    `Transformer` with softmax attention (not in a gated cache). Sentences that are done leave the batch, an eighth
    of it at a time. Log-probabilities are in float32 at least. Cost per token: one step of B·K rows, one pass
    over B·K·V logits.

    Raises InputError for a model in training mode, a prefix that is empty or of other rows, tokens outside the
    vocabulary, limits of other rows or not above `config.min_length`, and NaN.
    """
    c = config or BeamConfig()
    lengths, limits = _checked(model, prefix, limits, c)
    likelihood, k, device = likelihood_of(model), c.beams, prefix.device
    common, longest = int(lengths.min()), int(lengths.max())  # tokens that every prefix has, and the longest one
    least, steps = int(limits.min()), int(limits.max()) + longest - common
    often = 1 if device.type == "cpu" else WAIT
    results: dict[int, list[Hypothesis]] = {}
    with torch.no_grad(), contextlib.ExitStack() as mode:
        # --- the common part of the prefixes, read once per sentence; then K rows of the state for each ---
        returned = model(prefix[:, :common], state)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise InputError(
                f"beam_search: expected a model that returns (outputs, state), found {type(returned).__name__} of "
                f"{type(model).__name__}; return both"
            )
        outputs, state = returned
        branch: Any = getattr(model, "branch", None)
        if k > 1 and branch is not None:
            state = branch(state, k)
        elif k > 1:
            state = select(state, torch.arange(len(prefix), device=device).repeat_interleave(k))
        logp = log_probs(outputs[:, -1], likelihood)  # [B, V], of the next token: the hypotheses are still the same
        _check_tokens(c, logp.shape[1])
        step = step or DecoderStep(model)
        # Inference mode makes operations cheaper to start. Other models may keep tensors that they computed in it,
        # which training could not use; the fast step keeps none that training differentiates.
        if isinstance(step, DecoderStep) and step.kernel.fused:
            mode.enter_context(torch.inference_mode())

        lengths, limits = lengths[:, None], limits[:, None]  # [B, 1]
        sentences = torch.arange(len(prefix), device=device)  # that are still in the batch
        tokens = prefix[:, None, :common].expand(-1, k, -1)  # [B, K, T] of the hypotheses
        scores = torch.zeros(len(prefix), 1, dtype=logp.dtype, device=device)  # [B, 1 or K]
        finished = Finished.none(scores.expand(-1, k), tokens)
        done, any_finished = scores > 0, False
        for number in range(steps):
            t = tokens.shape[2]  # with the prefix
            count = t + 1 - lengths  # [B, 1]: tokens after the prefix, with the next one

            # --- tokens that may not come next have a log-probability of −inf ---
            beams = len(logp) // len(count)
            if c.forbidden:
                logp[:, list(c.forbidden)] = -torch.inf
            if c.no_repeat_ngram:
                forbid_repeats(logp, tokens[:, :beams].flatten(0, 1), c.no_repeat_ngram)
            if c.eos is not None and c.min_length:
                early = (count <= c.min_length).repeat_interleave(beams, 0)[:, 0]
                logp[:, c.eos] = logp[:, c.eos].masked_fill(early, -torch.inf)
            forces_end = c.stopping == "fairseq" and c.eos is not None and not c.temperature
            near_end = t + 1 >= common + least  # where a sentence may first have its greatest length
            if forces_end and near_end:
                end = logp[:, c.eos].clone()
                logp.masked_fill_((count >= limits).repeat_interleave(beams, 0), -torch.inf)
                logp[:, c.eos] = end

            # --- candidates, the best first; those of a prefix that is not at its end are its next token ---
            if c.temperature:
                if scores.shape[1] < k:
                    logp, scores = logp.repeat_interleave(k, 0), scores.expand(-1, k)
                candidates = draw_each(logp, scores, (c.temperature, c.top_k, c.top_p), generator)
            else:
                candidates = best(logp, scores, 2 * k)
            if t < longest:
                token = prefix.index_select(0, sentences)[:, t : t + 1]
                free, zero = token == IGNORE, torch.zeros_like(candidates.scores)
                if not c.temperature:
                    zero[:, 1:] = -torch.inf  # one hypothesis, which the first free step continues
                candidates = Candidates(
                    torch.where(free, candidates.scores, zero),
                    torch.where(free, candidates.parents, 0),
                    torch.where(free, candidates.tokens, token),
                )

            # --- hypotheses that end: of the first K candidates; the others are there to go on with ---
            ends = candidates.tokens == (-1 if c.eos is None else c.eos)
            stops = None
            if near_end or ends.device.type != "cpu" or bool(ends.any()):  # in most steps none does
                ends, last = ends & (count > 0), count >= limits
                stops = ends | last
                hits = (ends if forces_end else stops)[:, :k] & (candidates.scores[:, :k] > -torch.inf)
                hits = accept_hits(finished.scores, hits, done, c.stopping)
                if hits.device.type != "cpu" or bool(hits.any()):
                    any_finished = True
                    penalised = candidates.scores[:, :k] / count.to(scores.dtype) ** c.length_penalty
                    new = Finished(
                        penalised.masked_fill(~hits, -torch.inf),
                        candidates.scores[:, :k],
                        count.expand_as(hits),
                        ends[:, :k],
                        torch.cat([_of_parents(tokens, candidates.parents[:, :k]), candidates.tokens[:, :k, None]], 2),
                    )
                    finished = finished.merge(new)

            # --- hypotheses that go on: the first K candidates that do not end, with the rows of their parents ---
            if stops is not None:
                candidates = candidates._replace(scores=candidates.scores.masked_fill(stops, -torch.inf))
                if not c.temperature:
                    order = torch.arange(2 * k, device=device) + 2 * k * stops
                    chosen = order.topk(k, largest=False).indices
                    candidates = Candidates(*(x.gather(1, chosen) for x in candidates))
            candidates = Candidates(*(x[:, :k] for x in candidates))
            if not c.temperature and (scores.shape[1] > 1 or k == 1):  # at first the rows are the same
                same = torch.arange(k, device=device)
                if device.type != "cpu" or not torch.equal(candidates.parents, same.expand_as(candidates.parents)):
                    base = torch.arange(len(sentences), device=device)[:, None] * k
                    state = take_rows(state, Rows((candidates.parents + base).flatten()))
            tokens = torch.cat([_of_parents(tokens, candidates.parents), candidates.tokens[..., None]], 2)
            scores = candidates.scores

            # --- sentences that are done leave the batch, an eighth of it at a time ---
            if c.temperature:
                done = done | ((scores == -torch.inf).all(1, keepdim=True) & (count > 0))
            elif any_finished:
                spans = torch.cat([count, limits], 1)
                full = is_done(finished.scores, scores[:, :1], spans, c.stopping, c.length_penalty)
                done = done | (full & (count > 0))
            if number + 1 == steps:
                break
            if (number + 1) % often == 0:
                left = int(done.sum())
                if left == len(done):
                    break
                if left >= max(1, len(done) // 8):
                    over, stay = done[:, 0].nonzero()[:, 0], (~done[:, 0]).nonzero()[:, 0]
                    hypotheses = finished.select(over).listed(lengths[over, 0].tolist(), c.n_best)
                    results.update(zip(sentences[over].tolist(), hypotheses, strict=True))
                    state = select(state, (stay[:, None] * k + torch.arange(k, device=device)).flatten())
                    finished = finished.select(stay)
                    tokens, scores, sentences, done, lengths, limits = (
                        x.index_select(0, stay) for x in (tokens, scores, sentences, done, lengths, limits)
                    )

            # --- the model reads the tokens ---
            outputs, state = step(tokens.flatten(0, 1)[:, -1:], state)
            logp = log_probs(outputs[:, -1], likelihood)

        results.update(zip(sentences.tolist(), finished.listed(lengths[:, 0].tolist(), c.n_best), strict=True))
    # Tokens of inference mode could not be trained on.
    return [[h._replace(tokens=h.tokens.clone()) for h in results[i]] for i in range(len(prefix))]


class Candidates(NamedTuple):
    """Continuations of the K hypotheses of B sentences, the best first: each [B, N].

    scores: the summed log-probability with the token (−inf: none). parents: which hypothesis it continues. tokens.
    """

    scores: Tensor
    parents: Tensor
    tokens: Tensor


def _of_parents(tokens: Tensor, parents: Tensor) -> Tensor:
    """The tokens [B, N, T] of the hypotheses [B, N] among tokens [B, K, T]."""
    return tokens.gather(1, parents[..., None].expand(-1, -1, tokens.shape[2]))


def log_probs(outputs: Tensor, likelihood: Any) -> Tensor:
    """Log-probabilities [R, V] of a model's outputs [R, ·], in float32 at least: sums in less would not be comparable.

    Raises InputError for a likelihood without log-probabilities.
    """
    if likelihood is None:
        return outputs.to(torch.promote_types(outputs.dtype, torch.float32)).log_softmax(-1)
    if not hasattr(likelihood, "log_prob"):
        raise InputError(
            f"beam_search: expected logits or a likelihood with `log_prob`, found {type(likelihood).__name__}; use "
            "Stream.generate, which draws"
        )
    logp: Tensor = likelihood.log_prob(outputs)
    return logp.to(torch.promote_types(logp.dtype, torch.float32))


def forbid_repeats(logp: Tensor, tokens: Tensor, n: int) -> None:
    """Set the log-probabilities [R, V] of tokens that would repeat n of tokens [R, T] to −inf, in place."""
    if tokens.shape[1] < n:
        return
    windows = tokens.unfold(1, n, 1)  # [R, T − n + 1, n]
    last = tokens[:, tokens.shape[1] - n + 1 :]
    row, start = (windows[..., :-1] == last[:, None]).all(-1).nonzero(as_tuple=True)
    logp[row, windows[row, start, -1]] = -torch.inf


def best(logp: Tensor, scores: Tensor, count: int) -> Candidates:
    """The `count` best continuations of hypotheses with scores [B, K], of log-probabilities [B·K, V]."""
    beams = scores.shape[1]
    values, tokens = top_tokens(logp, min(count, logp.shape[1]))
    check_finite(values)
    each = values.shape[1]
    total = (values + scores.reshape(-1, 1)).unflatten(0, (-1, beams)).flatten(1)
    values, indices = total.topk(min(count, total.shape[1]))
    tokens = tokens.unflatten(0, (-1, beams)).flatten(1).gather(1, indices)
    candidates = Candidates(values, indices // each, tokens)
    if (missing := count - values.shape[1]) > 0:  # in a small vocabulary
        none = (-torch.inf, 0, 0)
        candidates = Candidates(*(F.pad(x, (0, missing), value=y) for x, y in zip(candidates, none, strict=True)))
    return candidates


def draw_each(
    logp: Tensor, scores: Tensor, settings: tuple[float, int, float], generator: torch.Generator | None
) -> Candidates:
    """One drawn continuation of each hypothesis; its score is of the model's own distribution.

    Where no token may come next, the score is −inf: the hypothesis goes on with any token and never counts.
    """
    ends = (logp == -torch.inf).all(1, keepdim=True)
    tokens = draw(logp.masked_fill(ends, 0), *settings, generator)[:, None]
    total = logp.gather(1, tokens).view(scores.shape) + scores
    parents = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    return Candidates(total, parents, tokens.view(scores.shape))


def top_tokens(logp: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`logp.topk(k)` of [R, V], faster on a CPU: it sorts only groups of columns with one of the k largest values.

    The k largest values are in the k groups with the largest maxima.
    """
    width = logp.shape[1]
    groups = width // GROUP
    if width < WIDE or groups <= k or logp.device.type != "cpu":
        return logp.topk(k)
    whole = groups * GROUP
    grid = logp[:, :whole].unflatten(1, (groups, GROUP))
    chosen = grid.amax(-1).topk(k, sorted=False).indices
    values = grid.gather(1, chosen[..., None].expand(-1, -1, GROUP)).flatten(1)
    values, indices = torch.cat([values, logp[:, whole:]], 1).topk(k)
    inside = chosen.gather(1, (indices // GROUP).clamp(max=k - 1)) * GROUP + indices % GROUP
    return values, torch.where(indices < k * GROUP, inside, indices - k * GROUP + whole)


class Finished(NamedTuple):
    """The best K finished hypotheses of B sentences, the best first. A score of −inf: none.

    scores, log_probs [B, K]: with and without the length penalty; lengths [B, K]: tokens after the prefix; ended
    [B, K]: whether the last token is the end token; tokens [B, K, T]: prefix and tokens.
    """

    scores: Tensor
    log_probs: Tensor
    lengths: Tensor
    ended: Tensor
    tokens: Tensor

    @staticmethod
    def none(like: Tensor, tokens: Tensor) -> "Finished":
        """No hypothesis, for scores like [B, K] and tokens [B, K, T]."""
        empty = torch.full_like(like, -torch.inf)
        return Finished(empty, empty, tokens.new_zeros(like.shape), empty > 0, tokens)

    def merge(self, new: "Finished") -> "Finished":
        """The best K of these and others [B, N]."""
        longer = new.tokens.shape[-1] - self.tokens.shape[-1]
        before = self._replace(tokens=F.pad(self.tokens, (0, longer)))
        both = [torch.cat(pair, 1) for pair in zip(before, new, strict=True)]
        _, order = both[0].topk(self.scores.shape[1])
        rows = torch.arange(len(order), device=order.device)[:, None]
        return Finished(*(x[rows, order] for x in both))

    def select(self, rows: Tensor) -> "Finished":
        """Those of some sentences."""
        return Finished(*(x.index_select(0, rows) for x in self))

    def listed(self, starts: list[int], most: int) -> list[list[Hypothesis]]:
        """The hypotheses of each sentence, at most so many; starts: the lengths of the prefixes."""
        numbers = zip(*(x.tolist() for x in self[:4]), strict=True)
        return [
            [
                Hypothesis(tokens[j, start : start + length], score, log_prob, ended)
                for j, (score, log_prob, length, ended) in enumerate(zip(*one, strict=True))
                if j < most and score > -torch.inf
            ]
            for tokens, start, one in zip(self.tokens, starts, numbers, strict=True)
        ]


def accept_hits(pool: Tensor, hits: Tensor, done: Tensor, stopping: Stopping) -> Tensor:
    """Which hits [B, N], candidates that end in this step, become finished hypotheses beside those of pool [B, K].

    fairseq: the first ones until there are K, and none is replaced. transformers: all, and the best K stay.
    """
    hits = hits & ~done
    if stopping != "fairseq":
        return hits
    count = (pool > -torch.inf).sum(1, keepdim=True)
    return hits & (count + hits.cumsum(1) <= pool.shape[1])


def is_done(pool: Tensor, best: Tensor, lengths: Tensor, stopping: Stopping, penalty: float) -> Tensor:
    """Whether sentences are done, [B, 1], with finished scores pool [B, K] and the best running hypothesis.

    best [B, 1]: its log-probability; lengths [B, 2]: its length, and the greatest length.
    "fairseq", "early": there are K finished ones. "heuristic": also none of them is worse than the best running one
    would be if it ended now. "never": the same, but with a penalty above 0 as if it ended at the greatest length
    without losing probability, so no better hypothesis is missed.
    """
    full = (pool > -torch.inf).all(1, keepdim=True)
    if stopping in ("fairseq", "early"):
        return full | (best == -torch.inf)
    length = lengths[:, 1:] if stopping == "never" and penalty > 0 else lengths[:, :1]
    reachable = best / length.to(best.dtype) ** penalty
    return full & (reachable <= pool.amin(1, keepdim=True)) | (best == -torch.inf)


class DecoderStep:
    """`logits, state = DecoderStep(model)(tokens, state)`, to rounding the model's, without gradient, in eval mode.

    tokens [R, 1]. With few rows a token costs as much for starting operations and calling modules as for the
    arithmetic, and the kernel does neither. With many the products of packed matrices are faster than the kernel's.

    Modules, settings and large weights are read when the step is made and first used: make a new one after changing
    them. A search makes its own. Searches by a model whose weights do not change can share one, which is packed only
    once.
    """

    def __init__(self, model: nn.Module) -> None:
        self.kernel = fused_step(model)
        self.few = ROWS if not self.kernel.fused or self.kernel.layer.code == codes.ATTENTIONS["linear"] else FEW

    @functools.cached_property
    def packed(self) -> nn.Module:
        """The model with packed matrices."""
        return pack(self.kernel.model)

    def __call__(self, x: Tensor, state: State) -> Output:
        if self.kernel.fused and x.shape[1] == 1 and len(x) <= self.few:
            return self.kernel(x, state)
        output: Output = self.packed(x, state)
        return output


def pack(model: nn.Module) -> nn.Module:
    """The model for decoding without gradient: `logits, state = pack(model)(x, state)`, to rounding the model's.

    Linear layers in float32 on a CPU with at least `LEAST` weights use a copy of their matrix in the order in which
    oneDNN reads it: with 5 rows they take a third of the time, with 160 two thirds. All else is shared with the model.
    A copy is made at the first use, of the weight as it is then: make a new packed model after weights change. A write
    could not be noticed, because PyTorch does not count those of its fused optimisers. Modules with hooks stay as they
    are. Cost: the copies are as large as the matrices, and take about as long to make as to read and write them.
    """
    if packed_products() is None:
        return model
    if type(model) is nn.Linear or type(model) is Linear:
        w = model.weight
        plain = type(w) is nn.Parameter and w.dtype == torch.float32 and w.device.type == "cpu" and is_plain(model)
        return PackedLinear(model) if plain and w.numel() >= LEAST else model
    children = {name: pack(child) for name, child in model.named_children()}
    if all(child is children[name] for name, child in model.named_children()):
        return model
    return with_children(model, children)


class PackedLinear(nn.Linear):
    """A linear layer, [.., in] -> [.., out], that multiplies by a packed copy of its matrix without gradient.

    Weight, bias and settings are those of the layer it stands for: a model may read them.
    """

    def __init__(self, layer: nn.Linear) -> None:
        self.__dict__.update(layer.__dict__)
        self._copy: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        x, weight, products = input, self.weight, packed_products()
        fits = x.dtype == weight.dtype == torch.float32 and not torch.is_grad_enabled() and x.numel() > 0
        if products is None or not fits or torch.is_autocast_enabled("cpu") or weight.is_inference():
            return dense(x, weight, self.bias)
        pack, product = products
        if self._copy is None:
            self._copy = pack(weight)
        return product(x, self._copy, self.bias)


def _checked(model: nn.Module, prefix: object, limits: object, config: BeamConfig) -> tuple[Tensor, Tensor]:
    """The lengths of the prefixes [B] and the greatest ones after them, after a check of all that was given."""
    check_eval(model, "beam_search")
    if not isinstance(prefix, Tensor) or prefix.dim() != 2 or not prefix.numel() or prefix.dtype != torch.int64:
        other = f"{prefix.dtype} {tuple(prefix.shape)}" if isinstance(prefix, Tensor) else type(prefix).__name__
        raise InputError(f"beam_search: expected a prefix [B, P] of int64, P at least 1, found {other}")
    is_token = prefix != IGNORE
    lengths = is_token.sum(1)
    if bool((is_token != (torch.arange(prefix.shape[1], device=prefix.device) < lengths[:, None])).any()):
        raise InputError(f"beam_search: expected {IGNORE} in a prefix after its tokens alone, found it between them")
    if not bool(lengths.all()):
        raise InputError("beam_search: expected at least one token in every prefix, found none; begin with BOS")
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if size is not None:
        _check_tokens(config, size)
    if limits is None:
        return lengths, torch.full_like(lengths, config.max_length)
    if not isinstance(limits, Tensor) or limits.shape != prefix.shape[:1] or limits.dtype != torch.int64:
        other = f"{limits.dtype} {tuple(limits.shape)}" if isinstance(limits, Tensor) else type(limits).__name__
        raise InputError(f"beam_search: expected limits [{len(prefix)}] of int64, one per sentence, found {other}")
    if int(limits.min()) <= config.min_length:
        least = config.min_length + 1
        raise InputError(f"beam_search: expected limits of at least {least}, found {int(limits.min())}; raise them")
    return lengths, limits.to(prefix.device)


def _check_tokens(config: BeamConfig, size: int) -> None:
    """Raise InputError for tokens of the settings that are not in a vocabulary of `size`."""
    named = [token for token in (config.eos, *config.forbidden) if token is not None]
    if any(not 0 <= token < size for token in named):
        raise InputError(f"BeamConfig: expected tokens from 0 to {size - 1}, found {named}; change eos or forbidden")
