"""Recipes of Cached Transformers at the paper's settings, and small hosts for one core: with a cache and without.

Images (Tables 1, 2 and 8), detection (Tables 3 and 7), translation (Table 4), language models (Table 5), Long ListOps
(Table 6).
"""

from dataclasses import replace
from functools import partial
from typing import Any, Literal

from mnemos.attention.linear import LinearConfig
from mnemos.attention.relative import RelativeConfig
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.config import AttentionConfig, ModelConfig
from mnemos.lab.recipes.family import about_lines, cosine, family, transformer, variant
from mnemos.lab.recipes.text import in_words
from mnemos.lab.run.recipe import OptimConfig, Recipe, RolloutConfig, ScheduleConfig, TrainConfig
from mnemos.lab.tasks.augment import AugmentConfig
from mnemos.lab.tasks.images import CIFARConfig, DigitsConfig, MNISTConfig
from mnemos.lab.tasks.listops import ListOpsConfig
from mnemos.lab.tasks.photos import PhotosConfig
from mnemos.lab.tasks.task import DataConfig
from mnemos.lab.tasks.text import TextConfig
from mnemos.lab.translation.translation import TranslationConfig
from mnemos.lab.vision.attention_cache import AttentionCache
from mnemos.lab.vision.classifiers import ImageConfig, PVTConfig, SwinConfig, ViTConfig
from mnemos.lab.vision.detection.coco import COCOConfig
from mnemos.lab.vision.detection.shapes import ShapesConfig
from mnemos.lab.vision.detectors import DetectorConfig, RegionConfig
from mnemos.memory.gated_cache import GRC
from mnemos.memory.tokens import TokensConfig
from mnemos.models.encoder_decoder import EncoderDecoderConfig
from mnemos.models.segments import MemoryTransformerConfig, RMTConfig
from mnemos.models.transformer import HeadConfig, TransformerConfig

from ..baselines.bigbird import BlockSparseConfig
from ..baselines.reformer import ReformerConfig

# ---- small images: a minute or two on one core ----

# Tables 1 and 8: half of the channels are cached, there is a slot per token, or per square of tokens in the first two
# stages of PVT and Swin, the heads are mixed one by one (eq. 2), and a positional term is added.
PAPER_CACHE = GRC(preset="paper", ratio=0.5, length="paper", mix="heads", convolution=True)

# What the data decide is 0. PVT is version 2 throughout: it learns several times faster from few images than version 1.
_VIT = partial(ViTConfig, image=0, channels=0, classes=0, dim=64, depth=4, num_heads=4, pool="mean")
_PVT = partial(
    PVTConfig, image=0, channels=0, classes=0, version=2, patch=2, dims=(32, 64), depths=(2, 2), num_heads=(2, 4)
)
_SWIN = partial(SwinConfig, image=0, channels=0, classes=0, dim=32, depths=(2, 2), num_heads=(2, 4))
_CIFAR_PVT = _PVT(
    patch=4, dims=(32, 64, 128), depths=(1, 2, 1), num_heads=(1, 2, 4), mlp_ratios=(4, 4, 2), reductions=(2, 2, 1)
)


def _small(data: DataConfig, model: ImageConfig, steps: int, batch: int, lr: float = 2e-3) -> Recipe:
    optim = cosine(lr, warmup=100 / steps, weight_decay=0.05)  # a share, which fits a shorter run too
    return Recipe(model, data, optim, TrainConfig(steps=steps, batch_size=batch, eval_every=500, checkpoint_every=1000))


_DIGITS, _MNIST = DigitsConfig(layout="image"), MNISTConfig(layout="image")
# No augmentation: in two epochs the black margins of policy "light" cost 4 of 39 points of accuracy.
_CIFAR = CIFARConfig(augment=AugmentConfig(policy="none"))
_IMAGES = {
    "cifar": "CIFAR-10 (--data.folder FOLDER)",
    "digits": "scikit-learn's digits as images",
    "mnist": "MNIST as images (--data.path FOLDER)",
    "photos": "photos in class folders, at 64 x 64 (--data.folder PHOTOS)",
}
_SMALL = {
    ("cifar", "vit"): _small(_CIFAR, _VIT(depth=3, patch=4), steps=1200, batch=64),
    ("cifar", "pvt"): _small(_CIFAR, _CIFAR_PVT, steps=2500, batch=32),
    ("cifar", "swin"): _small(_CIFAR, _SWIN(patch=4, window=4, dim=48), steps=2000, batch=32),
    ("digits", "vit"): _small(_DIGITS, _VIT(patch=2), steps=1500, batch=32),
    ("digits", "pvt"): _small(_DIGITS, _PVT(), steps=1000, batch=32),
    ("digits", "swin"): _small(_DIGITS, _SWIN(patch=1, window=4), steps=1500, batch=32),
    ("mnist", "vit"): _small(_MNIST, _VIT(patch=7), steps=3000, batch=64, lr=3e-3),
    ("mnist", "pvt"): _small(_MNIST, _PVT(depths=(1, 2)), steps=1200, batch=64),
    ("mnist", "swin"): _small(_MNIST, _SWIN(patch=2, window=7), steps=1200, batch=64),
    ("photos", "vit"): _small(PhotosConfig(size=64), _VIT(patch=8, drop_path=0.1), steps=800, batch=32, lr=1e-3),
}
# The ratios of MLPs that add the parameters of a cache: three gates and four projections of half the width.
_WIDER_PVT = {"cifar": (5, 6, 3), "digits": (8, 2), "mnist": (5, 3)}
_CACHES = {
    "": None,
    "cached": GRC(),
    "cached-unwritten": GRC().unwritten(),
    # Small pictures: as many slots as the host's keys, and no positional term.
    "paper": replace(PAPER_CACHE, length="auto", convolution=None),
    "attention-cache": AttentionCache(),
    "wider": None,
}
_ABOUT = about_lines("""
-: A {host} on {images}
cached: {name} with a gated cache beside every attention
cached-unwritten: {name}-cached with a cache that is never written: what the branch adds without a memory
paper: {name} with the paper's cache: it reads the batch mean and is frozen at inference
attention-cache: {name} with keys and values of the batch before (Table 2)
wider: {name} with wider MLPs: the parameters of {name}-cached, no memory
""")


@family("{data}-{host}-{memory}", data=_IMAGES, host=("vit", "pvt", "swin"), memory=_CACHES)
def small_images(data: str, host: str, memory: str) -> Recipe | None:
    """ViT, PVT and Swin on small images, with caches and without: minutes on one core."""
    plain = _SMALL.get((data, host))
    if plain is None or (host, memory) == ("swin", "attention-cache"):  # keys and values do not fit Swin's windows
        return None
    changes: dict[str, Any] = {"cache": _CACHES[memory]}
    if memory == "wider":
        changes = {"mlp_ratios": _WIDER_PVT[data]} if host == "pvt" else {"mlp_ratio": 3.40625}
    called = {"vit": "ViT", "pvt": "PVT v2", "swin": "Swin"}[host]
    about = _ABOUT[memory].format(name=f"{data}-{host}", host=called, images=_IMAGES[data])
    return variant(plain, about, **changes)


# ---- ImageNet (Tables 1, 2 and 8) ----

_PAPER_PVT = partial(
    PVTConfig,
    image=224,
    classes=1000,
    dims=(64, 128, 320, 512),
    num_heads=(1, 2, 5, 8),
    mlp_ratios=(8, 8, 4, 4),
    reductions=(8, 4, 2, 1),
)
_PAPER_SWIN = partial(
    SwinConfig, image=224, patch=4, window=7, dim=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24), mlp_ratio=4.0
)
_PAPER_VIT = ViTConfig(image=224, classes=1000, patch=16, dim=384, depth=12, num_heads=6, mlp_ratio=4.0, drop_path=0.1)
# The paper's hosts: their names, models, and greatest norms of gradients (0: not clipped). These norms and the shares
# of dropped paths are those that each host was released with, DeiT's for ViT-S. For 22,000 classes the share, 0.1, is
# assumed: the configuration of Swin-T was not available.
_HOSTS: dict[str, tuple[str, ImageConfig, float]] = {
    "vit-s": ("ViT-S/16", _PAPER_VIT, 0.0),
    "pvt-tiny": ("PVT-Tiny", _PAPER_PVT(depths=(2, 2, 2, 2), drop_path=0.1), 0.0),
    "pvt-small": ("PVT-Small", _PAPER_PVT(depths=(3, 4, 6, 3), drop_path=0.1), 0.0),
    "pvt-medium": ("PVT-Medium", _PAPER_PVT(depths=(3, 4, 18, 3), drop_path=0.3), 1.0),
    "pvt-v2-b2": ("PVTv2-B2", _PAPER_PVT(version=2, depths=(3, 4, 6, 3), drop_path=0.1), 0.0),
    "pvt-v2-b3": ("PVTv2-B3", _PAPER_PVT(version=2, depths=(3, 4, 18, 3), drop_path=0.3), 1.0),
    "pvt-v2-b4": ("PVTv2-B4", _PAPER_PVT(version=2, depths=(3, 8, 27, 3), drop_path=0.3), 1.0),
    "swin-t": ("Swin-T", _PAPER_SWIN(classes=1000, drop_path=0.2), 5.0),
    "22k-swin-t": ("Swin-T", _PAPER_SWIN(classes=21_841, drop_path=0.1), 5.0),
}
_WITH_KEYS = ("vit-s", "pvt-tiny", "pvt-small")  # the hosts of Table 2


@family("imagenet-{host}-{memory}", host=_HOSTS, memory=("", "cached", "attention-cache"))
def imagenet(host: str, memory: str) -> Recipe | None:
    """ImageNet at the settings of Cached Transformers (Tables 1, 2 and 8): days on 16 GPUs.

    ImageNet-1k: 224², AdamW, weight decay 0.05, 300 epochs, 5 of them warm-up, cosine, timm's augmentation. Batch 1024
    at learning rate 5e-4·batch/512, warm-up from 1e-6 and cosine to 1e-5, as DeiT, whose settings the hosts share (the
    paper gives none of these). The validation set is the test split; a hundredth of the training set is held out.

    ImageNet-22k: the paper follows "the Swin-Transformer implementation". From its configurations: 21,841 classes,
    AdamW at 1.25e-4·batch/512 from 1.25e-7·batch/512 and to 1.25e-6·batch/512, 90 epochs, 5 of them warm-up, batch
    4096, weight decay 0.05, gradient norm at most 5.
    """
    called, model, clip = _HOSTS[host]
    folder, images, epochs, batch, held_out = "imagenet", 1_281_167, 300, 1024, 0.01
    lr, start, end, source = 1e-3, 1e-6, 1e-5, "as in the paper"
    if host.startswith("22k"):
        folder, images, epochs, batch, held_out = "imagenet-22k", 14_197_122, 90, 4096, 0.002
        lr, start, end = (rate * batch / 512 for rate in (1.25e-4, 1.25e-7, 1.25e-6))
        source = "as Swin's own (Table 8)"
    epoch = images // batch  # in updates
    about = f"{called} on ImageNet-{'22k' if '22k' in folder else '1k'}, {epochs} epochs {source}: days on 16 GPUs"
    plain = Recipe(
        about=f"{about} (--data.folder {folder.upper().replace('-', '_')})",
        model=model,
        # The paper lists colour jittering.
        data=PhotosConfig(folder, held_out=held_out, workers=8, augment=AugmentConfig("timm", force_color_jitter=True)),
        optim=OptimConfig(
            lr=lr,
            weight_decay=0.05,
            grad_clip=clip,
            schedule=ScheduleConfig("cosine", warmup=5 * epoch, start=start / lr, floor=end / lr),
        ),
        train=TrainConfig(
            steps=epochs * epoch, batch_size=batch, log_every=50, eval_every=epoch, checkpoint_every=epoch
        ),
    )
    if memory == "attention-cache":
        keys = f"imagenet-{host} with keys and values of the batch before (Table 2)"
        return variant(plain, keys, cache=AttentionCache()) if host in _WITH_KEYS else None
    about = f"imagenet-{host} with a gated cache beside every attention"
    return variant(plain, about, cache=PAPER_CACHE) if memory else plain


# ---- detection (Tables 3 and 7) ----

Detector = Literal["mask-rcnn", "retinanet"]
_DETECTORS: dict[Detector, str] = {"mask-rcnn": "Mask R-CNN", "retinanet": "RetinaNet"}
_DEPTHS = {"tiny": (2, 2, 2, 2), "small": (3, 4, 6, 3), "medium": (3, 4, 18, 3)}


@family("coco-{detector}-pvt-{size}-{memory}", detector=_DETECTORS, size=_DEPTHS, memory=("", "cached"))
def coco(detector: Detector, size: str, memory: str) -> Recipe:
    """Detectors on PVT, COCO 1× as in Cached Transformers (Tables 3 and 7): 8 GPUs.

    COCO 2017, 12 epochs, batch 16 on 8 GPUs, AdamW at 1e-4, a tenth after 8 and 11 epochs; sides 800 and 1333. The
    paper gives these. 500 updates of warm-up and weight decay 1e-4 are those of the hosts' release as far as known. The
    backbone starts from a classifier trained on ImageNet: --train.init_from RUN of imagenet-pvt-…; its caches are then
    empty (Appendix B).
    """
    table, epoch = 3 if detector == "mask-rcnn" else 7, 117_266 // 16  # photos of train2017 with an object, in batches
    about = f"{_DETECTORS[detector]} on PVT-{size.capitalize()}, COCO 1× as in Table {table}"
    if size == "tiny":
        about += " (--data.folder COCO --train.init_from RUN): 8 GPUs"
    if memory:
        about = f"coco-{detector}-pvt-{size} with a gated cache beside every attention"
    host = _PAPER_PVT(depths=_DEPTHS[size], drop_path=0.1)
    backbone = replace(host, classes=PVTConfig.classes, cache=PAPER_CACHE if memory else None)
    schedule = ScheduleConfig("step", warmup=500, start=1e-3, floor=0.1, drop_at=(8 * epoch, 11 * epoch))
    return Recipe(
        about=about,
        model=DetectorConfig(backbone=backbone, detector=detector, classes=0),
        data=COCOConfig(masks=detector == "mask-rcnn", workers=4),
        optim=OptimConfig(lr=1e-4, weight_decay=1e-4, grad_clip=0.0, schedule=schedule),
        train=TrainConfig(
            steps=12 * epoch, batch_size=16, devices=8, eval_every=epoch, checkpoint_every=epoch, log_every=50
        ),
    )


def _small_detector(detector: Detector, image: int, proposals: int, **fields: Any) -> DetectorConfig:
    """On a small PVT v2, whose patches overlap: it needs no pretraining."""
    backbone = PVTConfig(
        image=image,
        version=2,
        dims=(32, 64, 96, 128),
        depths=(2, 2, 2, 2),
        num_heads=(1, 2, 3, 4),
        mlp_ratios=(4, 4, 4, 4),
        reductions=(8, 4, 2, 1),
    )
    regions = RegionConfig(sampled=64, dim=256, mask_dims=(64, 64), proposals=proposals)
    return DetectorConfig(
        detector=detector, backbone=backbone, classes=0, channels=64, group_norm=True, regions=regions, **fields
    )


@family("coco-mini-{detector}", detector=("retinanet", "mask-rcnn"))
def coco_mini(detector: Detector) -> Recipe:
    """Detectors learn a few photos in COCO's format by heart, at 240 × 320 pixels: a check of data and losses.

    They are scored on the photos that they are trained on, on 160 of them at most, so that the recipe also runs on COCO
    itself.
    """
    masks = detector == "mask-rcnn"
    learned = f"{_DETECTORS[detector]} learns a few photos in COCO's format by heart, and is scored on them"
    return Recipe(
        about=f"{learned}: {'boxes and masks' if masks else 'a check of data and losses'}",
        model=_small_detector(detector, image=256, proposals=200, sides=(240,), longest=320, anchor=10),
        data=COCOConfig(folder="coco-mini", train="train2017", test="train2017", masks=masks, flip=False),
        optim=cosine(1e-3, warmup=100, weight_decay=0.0),
        train=TrainConfig(
            steps=3000, batch_size=8, eval_every=1000, checkpoint_every=500, valid_rows=160, test_rows=160
        ),
    )


@family("shapes-{detector}-{memory}", detector=_DETECTORS, memory=("", "cached", "cached-unwritten"))
def shapes(detector: Detector, memory: str) -> Recipe:
    """Detectors on generated pictures of shapes, with caches in the backbone and without: minutes on one core.

    Pictures of 128² pixels on a small PVT v2. Both detectors read maps from stride 4 on.
    """
    masks, cache = detector == "mask-rcnn", GRC(length="paper")
    caches = {"": None, "cached": cache, "cached-unwritten": cache.unwritten()}
    learned = "boxes and masks" if masks else "boxes"
    about = {
        "": f"{_DETECTORS[detector]} on generated pictures of shapes: {learned}",
        "cached": f"shapes-{detector} with a gated cache beside every attention of the backbone",
        "cached-unwritten": f"shapes-{detector}-cached with caches that are never written",
    }[memory]
    anchor = 12 if masks else 10
    plain = Recipe(
        model=_small_detector(detector, image=128, proposals=100, sides=(128,), longest=128, anchor=anchor, finest=0),
        data=ShapesConfig(train=12_000, masks=masks),
        optim=cosine(1e-3, warmup=200, weight_decay=0.05),
        # Box AP 67 (log/2026-11-23-shapes-mask-rcnn.md), and RetinaNet's 70 (log/2026-11-24-shapes-retinanet.md).
        train=TrainConfig(steps=2500 if masks else 4000, batch_size=8, eval_every=1250, checkpoint_every=500),
    )
    return variant(plain, about, backbone={"cache": caches[memory]})


# ---- translation (Table 4) ----

# Each track: its files of validation (2014: every 23rd training pair, as in fairseq's recipe, because dev2010 is a part
# of the test set).
_TRACKS = {
    "14-de-en": "",
    "14-es-en": "",
    "14-en-fr": "",
    "15-de-en": "IWSLT15.TED.dev2010*",
    "15-en-vi": "IWSLT15.TED.tst2012*",
    "15-cs-en": "IWSLT15.TED.dev2010*",
}
_LANGUAGES = {"cs": "Czech", "de": "German", "en": "English", "es": "Spanish", "fr": "French", "vi": "Vietnamese"}


@family("iwslt{track}-{memory}", track=_TRACKS, memory=("", "cached"))
def iwslt(track: str, memory: str) -> Recipe:
    """Translation of talks by a pre-norm Transformer, with and without a cached encoder (Cached Transformers, Table 4).

    The paper names the model (pre-norm Transformer, 6 + 6 layers; a cache in every encoder layer, ratio 0.5, 64 slots),
    the greatest length 512, Adam with an inverse square root schedule at 1.5e-3, and the average of the last ten
    checkpoints. The rest is fairseq's recipe for IWSLT14: width 512, MLP 1024, 4 heads, dropout 0.3, label smoothing
    0.1, decoupled decay 1e-4, warm-up 4,000, 4,096 tokens per batch, beam 5, lower case, every 23rd training pair for
    validation, and TED's dev and test sets together for testing. IWSLT15 validates on dev2010 (Vietnamese: tst2012) and
    is tested on tst2013. --data.path FOLDER holds the files of a track as they are distributed.
    """
    year, source, target = track.split("-")
    files: dict[str, Any] = {"held_out": 23, "test": "IWSLT14.TED*", "lowercase": True}
    if year == "15":
        files = {"valid": _TRACKS[track], "test": "IWSLT15.TED.tst2013*"}
    about = f"{_LANGUAGES[source]} to {_LANGUAGES[target]}, IWSLT{year}"
    if memory:
        about = f"iwslt{track} with a gated cache around every attention of the encoder"
    return Recipe(
        about=f"{about} (Cached Transformers, Table 4)",
        model=EncoderDecoderConfig(
            vocab_size=0,
            dim=512,
            encoder_layers=6,
            decoder_layers=6,
            num_heads=4,
            mlp=1024,
            max_length=0,
            dropout=0.3,
            share="target",
            cache=GRC(preset="paper", length=64, ratio=0.5) if memory else None,
        ),
        data=TranslationConfig(path=f"iwslt{track}", source=source, target=target, longest=511, ratio=1.5, **files),
        optim=OptimConfig(
            name="adamw",
            lr=1.5e-3,
            betas=(0.9, 0.98),
            weight_decay=1e-4,
            grad_clip=0.0,
            schedule=ScheduleConfig(name="inverse_sqrt", warmup=4000),
        ),
        train=TrainConfig(steps=50_000, batch_size=1024, eval_every=1000, checkpoint_every=1000, average=10),
    )


# ---- language models (Table 5) ----

_BASE = transformer(
    dim=410,
    layers=16,
    num_heads=10,
    mlp=2100,
    norm="post",
    position="none",
    activation="relu",
    dropout=0.1,
    attention=RelativeConfig(memory=150),
)
_LARGE = replace(_BASE, dim=1024, layers=18, num_heads=16, mlp=4096, dropout=0.2, attention=RelativeConfig(memory=384))


def _cached(model: TransformerConfig, slots: int) -> TransformerConfig:
    """The model with a shared cache in place of the memory, written after each half of a segment.

    The second half then reads what the first half wrote. A cache that is written once per segment is read by the next
    call, which no gradient reaches: its gates would not be trained.
    """
    cache = GRC(preset="paper", length=slots, block=slots // 2)
    return replace(model, attention=RelativeConfig(memory=0), cache=cache)


# The sizes of `_BASE` for models of memory tokens. The positions, learned within a segment, are chosen here: the width
# per head, 41, is not even, as rotary ones need.
_SEGMENTS: dict[str, Any] = {"vocab_size": 0, "segment": 150, "position": "learned"} | {
    name: getattr(_BASE, name) for name in ("dim", "layers", "num_heads", "mlp", "norm", "activation", "dropout")
}
_MT, _RMT = MemoryTransformerConfig(**_SEGMENTS, memory_tokens=10), RMTConfig(**_SEGMENTS, memory=TokensConfig(10))
_ROWS: dict[str, tuple[ModelConfig, str]] = {
    "xl-base": (_BASE, "Words of WikiText-103, Transformer-XL base: 410 wide, a memory of 150"),
    "xl-base-cached": (_cached(_BASE, 150), "wikitext-xl-base with a gated cache of 150 slots in place of the memory"),
    "mt-base": (_MT, "wikitext-xl-base as a Memory Transformer: 10 tokens before each 150 words"),
    "rmt-base": (_RMT, "wikitext-xl-base as an RMT: 10 memory tokens, gradients through 4 segments"),
    "xl-large": (_LARGE, "Words of WikiText-103, Transformer-XL large: 1024 wide, a memory of 384"),
    "xl-large-cached": (
        _cached(_LARGE, 384),
        "wikitext-xl-large with a gated cache of 384 slots in place of the memory",
    ),
}
_BYTES = {
    "xl-base": "wikitext-xl-base over the bytes of --data.path FOLDER: no perplexity of the paper's",
    "xl-base-cached": "wikitext-xl-base-cached over the bytes of --data.path FOLDER",
}


@family("wikitext-{tokens}-{row}", tokens=("", "bytes"), row=_ROWS)
def cached_wikitext(tokens: str, row: str) -> Recipe | None:
    """Transformer-XL with its memory, a gated cache in its place, or memory tokens (Cached Transformers, Table 5).

    The sizes and schedules are those of Transformer-XL's own scripts (Dai et al. 2019), which the paper says it keeps;
    it gives no number of slots or of memory tokens. Dropout is also that of attention weights, which those scripts
    leave out. Text is read in words, with a tied adaptive softmax; the recipes `wikitext-bytes-…` read the same text as
    bytes. An update of the RMT reads one new segment, as those of the other rows do; the three before it are read
    again.
    """
    large, (model, about) = row.startswith("xl-large"), _ROWS[row]
    schedule = ScheduleConfig("cosine", warmup=16_000 if large else 0)
    recipe = Recipe(
        about=f"{about} (Cached Transformers, Table 5)",
        model=model,
        data=TextConfig(segment=384 if large else 150),
        optim=OptimConfig("adam", lr=2.5e-4, weight_decay=0.0, grad_clip=0.25, schedule=schedule),
        train=TrainConfig(
            steps=4_000_000 if large else 200_000,
            batch_size=128 if large else 60,
            eval_every=5000,
            checkpoint_every=1000,
            rollout=RolloutConfig(segments=4, slide=1) if row == "rmt-base" else RolloutConfig(),
        ),
    )
    if not tokens:
        return in_words(recipe)
    return replace(recipe, about=_BYTES[row]) if row in _BYTES else None


# ---- Long ListOps (Table 6) ----

_LISTOPS: dict[str, tuple[AttentionConfig, str]] = {  # and how the row of Table 6 is called
    "": (SoftmaxConfig(), "Table 6, Transformer"),
    "bigbird": (BlockSparseConfig(), "Table 6, BigBird: blocks of 64, 3 random"),
    "reformer": (ReformerConfig(rounds=1, chunk=201, buckets=10), "Table 6, Reformer as in Long Range Arena"),
    "linear": (LinearConfig(), "linear attention, not in Table 6"),
}


@family("listops-{attention}-{memory}", attention=_LISTOPS, memory=("", "cached"))
def listops(attention: str, memory: str) -> Recipe:
    """Long ListOps at the size of Cached Transformers: four attentions, with and without a cache, hours on a GPU.

    The Reformer has the settings of Long Range Arena's own code, which the paper follows: one round of ten buckets, and
    the 2,001 tokens in ten chunks, which is 201 each; a token reads its chunk and the one before. That code scales the
    scores by √d and leaves the keys as they are; this is the attention as published, with keys of length one.
    """
    config, row = _LISTOPS[attention]
    cached = ", GRC-cached: as many slots as tokens, ratio 0.5" if memory else ""
    return Recipe(
        about=f"Long ListOps at the paper's size{cached} ({row}): hours on a GPU",
        model=transformer(
            dim=512,
            layers=6,
            num_heads=8,
            mlp=1024,
            causal=False,
            dropout=0.1,
            attention=config,
            cache=GRC(preset="paper") if memory else None,
            head=HeadConfig(classes=10, hidden=1024),
        ),
        data=ListOpsConfig(),
        optim=OptimConfig(
            lr=0.05,
            betas=(0.9, 0.98),
            eps=1e-9,
            weight_decay=0.1,
            grad_clip=0.0,
            schedule=ScheduleConfig("lra", warmup=1000),
        ),
        train=TrainConfig(steps=5000, batch_size=32, eval_every=500, checkpoint_every=500),
    )
