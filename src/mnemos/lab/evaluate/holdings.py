"""Which training tokens are nearest to the slots of a stored cache, and how much that means.

A slot C_i is a gated average of update candidates C̃ (eq. 5), not of tokens, so slots and tokens lie in different
spaces. A token s is therefore compared with slot i by its candidate c_i(s) = C̃(s, C_i): the value of the slot after an
update by this token alone with a fully open gate (g_u = 1). Let μ_i be the mean of c_i over all compared tokens. The
similarity of s and C_i is cos(C_i − μ_i, c_i(s) − μ_i). At most one token per picture is among the nearest.

The average of many tokens need not be near any one of them. So the numbers of each layer include
- `cosine` and `chance`: the similarity of the nearest token, and the same for a random mixture of the candidates;
- `distance`: ‖C_i − μ_i‖ in units of the candidates' spread about μ_i. Far below 1, the slot is closer to the mean
  candidate than a typical candidate is;
- `place`: the share of C_i − μ_i explained by the mean of the tokens at the positions that the slot is written from;
  1 if the slot is the average of its position;
- `distinct`: the effective number of different tokens that are nearest to some slot.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos.attention.gated_branch import GatedBranch
from mnemos.ops.gated_cache import gated_update
from mnemos.types import JSONObject

IMAGES = 256  # training pictures used
TOKENS = 8192  # tokens compared per layer, equally many per picture
SLOTS = 32  # slots compared per layer, evenly spaced
SHOWN = 8  # slots recorded with their patches
NEAREST = 6


@dataclass(frozen=True)
class Holdings:
    """The result for one layer: numbers for explain.json, and the tokens nearest to some slots.

    slots [SHOWN]: indices of the recorded slots; token [SHOWN, K]: indices of their nearest tokens; cosine [SHOWN, K]:
    the similarities.
    """

    numbers: JSONObject
    slots: Tensor
    token: Tensor
    cosine: Tensor


def holdings(layer: GatedBranch, tokens: Tensor, slot: Tensor, image: Tensor) -> Holdings | str:
    """Compare tokens [M, Dm], as the update reads them, with the stored slots; a str says why that is impossible.

    slot [M]: the slot that each token is written to; image [M]: the picture it comes from. Cost: 4·M·Dm² multiply-adds
    per compared slot.
    """
    cache = layer.cache.float()
    if not cache.any():
        return "its stored cache is empty"
    generator = torch.Generator().manual_seed(0)
    chosen = evenly_spaced(len(cache), SLOTS)
    k = min(NEAREST, int(image.max()) + 1)
    rows = [_nearest(layer, tokens, slot, image, int(i), k, generator) for i in chosen]
    cosine, token = torch.stack([r.cosine for r in rows]), torch.stack([r.token for r in rows])
    off_mean, off_place = sum(r.off_mean for r in rows), sum(r.off_place for r in rows)
    # The same comparison with the tokens themselves, to show that slots lie in the space of candidates.
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
    shown = evenly_spaced(len(chosen), SHOWN)
    return Holdings(numbers, chosen[shown], token[shown], cosine[shown])


@dataclass(frozen=True)
class _Row:
    token: Tensor  # [K]
    cosine: Tensor  # [K]
    chance: Tensor
    distance: Tensor
    off_mean: float  # ‖C_i − μ_i‖²
    off_place: float  # ‖C_i − mean candidate of the tokens at its own position‖²


def _nearest(
    layer: GatedBranch, tokens: Tensor, slot: Tensor, image: Tensor, i: int, k: int, generator: torch.Generator
) -> _Row:
    """Compare slot i with all tokens."""
    held = layer.cache[i].float()
    candidates = candidates_for(layer, tokens, i)
    mean = candidates.mean(0)
    around = candidates - mean
    cosines = _cosines((held - mean)[None], around)[0]
    # The nearest token of each picture, then the nearest pictures.
    best = cosines.new_full((int(image.max()) + 1,), -torch.inf).scatter_reduce(0, image, cosines, "amax")
    value, picture = best.topk(k)
    where = (image == picture[:, None]) & (cosines == value[:, None])
    spread = around.square().sum(1).mean()
    off_mean = float((held - mean).square().sum())
    own = candidates[slot == i]
    off_place = off_mean
    if len(own) > 1:
        # Subtract the sampling error of the mean of these tokens.
        noise = own.var(0).sum() / len(own)
        off_place = float(((held - own.mean(0)).square().sum() - noise).clamp(min=0))
    chance = _cosines(_mixtures(around, 1, generator), around).amax()
    return _Row(
        where.float().argmax(1), value, chance, (off_mean / spread.clamp(min=1e-30)).sqrt(), off_mean, off_place
    )


def candidates_for(layer: GatedBranch, tokens: Tensor, i: int) -> Tensor:
    """The candidates C̃ [M, Dm] of tokens [M, Dm] for slot i of the stored cache: the updated slot with g_u = 1."""
    d = layer.cache_dim
    norm = layer.candidate_norm
    open_gate = tokens.new_zeros(d, 2 * d), tokens.new_full((d,), torch.inf)
    new, _ = gated_update(
        tokens[:, None].float(),
        layer.cache[i][None].float(),
        update=open_gate,
        reset=(layer.reset_gate.weight.float(), layer.reset_gate.bias.float()),
        candidate=(layer.candidate.weight.float(), layer.candidate.bias.float()),
        norm=None if norm is None else (norm.weight.float(), norm.bias.float()),
    )
    return new[:, 0]


def _cosines(a: Tensor, b: Tensor) -> Tensor:
    return F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T


def _mixtures(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Random vectors [count, D] with the covariance of the centred `points` [M, D], up to scale."""
    return torch.randn(count, len(points), generator=generator) @ points


def _effective(values: Tensor) -> float:
    """The effective number of different values: exp of the entropy of their frequencies."""
    share = values.unique(return_counts=True)[1] / len(values)
    return float(torch.exp(-(share * share.log()).sum()))


def evenly_spaced(count: int, most: int) -> Tensor:
    """At most `most` of the numbers 0 … `count` − 1, evenly spaced, including the first and the last."""
    return torch.linspace(0, count - 1, min(count, most)).round().long().unique()
