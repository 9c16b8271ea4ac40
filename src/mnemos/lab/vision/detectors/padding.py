"""Let the caches of a detector's backbone summarise images without the padding of their batch."""

from typing import Any

from torch import nn

from mnemos.hosts.attach import sites_of
from mnemos.hosts.branch import HostBranch
from mnemos.hosts.grids import ValidPart
from mnemos.hosts.hooks import follow_grid, remember
from mnemos.types import InputError


def leave_out_padding(detector: nn.Module) -> nn.Module:
    """Let each cache below a detector of torchvision summarise every image without its padding; returns the detector.

        mnemos.cache(backbone, grc)
        detector = leave_out_padding(MaskRCNN(FeaturePyramid(backbone), num_classes=91))

    A detector pads the images of a batch to one size. Its caches then resample the tokens of each image alone, so that
    the tokens of an image have the same weight in any batch. This concerns training, where caches are written, and
    calls of the detector; a call of its backbone alone summarises whole images. `mnemos.uncache` undoes it. Call it
    after `mnemos.cache`. Cost: one resampling per image instead of one per batch.
    Raises InputError for a module without torchvision's `transform`, without caches, or with an attention whose calls
    do not show the grid of their tokens.
    """
    transform = getattr(detector, "transform", None)
    if not isinstance(transform, nn.Module):
        raise InputError(
            f"expected a detector of torchvision, with its transform, found {type(detector).__name__}; pass the whole "
            "detector"
        )
    found = [(site, branch) for site in sites_of(detector) if (branch := _branch(site.module)) is not None]
    if not found:
        raise InputError("expected a detector with gated caches, found none; call mnemos.cache() on its backbone first")
    part = ValidPart()
    for site, branch in found:
        if not branch.needs_grid:
            follow_grid(site, branch)
        if branch.own_grid is None and branch.grids is None:
            raise InputError(
                f"{site.name}: expected an attention whose calls show the grid of their tokens, found "
                f"{type(site.module).__name__}; leave the padding in, or train with images of one size"
            )
    for _, branch in found:
        branch.valid_part = part
    transform.valid_part = part  # type: ignore[assignment]
    remember(transform, transform.register_forward_hook(_note))
    remember(detector, detector.register_forward_hook(_end, always_call=True))
    return detector


def _branch(module: object) -> HostBranch | None:
    found = getattr(module, "grc", None)
    return found if isinstance(found, HostBranch) else None


def _note(transform: Any, args: tuple, output: Any) -> None:
    """A plain function that finds what it needs in its module, so that copies of a detector have their own."""
    images = output[0]
    height, width = images.tensors.shape[-2:]
    transform.valid_part.note(images.image_sizes, (height, width))


def _end(detector: Any, args: tuple, output: Any) -> None:
    """See `_note`."""
    detector.transform.valid_part.end()
