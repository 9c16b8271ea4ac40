"""What the slots of a stored cache hold: the training tokens that come nearest to them, and whether that means much.

A slot is a gated average over updates of candidates C̃ (eq. 5), never of tokens: whatever the candidate is, linear or
LN(GELU), it lies where C̃ lies. So a token s is compared with slot i as c_i(s) = C̃(s, C_i): what the slot would hold
after an update by that token alone with its gate wide open (g_u = 1). With μ_i the mean of c_i over all tokens looked
at, wherever they stand, a token is near where cos(C_i − μ_i, c_i(s) − μ_i) is high; a picture gives one token at most.

An average of many may be near to none of them, so each layer's numbers say what the nearest are worth:
cosine against chance (that of a random mixture of the same candidates), `distance` (‖C_i − μ_i‖ in units of the
candidates' own spread about μ_i: well below 1, a slot is nearer to the mean token than a token is), `place` (how much
of C_i − μ_i the mean of the tokens that stand where the slot is written from explains: 1 if a slot is the average of
its place), and how many different tokens are the nearest of some slot.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos.attention.gated_branch import GatedBranch
from mnemos.ops.gated_cache import gated_update

IMAGES = 256  # training pictures looked at
TOKENS = 8192  # tokens compared in a layer, as many of each picture
SLOTS = 32  # slots compared in a layer, evenly
SHOWN = 8  # of these, kept with their patches
NEAREST = 6


@dataclass(frozen=True)
class Holdings:
    """One layer's answer: numbers for explain.json, and where the patches to show were found.

    slots [SHOWN]: which; token [SHOWN, K]: their nearest, as indices of the tokens given; cosine as large.
    """

    numbers: dict[str, Any]
    slots: Tensor
    token: Tensor
    cosine: Tensor


def holdings(layer: GatedBranch, tokens: Tensor, slot: Tensor, image: Tensor) -> Holdings | str:
    """Compare tokens [M, Dm], as the update sees them, with the stored slots; a str where there is nothing to compare.

    slot [M]: which slot each token would be written to; image [M]: the picture it is from. Cost 4·M·Dm² multiply-adds
    a slot compared.
    """
    cache = layer.cache.float()
    if not cache.any():
        return "its stored cache is empty"
    generator = torch.Generator().manual_seed(0)
    chosen = even(len(cache), SLOTS)
    k = min(NEAREST, int(image.max()) + 1)
    rows = [_nearest(layer, tokens, slot, image, int(i), k, generator) for i in chosen]
    cosine, token = torch.stack([r.cosine for r in rows]), torch.stack([r.token for r in rows])
    off_mean, off_place = sum(r.off_mean for r in rows), sum(r.off_place for r in rows)
    # The same in the tokens' own space, to show which of the two the slots lie in.
    centred = tokens - tokens.mean(0)
    raw = _cosines(cache[chosen] - cache.mean(0), centred).amax(1)
    raw_chance = _cosines(_mixtures(centred, len(chosen), generator), centred).amax(1)
    numbers = {
        "compared": len(chosen),
        "tokens": len(tokens),
        "images": int(image.max()) + 1,
        "cosine": float(cosine[:, 0].mean()),
        "chance": float(torch.stack([r.chance for r in rows]).mean()),
        "raw_cosine": float(raw.mean()),
        "raw_chance": float(raw_chance.mean()),
        "distance": float(torch.stack([r.distance for r in rows]).mean()),
        "place": float(1 - off_place / off_mean) if off_mean > 0 else None,
        "distinct": _effective(token[:, 0]),
        "distinct_images": _effective(image[token[:, 0]]),
    }
    shown = even(len(chosen), SHOWN)
    return Holdings(numbers, chosen[shown], token[shown], cosine[shown])


@dataclass(frozen=True)
class _Row:
    token: Tensor  # [K]
    cosine: Tensor  # [K]
    chance: Tensor
    distance: Tensor
    off_mean: float  # ‖C_i − μ_i‖²
    off_place: float  # ‖C_i − mean of its own place's candidates‖²


def _nearest(
    layer: GatedBranch, tokens: Tensor, slot: Tensor, image: Tensor, i: int, k: int, generator: torch.Generator
) -> _Row:
    """One slot against all tokens."""
    held = layer.cache[i].float()
    candidates = opened(layer, tokens, i)
    mean = candidates.mean(0)
    around = candidates - mean
    cosines = _cosines((held - mean)[None], around)[0]
    # The best token of each picture, then the best pictures.
    best = cosines.new_full((int(image.max()) + 1,), -torch.inf).scatter_reduce(0, image, cosines, "amax")
    value, picture = best.topk(k)
    where = (image == picture[:, None]) & (cosines == value[:, None])
    spread = around.square().sum(1).mean()
    off_mean = float((held - mean).square().sum())
    own = candidates[slot == i]
    off_place = off_mean
    if len(own) > 1:
        # Their mean is one of a sample: what its own scatter adds is taken off.
        noise = own.var(0).sum() / len(own)
        off_place = float(((held - own.mean(0)).square().sum() - noise).clamp(min=0))
    chance = _cosines(_mixtures(around, 1, generator), around).amax()
    return _Row(
        where.float().argmax(1), value, chance, (off_mean / spread.clamp(min=1e-30)).sqrt(), off_mean, off_place
    )


def opened(layer: GatedBranch, tokens: Tensor, i: int) -> Tensor:
    """C̃ [M, Dm] of tokens [M, Dm] on slot i of the stored cache: the update with g_u = 1."""
    d = layer.cache_dim
    norm = layer.candidate_norm
    wide_open = tokens.new_zeros(d, 2 * d), tokens.new_full((d,), torch.inf)
    new, _ = gated_update(
        tokens[:, None].float(),
        layer.cache[i][None].float(),
        update=wide_open,
        reset=(layer.reset_gate.weight.float(), layer.reset_gate.bias.float()),
        candidate=(layer.candidate.weight.float(), layer.candidate.bias.float()),
        norm=None if norm is None else (norm.weight.float(), norm.bias.float()),
    )
    return new[:, 0]


def _cosines(a: Tensor, b: Tensor) -> Tensor:
    return F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T


def _mixtures(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Random directions with the covariance of `points` [M, D], which are centred: [count, D]."""
    return torch.randn(count, len(points), generator=generator) @ points


def _effective(values: Tensor) -> float:
    """exp of the entropy: how many different values there are, one that is rare counting for less."""
    share = values.unique(return_counts=True)[1] / len(values)
    return float(torch.exp(-(share * share.log()).sum()))


def even(count: int, most: int) -> Tensor:
    """At most `most` of the numbers below `count`, evenly, the first and the last among them."""
    return torch.linspace(0, count - 1, min(count, most)).round().long().unique()
