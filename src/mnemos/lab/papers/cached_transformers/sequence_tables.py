"""Tables 4, 5 and 6: translation, language models in words, Long ListOps: trained here, beside the paper's numbers."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mnemos import registry
from mnemos.attention.relative import RelativeConfig
from mnemos.lab.recipes.text import in_words, text
from mnemos.lab.run.recipe import Recipe, RolloutConfig, TrainConfig, unwritten
from mnemos.lab.tasks.text import TextConfig
from mnemos.memory.gated_cache import GRC
from mnemos.memory.tokens import TokensConfig
from mnemos.models.segments import MemoryTransformerConfig, RMTConfig
from mnemos.types import JSONObject

from ..claim import Claim
from ..findings import Cell, Finding, Table, spread
from ..reproduce import Options
from ..small_runs import caution, runs, train_and_compare, train_language_models

SMALL = "multi30k-en-de"  # the folder of its data, and its recipe
_NOT_RUN = "not run"


def table4(claim: Claim, options: Options) -> Finding:
    """Table 4. --data FOLDER holds a folder for each track to train, named as its recipe: iwslt14-de-en, …

    A folder multi30k-en-de beside them, or as --data itself, adds the small comparison with its baselines. Tracks
    without a folder are "not run".
    """
    table = Table("Test BLEU of IWSLT", ["", "recipe", "paper plain", "paper cached", "plain", "cached"])
    found = Finding([table])
    plain, cached = claim.values.values()
    for column, without, with_cache in zip(claim.columns, plain, cached, strict=True):
        name = _recipe_of(column)
        comparison = _translated(options, name)
        ours: Sequence[Cell] = (_NOT_RUN, _NOT_RUN) if comparison is None else [_bleu(r) for r in comparison["rows"]]
        found.runs += [] if comparison is None else runs(comparison)
        table.add(column, name, without, with_cache, *ours)
    small = _translated(options, SMALL, baselines=True)
    if small is not None:
        found.tables.append(_multi30k(small))
        found.runs += runs(small)
    if found.runs:
        found.notes.append(caution(options))
        if options.steps is not None:
            found.notes.append(f"Trained for {options.steps:,} updates (--steps) instead of the recipes' own number.")
    found.notes.append(
        "At the real size: mnemos train RECIPE --data.path FOLDER, and RECIPE-cached. The paper does not say how its "
        "BLEU is tokenised; ours is sacreBLEU of detokenised text, and each run's result has tokenised BLEU beside it."
    )
    return found


def _recipe_of(column: str) -> str:
    """The recipe of a track, such as iwslt14-de-en for "14 De-En"."""
    year, languages = column.split()
    return f"iwslt{year}-{languages.lower()}"


def _translated(options: Options, name: str, baselines: bool = False) -> JSONObject | None:
    """The comparison of a recipe with its cached variant; None if --data has no folder of the recipe's name."""
    if options.data is None or options.recipes_only:
        return None
    data = next((one for one in (options.data / name, options.data) if one.name == name and one.is_dir()), None)
    if data is None:
        return None
    recipes = []
    for ending in ("", "-cached"):
        made: Any = registry.load("recipe", name + ending)()
        train = made.train if options.steps is None else replace(made.train, steps=options.steps)
        recipes.append(replace(made, data=replace(made.data, path=str(data)), train=train))
    return train_and_compare(options, name, recipes, baselines)


def _multi30k(comparison: JSONObject) -> Table:
    seeds = comparison["rows"][0]["seeds"]
    table = Table(f"Test BLEU of Multi30k, {seeds} seed{'s' * (seeds > 1)}", ["", "parameters", "BLEU"])
    for row in comparison["rows"]:
        table.add(row["name"], row["parameters"], _bleu(row))
    return table


def _bleu(row: JSONObject) -> str:
    return spread(row["mean"], row["std"], 1.0)


WORDS, TOKENS, STEPS = 64, 16, 1000  # words per segment and slots, memory tokens, updates of a row of Table 5
XL = "Transformer-XL base"
CACHED, BESIDE = f"{XL}, cached", f"{XL}, cached per stream beside its memory"


def table5(claim: Claim, options: Options) -> Finding:
    """Table 5: perplexity by words of Transformer-XL, memory tokens and gated caches, small models on --data.

    Each model with a gated cache has its never-written baseline.
    """
    found = Finding([], [_WORDS_AT_PAPER])
    table = Table(
        f"Perplexity per word of {options.data or 'the standard library'}",
        ["", "here", "minus Transformer-XL", "paper"],
    )
    recipes = {} if options.recipes_only else word_recipes(options)
    trained = train_language_models(found, options, "table5-words", recipes) if recipes else None
    for name in {**recipes, **claim.values}:
        theirs = claim.values.get(name, (None,))[0]
        if trained is None or name not in recipes:
            table.add(name, None, None, theirs)
            continue
        gain = statistics.fmean(trained.perplexities[name]) - statistics.fmean(trained.perplexities[XL])
        table.add(name, trained.perplexity(name, digits=1), None if name == XL else gain, theirs)
    found.tables.append(table)
    if trained is not None:
        found.notes.insert(1, _WORDS_HERE)
    return found


_WORDS_AT_PAPER = (
    "At the paper's size: mnemos train wikitext-xl-base (wikitext-xl-large, and each with -cached; wikitext-mt-base, "
    "wikitext-rmt-base) --data.path WIKITEXT-103."
)
_WORDS_HERE = (
    f"Here: 2 layers of width 128, {STEPS:,} updates unless --steps says otherwise, segments and memories of {WORDS} "
    f"words, {TOKENS} memory tokens. The paper: 16 layers of width 410 (large: 18 of 1,024, no small form here), "
    "150 words, 200,000 updates on 103 million words. So the perplexities cannot be compared."
)


def word_recipes(options: Options) -> dict[str, Recipe]:
    """The small recipes of Table 5 by the names of its rows, and their never-written baselines."""
    base = text("words")
    blocks: dict[str, Any] = {"norm": "pre", "activation": "gelu", "mlp": 512}  # those of the recorded runs
    xl: Any = replace(base.model, **blocks)
    path = None if options.data is None else str(options.data)
    data = TextConfig(path, segment=WORDS, tokens="words", longest=128 * WORDS)  # documents enough for rows to read
    steps = options.steps or STEPS
    optim = replace(base.optim, lr=1e-3, schedule=replace(base.optim.schedule, warmup=min(100, steps // 10)))
    rollout = RolloutConfig(segments=4, replay=False)
    train = TrainConfig(
        steps=steps, batch_size=4, eval_every=steps, valid_rows=512, checkpoint_every=steps, rollout=rollout
    )
    base = replace(base, data=data, optim=optim, train=train)

    def made(name: str, model: Any) -> Recipe:
        return replace(base, name=name, about="", model=model)

    sizes: dict[str, Any] = {"vocab_size": 0, "dim": xl.dim, "layers": xl.layers, "segment": WORDS, **blocks}
    no_memory = replace(xl, attention=RelativeConfig(memory=0))

    def tokens(name: str, model: Any) -> Recipe:
        return in_words(made(name, model), xl.head.cutoffs)

    # Written after each half of a segment, as in `wikitext-xl-base-cached`: the gates need a reader in the same call.
    paper = GRC(preset="paper", length=WORDS, block=WORDS // 2)
    found = {
        XL: made("words-xl", xl),
        f"{XL}, MT-cached": tokens("words-mt", MemoryTransformerConfig(**sizes, memory_tokens=TOKENS)),
        f"{XL}, RMT-cached": tokens("words-rmt", RMTConfig(**sizes, memory=TokensConfig(TOKENS))),
        CACHED: made("words-xl-cached", replace(no_memory, cache=paper)),
        BESIDE: made("words-xl-cached-beside", replace(xl, cache=GRC(length=32, block=16, scope="stream"))),
    }
    for name in (CACHED, BESIDE):
        if (baseline := unwritten(found[name])) is not None:
            kind = "constant cache" if baseline.name.endswith("-constant") else "never written"
            found[f"{name}, {kind}"] = baseline
    return found


# The rows of Table 6 and the recipes of the shortened task; linear attention is not in the paper's table.
LISTOPS = {
    "Transformer": "listops-128",
    "BigBird": "listops-128-bigbird",
    "Reformer": "listops-128-reformer",
    "linear": "listops-128-linear",
}


def table6(claim: Claim, options: Options) -> Finding:
    """Table 6: accuracy on Long ListOps shortened to 64 to 128 symbols, each attention with and without the cache."""
    ours = ["here", "here cached", "gain", "constant cache", "equal parameters"]
    table = Table("", ["", *ours, "paper", "paper cached", "paper gain"])
    found = Finding([table], [_LISTOPS_AT_PAPER])
    comparison = None if options.recipes_only else _listops(options)
    if comparison is not None:
        found.runs += runs(comparison)
        found.notes += [_LISTOPS_HERE, caution(options)]
    majority = "" if comparison is None else f"; majority class: {100 * comparison['majority']:.1f} %"
    table.title = f"Test accuracy on Long ListOps, in percent{majority}"
    for name, recipe in LISTOPS.items():
        plain, cached = claim.values.get(name, (None, None))
        theirs: list[Cell] = [plain, cached, None if plain is None or cached is None else cached - plain]
        table.add(name, *(_accuracies(comparison, recipe) if comparison else [None] * len(ours)), *theirs)
    return found


_LISTOPS_AT_PAPER = (
    f"At the paper's size: mnemos train {', '.join(name.replace('-128', '') for name in LISTOPS.values())}, and each "
    "with -cached."
)
_LISTOPS_HERE = (
    "Here: 64 to 128 symbols, 2 layers of width 64, 1,500 updates of 32 rows unless --steps says otherwise; blocks of "
    "4 (BigBird), 2 rounds with chunks of 8 (Reformer). The paper: 500 to 2,000 symbols, and Long Range Arena's "
    "models. The task is another one. Constant cache and equal parameters are baselines of the cached model: a learned "
    "constant is read as the cache is."
)


def _listops(options: Options) -> JSONObject:
    """The comparison of the shortened task."""
    recipes = [registry.load("recipe", f"{name}{ending}")() for name in LISTOPS.values() for ending in ("", "-cached")]
    steps = options.steps or recipes[0].train.steps
    return train_and_compare(options, "listops-128", [_shortened(one, steps) for one in recipes], baselines=True)


def _shortened(recipe: Recipe, steps: int) -> Recipe:
    """The recipe with another number of updates; as it is if it has that number."""
    if steps == recipe.train.steps:
        return recipe
    schedule = replace(recipe.optim.schedule, warmup=min(recipe.optim.schedule.warmup, steps // 10))
    train = replace(recipe.train, steps=steps, eval_every=min(recipe.train.eval_every, steps))
    return replace(recipe, optim=replace(recipe.optim, schedule=schedule), train=train)


def _accuracies(comparison: JSONObject, recipe: str) -> list[Cell]:
    """Accuracies in percent: plain, cached, the gain, and the two baselines of the cached model."""
    rows = {row["name"]: row for row in comparison["rows"]}
    plain, cached, constant, wider = (
        rows[f"{recipe}{ending}"] for ending in ("", "-cached", "-cached-constant", "-cached-wider")
    )
    plain_text, cached_text, constant_text, wider_text = (
        spread(row["mean"], row["std"]) for row in (plain, cached, constant, wider)
    )
    return [plain_text, cached_text, 100 * (cached["mean"] - plain["mean"]), constant_text, wider_text]
