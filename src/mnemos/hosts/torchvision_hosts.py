"""Adapters for torchvision: Swin, Swin v2, MaxViT and MViT (its ViT has `torch.nn.MultiheadAttention`)."""

from typing import Any

from .host import AttentionInput, Call, Host, Site, argument, in_a_part, nowhere, tokens_in, with_paper
from .timm_hosts import IMAGE, POOLED_QUERIES


def _swin(site: Site, seen: int | None) -> AttentionInput:
    """Swin: the tokens are the whole grid of a stage, which the attention divides into windows by itself.

    One slot per token of a window. The model declares no image size: the grid is that of 224 × 224 pixels, or the
    square of an example's T.
    """
    before = _before(site)
    if not before and not seen:
        return in_a_part(site, seen)
    stage = sum(_merges(module) for module in before)
    patch = before[0][0].stride[0] if before else 4
    tokens = seen or (-(-IMAGE[0] // patch) // 2**stage) ** 2
    side = round(tokens**0.5)
    grid = (side, side) if side * side == tokens else None
    area = site.module.window_size[0] * site.module.window_size[1]
    return with_paper(AttentionInput(tokens, min(area, tokens), 0, grid, tokens), stage)


def _before(site: Site) -> list[Any]:
    """The parts of the model's `features` before the one with the attention: stages and merging layers alternate."""
    features = next((m.features for m in site.above if hasattr(m, "features")), ())
    found = []
    for module in features:
        if module in site.above:
            break
        found.append(module)
    return found


def _merges(module: object) -> bool:
    return type(module).__name__.startswith("PatchMerging")


def _groups(module: object, args: tuple, kwargs: dict) -> Call:
    """MaxViT: [B, groups, T, D]; each group is a row."""
    return Call(argument(args, kwargs, 0, "x").flatten(0, 1))


def _partition(site: Site, seen: int | None) -> AttentionInput:
    """MaxViT: one slot per token of a group."""
    tokens, parent = (
        int(site.module.max_seq_len),
        next((m for m in reversed(site.above) if hasattr(m, "grid_size")), None),
    )
    area = tokens if parent is None else parent.grid_size[0] * parent.grid_size[1]
    return AttentionInput(tokens, tokens, 0, None, tokens, area // tokens)


def _video(site: Site, seen: int | None) -> AttentionInput:
    """MViT: 64 slots, or one per token of an example; its class token is not summarised."""
    place = nowhere(site, seen)
    return place._replace(prefix=1, slots=seen - 1 if seen else place.slots)


def _pooled(site: Site) -> str | None:
    pool = site.module.pool_q
    return POOLED_QUERIES if pool is not None and any(stride != 1 for stride in pool.pool.stride) else None


HOSTS = (
    Host(
        "torchvision.models.swin_transformer:ShiftedWindowAttention",
        ("x",),
        width="qkv.in_features",
        out="proj.out_features",
        heads="num_heads",
        call=tokens_in("x"),
        place=_swin,
    ),
    Host(
        "torchvision.models.maxvit:RelativePositionalMultiHeadAttention",
        ("x",),
        width="to_qkv.in_features",
        out="merge.out_features",
        heads="n_heads",
        call=_groups,
        place=_partition,
    ),
    Host(
        "torchvision.models.video.mvit:MultiscaleAttention",
        ("x", "thw"),
        width="embed_dim",
        out="output_dim",
        heads="num_heads",
        call=tokens_in("x"),
        place=_video,
        left=_pooled,
    ),
)
