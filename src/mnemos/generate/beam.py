"""Beam search, and independent samples, for every model with a state: `mnemos.beam_search`.

In this order: the candidates of a step, the finished hypotheses and when a sentence is done, and the search.
"""

import contextlib
import inspect
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos.config import check_fields
from mnemos.ops.checks import check_finite
from mnemos.types import (
    InputError,
    Likelihood,
    Output,
    Rows,
    State,
    likelihood_of,
    select,
    take_rows,
)

from .decoder_step import DecoderStep, DecodeStep
from .sampling import draw

GROUP = 64  # columns whose maximum stands for them in `top_tokens`
WIDE = 1024  # columns from which on that is faster than `torch.topk` on a CPU


class Candidates(NamedTuple):
    """Continuations of the K hypotheses of B sentences, the best first: each [B, N].

    scores: the summed log-probability with the token (−inf: none). parents: which hypothesis it continues. tokens.
    """

    scores: Tensor
    parents: Tensor
    tokens: Tensor

    def pad(self, n: int) -> "Candidates":
        """N = n at least, with candidates of score −inf at the end."""
        missing = n - self.scores.shape[1]
        if missing <= 0:
            return self
        none = torch.full_like(self.scores[:, :1], -torch.inf).expand(-1, missing)
        zero = torch.zeros_like(self.tokens[:, :1]).expand(-1, missing)
        pairs = ((self.scores, none), (self.parents, zero), (self.tokens, zero))
        return Candidates(*(torch.cat(pair, 1) for pair in pairs))

    def take(self, places: Tensor) -> "Candidates":
        """The candidates at places [B, M]."""
        return Candidates(*(x.gather(1, places) for x in self))


def log_probs(outputs: Tensor, likelihood: Likelihood | None) -> Tensor:
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
    found = likelihood.log_prob(outputs)
    return found.to(torch.promote_types(found.dtype, torch.float32))


def forbid_repeats(logp: Tensor, tokens: Tensor, n: int) -> None:
    """Set the log-probabilities [R, V] of tokens that would repeat n of tokens [R, T] to −inf, in place."""
    if tokens.shape[1] < n:
        return
    windows = tokens.unfold(1, n, 1)  # [R, T − n + 1, n]
    last = tokens[:, tokens.shape[1] - n + 1 :]
    row, place = (windows[..., :-1] == last[:, None]).all(-1).nonzero(as_tuple=True)
    logp[row, windows[row, place, -1]] = -torch.inf


def best(logp: Tensor, scores: Tensor, count: int) -> Candidates:
    """The `count` best continuations of hypotheses with scores [B, K], of log-probabilities [B·K, V]."""
    beams = scores.shape[1]
    found, tokens = top_tokens(logp, min(count, logp.shape[1]))
    check_finite(found)
    total = (found + scores.reshape(-1, 1)).unflatten(0, (-1, beams)).flatten(1)
    values, places = total.topk(min(count, total.shape[1]))
    tokens = tokens.unflatten(0, (-1, beams)).flatten(1).gather(1, places)
    return Candidates(values, places // found.shape[1], tokens).pad(count)


def draw_each(
    logp: Tensor, scores: Tensor, settings: tuple[float, int, float], generator: torch.Generator | None
) -> Candidates:
    """One drawn continuation of each hypothesis; its score is of the model's own distribution.

    Where no token may come next, the score is −inf: the hypothesis goes on with any token and never counts.
    """
    ends = (logp == -torch.inf).all(1, keepdim=True)
    tokens = draw(logp.masked_fill(ends, 0), *settings, generator)[:, None]
    found = logp.gather(1, tokens).view(scores.shape) + scores
    parents = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    return Candidates(found, parents, tokens.view(scores.shape))


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
    found, places = torch.cat([values, logp[:, whole:]], 1).topk(k)
    inside = chosen.gather(1, (places // GROUP).clamp(max=k - 1)) * GROUP + places % GROUP
    return found, torch.where(places < k * GROUP, inside, places - k * GROUP + whole)


Stopping = Literal["fairseq", "early", "heuristic", "never"]


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
        _, places = both[0].topk(self.scores.shape[1])
        rows = torch.arange(len(places), device=places.device)[:, None]
        return Finished(*(x[rows, places] for x in both))

    def select(self, sentences: Tensor) -> "Finished":
        """Those of the given sentences."""
        return Finished(*(x.index_select(0, sentences) for x in self))


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


IGNORE = -100  # in a prefix: no token
WAIT = 8  # steps after which a device is synchronised to see whether all sentences are done; on a CPU: every step


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
    step: what computes single tokens, by default the kernel of `mnemos.fused_step` for few rows, and the model with
    packed matrices for many and where there is no kernel (generate/decoder_step.py). limits [B] int64: the greatest
    length of each sentence, instead of `config.max_length` for all.

    The prefix is read once per sentence. Then a step extends K hypotheses of every sentence by the model's state: the
    rows of the best continuations are taken by `select`, which copies no keys and values in `EncoderDecoder` and
    `Transformer` with softmax attention (not in a gated cache). Sentences that are done leave the batch, an eighth
    of it at a time. Log-probabilities are in float32 at least. Cost per token: one step of B·K rows, one pass
    over B·K·V logits.

    Raises InputError for a model in training mode, a prefix that is empty or of other rows, tokens outside the
    vocabulary, limits of other rows or not above `config.min_length`, and NaN.
    """
    config = config or BeamConfig()
    lengths = _checked(model, prefix, config)
    limits = torch.full_like(lengths, config.max_length) if limits is None else _checked_limits(limits, prefix, config)
    with torch.no_grad():
        search = _Search(model, prefix, (lengths, limits), config, generator)
        search.start(state, step or DecoderStep(model))
        # Inference mode makes operations cheaper to start. Other models may keep tensors that they computed in it,
        # which training could not use; the fast step keeps none that training differentiates.
        fast = isinstance(search.step, DecoderStep) and search.step.kernel.fused
        with torch.inference_mode() if fast else contextlib.nullcontext():
            found = search.run()
        return [[h._replace(tokens=h.tokens.clone()) for h in hypotheses] for hypotheses in found]


class _Search:
    """One search: what is running, what is finished, and what the sentences that left have found."""

    def __init__(
        self,
        model: nn.Module,
        prefix: Tensor,
        spans: tuple[Tensor, Tensor],
        config: BeamConfig,
        generator: torch.Generator | None,
    ) -> None:
        lengths, limits = spans  # [B]: of the prefixes; the greatest ones after them
        self.model, self.prefix, self.config, self.generator = model, prefix, config, generator
        self.likelihood: Likelihood | None = likelihood_of(model)
        self.start_lengths, self.limits = lengths[:, None], limits[:, None]  # [B, 1]
        self.shortest, self.longest = int(limits.min()), int(limits.max())
        self.common = int(lengths.min())  # tokens that every prefix has
        self.forced = int(lengths.max()) - self.common  # steps in which a longer prefix is read
        self.sentences = torch.arange(len(prefix), device=prefix.device)
        self.results: dict[int, list[Hypothesis]] = {}

    def start(self, state: State, step: DecodeStep) -> None:
        """Read the common prefix once per sentence, and branch."""
        k, prefix = self.config.beams, self.prefix[:, : self.common]
        outputs, state = _read(self.model, prefix, state)
        self.step = step
        branch: Any = getattr(self.model, "branch", None)
        if k > 1 and branch is not None:
            state = branch(state, k)
        elif k > 1:
            state = select(state, torch.arange(len(prefix), device=prefix.device).repeat_interleave(k))
        self.state = state
        self.logp = log_probs(outputs[:, -1], self.likelihood)  # [B, V]: the hypotheses are still the same
        _check_tokens(self.config, self.logp.shape[-1])
        self.tokens = prefix[:, None].expand(-1, k, -1)
        self.scores = torch.zeros(len(prefix), 1, dtype=self.logp.dtype, device=prefix.device)
        self.finished = Finished.none(self.scores.expand(-1, k), self.tokens)
        self.done, self.any_finished = self.scores > 0, False

    def run(self) -> list[list[Hypothesis]]:
        """Extend the hypotheses until every sentence is done."""
        steps = self.longest + self.forced
        often = 1 if self.prefix.device.type == "cpu" else WAIT
        for i in range(steps):
            self._extend()
            if i + 1 == steps or ((i + 1) % often == 0 and self._leave()):
                break
            flat = self.tokens.flatten(0, 1)
            outputs, self.state = self.step(flat[:, -1:], self.state)
            self.logp = log_probs(outputs[:, -1], self.likelihood)
        self._collect(torch.arange(len(self.sentences)))
        return [self.results[i] for i in range(len(self.prefix))]

    def _extend(self) -> None:
        """Choose the next tokens, keep what ends, and take the rows of what goes on."""
        c, k = self.config, self.config.beams
        place = self.tokens.shape[2]
        count = place + 1 - self.start_lengths  # [B, 1]: tokens after the prefix, with the next one
        self._constrain(count)
        if c.temperature:
            if self.scores.shape[1] < k:
                self.logp, self.scores = self.logp.repeat_interleave(k, 0), self.scores.expand(-1, k)
            found = draw_each(self.logp, self.scores, (c.temperature, c.top_k, c.top_p), self.generator)
        else:
            found = best(self.logp, self.scores, 2 * k)
        if place < self.common + self.forced:
            found = self._force(found, place)
        ends = found.tokens == (-1 if c.eos is None else c.eos)
        near_end = place + 1 >= self.common + self.shortest  # where a sentence may first have its greatest length
        if not near_end and ends.device.type == "cpu" and not bool(ends.any()):  # as in most steps
            self._go_on(found, None)
        else:
            ends, last = ends & (count > 0), count >= self.limits
            self._finish(found, ends, count, last)
            self._go_on(found, ends | last)
        if c.temperature:
            full = (self.scores == -torch.inf).all(1, keepdim=True)
        elif not self.any_finished:
            return
        else:
            lengths = torch.cat([count.clamp(min=1), self.limits], 1)
            full = is_done(self.finished.scores, self.scores[:, :1], lengths, c.stopping, c.length_penalty)
        self.done = self.done | (full & (count > 0))

    def _constrain(self, count: Tensor) -> None:
        """Set the log-probabilities of tokens that may not come next to −inf."""
        c, logp = self.config, self.logp
        rows = len(logp) // len(count)
        if c.forbidden:
            logp[:, list(c.forbidden)] = -torch.inf
        if c.no_repeat_ngram:
            tokens = self.tokens[:, :rows].flatten(0, 1)
            forbid_repeats(logp, tokens, c.no_repeat_ngram)
        if c.eos is None:
            return
        if c.min_length and self.tokens.shape[2] < self.common + self.forced + c.min_length:
            early = (count <= c.min_length).repeat_interleave(rows, 0)[:, 0]
            logp[:, c.eos] = logp[:, c.eos].masked_fill(early, -torch.inf)
        if c.stopping == "fairseq" and not c.temperature and self.tokens.shape[2] >= self.common + self.shortest - 1:
            kept = logp[:, c.eos].clone()
            logp.masked_fill_((count >= self.limits).repeat_interleave(rows, 0), -torch.inf)
            logp[:, c.eos] = kept

    def _force(self, found: Candidates, place: int) -> Candidates:
        """The next token of the prefixes that are not at their end, with the score 0; of the others, what was found."""
        token = self.prefix.index_select(0, self.sentences)[:, place : place + 1]
        free, scores = token == IGNORE, torch.zeros_like(found.scores)
        if not self.config.temperature:
            scores[:, 1:] = -torch.inf  # one hypothesis, which the first free step continues
        parents = torch.where(free, found.parents, torch.zeros_like(found.parents))
        return Candidates(torch.where(free, found.scores, scores), parents, torch.where(free, found.tokens, token))

    def _finish(self, found: Candidates, ends: Tensor, count: Tensor, last: Tensor) -> None:
        """Keep the hypotheses that end: only the first K candidates count, the others are there to go on with."""
        c, k = self.config, self.config.beams
        hits = (ends | last)[:, :k] & (found.scores[:, :k] > -torch.inf)
        if c.stopping == "fairseq" and c.eos is not None and not c.temperature:
            hits = hits & ends[:, :k]
        hits = accept_hits(self.finished.scores, hits, self.done, c.stopping)
        if hits.device.type == "cpu" and not bool(hits.any()):
            return
        self.any_finished = True
        scores = found.scores[:, :k] / count.clamp(min=1).to(found.scores.dtype) ** c.length_penalty
        tokens = torch.cat([self._parents(found.parents[:, :k]), found.tokens[:, :k, None]], 2)
        new = Finished(
            scores.masked_fill(~hits, -torch.inf),
            found.scores[:, :k],
            count.expand_as(hits),
            ends[:, :k],
            tokens,
        )
        self.finished = self.finished.merge(new)

    def _parents(self, parents: Tensor) -> Tensor:
        """The tokens of hypotheses [B, N], [B, N, T]."""
        return self.tokens.gather(1, parents[..., None].expand(-1, -1, self.tokens.shape[2]))

    def _go_on(self, found: Candidates, ends: Tensor | None) -> None:
        """Continue with the first K candidates that do not end; None: none does."""
        k = self.config.beams
        chosen = found
        if ends is not None:
            chosen = found._replace(scores=found.scores.masked_fill(ends, -torch.inf))
            if not self.config.temperature:
                order = torch.arange(2 * k, device=ends.device) + 2 * k * ends
                chosen = chosen.take(order.topk(k, largest=False).indices)
        chosen = Candidates(*(x[:, :k] for x in chosen))
        if not self.config.temperature and (self.scores.shape[1] > 1 or k == 1):  # at first the rows are the same
            self._reorder(chosen.parents)
        self.tokens = torch.cat([self._parents(chosen.parents), chosen.tokens[..., None]], 2)
        self.scores = chosen.scores

    def _reorder(self, parents: Tensor) -> None:
        """Take the state's rows of the parents [B, K]."""
        same = torch.arange(parents.shape[1], device=parents.device)
        if parents.device.type != "cpu" or not torch.equal(parents, same.expand_as(parents)):
            base = torch.arange(len(parents), device=parents.device)[:, None] * self.config.beams
            self.state = take_rows(self.state, Rows((parents + base).flatten()))

    def _leave(self) -> bool:
        """Let sentences that are done leave the batch, an eighth of it at a time; True if none is left."""
        done = self.done[:, 0]
        count = int(done.sum())
        if count == len(done):
            return True
        if count >= max(1, len(done) // 8):
            self._collect(done.nonzero()[:, 0])
            kept = (~done).nonzero()[:, 0]
            k = self.config.beams
            self.state = select(self.state, (kept[:, None] * k + torch.arange(k, device=kept.device)).flatten())
            self.tokens, self.scores, self.sentences = (
                x.index_select(0, kept) for x in (self.tokens, self.scores, self.sentences)
            )
            self.done, self.start_lengths, self.limits = (
                x.index_select(0, kept) for x in (self.done, self.start_lengths, self.limits)
            )
            self.finished = self.finished.select(kept)
        return False

    def _collect(self, rows: Tensor) -> None:
        """Store what the sentences at these rows have found."""
        found = self.finished.select(rows.to(self.scores.device))
        numbers = (found.scores, found.log_probs, found.lengths, found.ended)
        starts = self.start_lengths[rows, 0].tolist()
        for i, sentence in enumerate(self.sentences[rows].tolist()):
            self.results[sentence] = [
                Hypothesis(found.tokens[i, j, starts[i] : starts[i] + length], score, log_prob, ended)
                for j, (score, log_prob, length, ended) in enumerate(
                    zip(*(x[i].tolist() for x in numbers), strict=True)
                )
                if j < self.config.n_best and score > -torch.inf
            ]


def _checked_limits(limits: object, prefix: Tensor, config: BeamConfig) -> Tensor:
    if not isinstance(limits, Tensor) or limits.shape != prefix.shape[:1] or limits.dtype != torch.int64:
        found = f"{limits.dtype} {tuple(limits.shape)}" if isinstance(limits, Tensor) else type(limits).__name__
        raise InputError(f"beam_search: expected limits [{len(prefix)}] of int64, one per sentence, found {found}")
    if int(limits.min()) <= config.min_length:
        least = config.min_length + 1
        raise InputError(f"beam_search: expected limits of at least {least}, found {int(limits.min())}; raise them")
    return limits.to(prefix.device)


def _read(model: nn.Module, prefix: Tensor, state: State) -> Output:
    """The model's outputs and state after the prefix. Raises InputError for a model that takes or returns no state."""
    name, taken_arguments = type(model).__name__, None
    with contextlib.suppress(TypeError, ValueError):  # a compiled forward may have none
        taken_arguments = inspect.signature(model.forward)
    if taken_arguments is not None:
        try:
            taken_arguments.bind(prefix, state)
        except TypeError:
            raise InputError(
                f"beam_search: expected a model called as outputs, state = model(tokens, state), found "
                f"{name}.forward{taken_arguments}; add a state"
            ) from None
    found = model(prefix, state)
    if not isinstance(found, tuple) or len(found) != 2:
        raise InputError(
            f"beam_search: expected a model that returns (outputs, state), found {type(found).__name__} of {name}; "
            "return both"
        )
    outputs, after = found
    return outputs, after


def _checked(model: nn.Module, prefix: object, config: BeamConfig) -> Tensor:
    """The lengths of the prefixes [B], after a check of what was given."""
    if model.training:
        raise InputError("beam_search: expected a model in eval mode, found training mode; call model.eval()")
    if not isinstance(prefix, Tensor) or prefix.dim() != 2 or not prefix.numel() or prefix.dtype != torch.int64:
        found = f"{prefix.dtype} {tuple(prefix.shape)}" if isinstance(prefix, Tensor) else type(prefix).__name__
        raise InputError(f"beam_search: expected a prefix [B, P] of int64, P at least 1, found {found}")
    given = prefix != IGNORE
    lengths = given.sum(1)
    if bool((given != (torch.arange(prefix.shape[1], device=prefix.device) < lengths[:, None])).any()):
        raise InputError(f"beam_search: expected {IGNORE} in a prefix after its tokens alone, found it between them")
    if not bool(lengths.all()):
        raise InputError("beam_search: expected at least one token in every prefix, found none; begin with BOS")
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if size is not None:
        _check_tokens(config, size)
    return lengths


def _check_tokens(config: BeamConfig, size: int) -> None:
    """Raise InputError for tokens of the settings that are not in a vocabulary of `size`."""
    named = [token for token in (config.eos, *config.forbidden) if token is not None]
    if any(not 0 <= token < size for token in named):
        raise InputError(f"BeamConfig: expected tokens from 0 to {size - 1}, found {named}; change eos or forbidden")
