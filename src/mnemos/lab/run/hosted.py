"""A model of Hugging Face or timm as the host of a recipe: what `--model hf:NAME` does."""

from dataclasses import replace

from mnemos.attention.softmax import SoftmaxConfig
from mnemos.config import ModelConfig
from mnemos.lab.hosted.decoder import HostedDecoderConfig
from mnemos.lab.hosted.encoder import HostedEncoderConfig
from mnemos.lab.hosted.hub import TIMM, is_source, normalisation, settings_of, tokenizer_file
from mnemos.lab.tasks.photos import PhotosConfig
from mnemos.lab.tasks.text import TextConfig
from mnemos.lab.tasks.text_classes import TextClassesConfig
from mnemos.lab.vision.classifiers import ImageConfig
from mnemos.lab.vision.hosted import HostedClassifierConfig
from mnemos.models.transformer import TransformerConfig
from mnemos.types import InputError

from .recipe import Recipe

RATE = 1e-4  # a usual learning rate for weights that are trained; those of recipes, for new ones, spoil them


def with_host(recipe: Recipe, source: str, own_tokens: bool = False) -> Recipe:
    """The recipe with another model in place of its Transformer, trained further from its weights with the rate `RATE`.

    source: hf:NAME, timm:NAME or the folder of a saved model of Hugging Face. own_tokens: the text's tokens are chosen
    otherwise than by the host's tokenizer. Raises InputError for recipes that no host fits, and as `settings_of`.
    """
    if not is_source(source):
        raise InputError(
            f"--model: expected hf:NAME, timm:NAME or the folder of a saved model of Hugging Face, found {source!r}; "
            "settings of the recipe's own model are --model.FIELD, a model registered under a name needs a recipe that "
            "holds it, and --from RUN starts with the weights of a run"
        )
    model, data = recipe.model, recipe.data
    if isinstance(model, ImageConfig):
        new: ModelConfig = HostedClassifierConfig(
            host=settings_of(source), image=0, channels=0, classes=0, cache=model.cache
        )
        if isinstance(data, PhotosConfig) and (own := normalisation(source)):
            data = replace(data, mean=own[0], std=own[1])
    elif isinstance(model, TransformerConfig) and isinstance(data, TextConfig) and not source.startswith(TIMM):
        if not isinstance(model.attention, SoftmaxConfig):
            raise InputError(
                f"--model: expected a recipe whose memory is a gated cache, or none, found {recipe.name} with the "
                f"attention {model.attention.name}, which a host does not have; use text or text-cached"
            )
        new = HostedDecoderConfig(host=settings_of(source), vocab_size=0, max_length=0, cache=model.cache)
        data = data if own_tokens else replace(data, tokens=tokenizer_file(source))
    elif isinstance(model, HostedEncoderConfig) and isinstance(data, TextClassesConfig) and not source.startswith(TIMM):
        new = replace(model, host=settings_of(source), vocab_size=0)
        data = data if own_tokens else replace(data, tokens=tokenizer_file(source))
    else:
        text = isinstance(data, TextConfig) and source.startswith(TIMM)
        what = "of text" if text else f"of {recipe.data.name} with the model {model.name}"
        raise InputError(
            f"--model {source}: expected a recipe of images, or one of text with the model transformer for a decoder "
            f"of Hugging Face, found {recipe.name} {what}; choose another recipe"
        )
    optim, train = replace(recipe.optim, lr=RATE), replace(recipe.train, init_from=source)
    return replace(recipe, model=new, data=data, optim=optim, train=train)
