"""Tables 4, 5 and 6: translation, language models in words, Long ListOps: trained here, beside the paper's numbers."""

import statistics
from dataclasses import replace
from typing import Any

from mnemos import registry
from mnemos.attention.relative import RelativeConfig
from mnemos.lab.recipes.family import altered
from mnemos.lab.recipes.text import in_words, text
from mnemos.lab.run.recipe import Recipe, RolloutConfig, TrainConfig, unwritten
from mnemos.lab.tasks.text import TextConfig
from mnemos.memory.gated_cache import GRC
from mnemos.memory.tokens import TokensConfig
from mnemos.models.segments import MemoryTransformerConfig, RMTConfig
from mnemos.models.transformer import TransformerConfig

from ..claims import Claim
from ..findings import Finding, Table
from ..reproduce import Options
from ..small_runs import Trained, perplexities, perplexity_text, shortened, train

# ---- Table 4: translation ----

SMALL = "multi30k-en-de"  # the folder of its data, and its recipe


def table4(claim: Claim, options: Options) -> Finding:
    """Table 4. --data FOLDER holds a folder for each track to train, named as its recipe: iwslt14-de-en, …

    A folder multi30k-en-de beside them, or as --data itself, adds the small comparison with its baselines. Tracks
    without a folder are "not run".
    """
    table = Table("Test BLEU of IWSLT", ["", "recipe", "paper plain", "paper cached", "plain", "cached"])
    finding = Finding([table])
    for column, plain, cached in zip(claim.columns, *claim.values.values(), strict=True):
        year, languages = column.split()  # such as "14 De-En"
        name = f"iwslt{year}-{languages.lower()}"
        trained = _translated(finding, options, name)
        bleu = ["not run", "not run"] if trained is None else [trained.score(row, 1.0) for row in trained.rows]
        table.add(column, name, plain, cached, *bleu)
    small = _translated(finding, options, SMALL, baselines=True)
    if small is not None:
        seeds = next(iter(small.rows.values()))["seeds"]
        multi30k = finding.table(f"Test BLEU of Multi30k, {seeds} seed{'s' * (seeds > 1)}", ["", "parameters", "BLEU"])
        for name, row in small.rows.items():
            multi30k.add(name, row["parameters"], small.score(name, 1.0))
    if finding.runs and options.steps is not None:
        finding.notes.append(f"Trained for {options.steps:,} updates (--steps) instead of the recipes' own number.")
    finding.notes.append(
        "The paper does not say how its BLEU is tokenised; ours is sacreBLEU of detokenised text, and each run's "
        "result has tokenised BLEU beside it."
    )
    return finding


def _translated(finding: Finding, options: Options, name: str, baselines: bool = False) -> Trained | None:
    """A recipe beside its cached variant, trained; None if --data has no folder of the recipe's name."""
    if options.data is None:
        return None
    data = next((one for one in (options.data / name, options.data) if one.name == name and one.is_dir()), None)
    if data is None:
        return None
    recipes = [registry.load("recipe", name + ending)() for ending in ("", "-cached")]
    changes = {} if options.steps is None else {"steps": options.steps}
    recipes = [altered(one, data={"path": str(data)}, train=changes) for one in recipes]
    return train(finding, options, name, {one.name: one for one in recipes}, baselines)


# ---- Table 5: language models in words ----

WORDS, TOKENS, STEPS = 64, 16, 1000  # words per segment and slots, memory tokens, updates of a row of Table 5
XL = "Transformer-XL base"
CACHED, BESIDE = f"{XL}, cached", f"{XL}, cached per stream beside its memory"
_WORDS_HERE = (
    f"Here: 2 layers of width 128, {STEPS:,} updates unless --steps says otherwise, segments and memories of {WORDS} "
    f"words, {TOKENS} memory tokens. The paper: 16 layers of width 410 (large: 18 of 1,024, no small form here), "
    "150 words, 200,000 updates on 103 million words. So the perplexities cannot be compared."
)


def table5(claim: Claim, options: Options) -> Finding:
    """Table 5: perplexity by words of Transformer-XL, memory tokens and gated caches, small models on --data.

    Each model with a gated cache has its never-written baseline.
    """
    data = options.data or "the standard library"
    table = Table(f"Perplexity per word of {data}", ["", "here", "minus Transformer-XL", "paper"])
    finding = Finding([table], [_WORDS_HERE])
    scores = perplexities(train(finding, options, "table5-words", word_recipes(options)))
    for name in {**scores, **claim.values}:
        theirs = claim.values.get(name, (None,))[0]
        if name not in scores:
            table.add(name, None, None, theirs)
            continue
        gain = statistics.fmean(scores[name]) - statistics.fmean(scores[XL])
        table.add(name, perplexity_text(scores[name], digits=1), None if name == XL else gain, theirs)
    return finding


def word_recipes(options: Options) -> dict[str, Recipe]:
    """The small recipes of Table 5 by the names of its rows, and their never-written baselines."""
    # --- what all rows share ---
    steps = options.steps or STEPS
    blocks: dict[str, Any] = {"norm": "pre", "activation": "gelu", "mlp": 512}  # those of the recorded runs
    path = None if options.data is None else str(options.data)
    train = TrainConfig(
        steps=steps,
        batch_size=4,
        eval_every=steps,
        valid_rows=512,
        checkpoint_every=steps,
        rollout=RolloutConfig(segments=4, replay=False),
    )
    base = altered(
        text("words"),
        about="",
        model=blocks,
        # Documents long enough for rows to read.
        data=TextConfig(path, segment=WORDS, tokens="words", longest=128 * WORDS),
        optim={"lr": 1e-3, "schedule": {"warmup": min(100, steps // 10)}},
        train=train,
    )
    # --- a recipe a row ---
    xl: Any = base.model
    sizes: dict[str, Any] = {"vocab_size": 0, "dim": xl.dim, "layers": xl.layers, "segment": WORDS, **blocks}
    # Written after each half of a segment, as in `wikitext-xl-base-cached`: the gates need a reader in the same call.
    paper = GRC(preset="paper", length=WORDS, block=WORDS // 2)
    beside = GRC(length=32, block=16, scope="stream")

    def named(name: str, model: Any) -> Recipe:
        recipe = replace(base, name=name, model=model)
        return recipe if isinstance(model, TransformerConfig) else in_words(recipe, xl.head.cutoffs)

    recipes = {
        XL: named("words-xl", xl),
        f"{XL}, MT-cached": named("words-mt", MemoryTransformerConfig(**sizes, memory_tokens=TOKENS)),
        f"{XL}, RMT-cached": named("words-rmt", RMTConfig(**sizes, memory=TokensConfig(TOKENS))),
        CACHED: named("words-xl-cached", replace(xl, attention=RelativeConfig(memory=0), cache=paper)),
        BESIDE: named("words-xl-cached-beside", replace(xl, cache=beside)),
    }
    # --- a cache's worth is what it adds to the model that never writes it ---
    for row, state in ((CACHED, "constant cache"), (BESIDE, "never written")):
        baseline = unwritten(recipes[row])
        assert baseline is not None
        recipes[f"{row}, {state}"] = baseline
    return recipes


# ---- Table 6: Long ListOps ----

# The rows of Table 6 and the recipes of the shortened task; linear attention is not in the paper's table.
LISTOPS = {
    "Transformer": "listops-128",
    "BigBird": "listops-128-bigbird",
    "Reformer": "listops-128-reformer",
    "linear": "listops-128-linear",
}
_LISTOPS_HERE = (
    "Here: 64 to 128 symbols, 2 layers of width 64, 1,500 updates of 32 rows unless --steps says otherwise; blocks of "
    "4 (BigBird), 2 rounds with chunks of 8 (Reformer). The paper: 500 to 2,000 symbols, and Long Range Arena's "
    "models. The task is another one. Constant cache and equal parameters are baselines of the cached model: a learned "
    "constant is read as the cache is."
)


def table6(claim: Claim, options: Options) -> Finding:
    """Table 6: accuracy on Long ListOps shortened to 64 to 128 symbols, each attention with and without the cache."""
    ours = ["here", "here cached", "gain", "constant cache", "equal parameters"]
    table = Table("Test accuracy on Long ListOps, in percent", ["", *ours, "paper", "paper cached", "paper gain"])
    finding = Finding([table], [_LISTOPS_HERE])
    # --- each attention with and without the cache, and the baselines of those with it ---
    names = [name + ending for name in LISTOPS.values() for ending in ("", "-cached")]
    recipes = {name: registry.load("recipe", name)() for name in names}
    if steps := options.steps:
        for name, one in recipes.items():
            warmup = min(one.optim.schedule.warmup, steps // 10)
            recipes[name] = altered(shortened(one, options), optim={"schedule": {"warmup": warmup}})
    trained = train(finding, options, "listops-128", recipes, baselines=True)
    table.title += f"; majority class: {100 * trained.comparison['majority']:.1f} %"
    # --- the table ---
    for row, name in LISTOPS.items():
        plain, cached = claim.values.get(row, (None, None))
        theirs = plain, cached, None if plain is None or cached is None else cached - plain
        without, with_cache, *baselines = (
            trained.score(name + ending) for ending in ("", "-cached", "-cached-constant", "-cached-wider")
        )
        gain = 100 * (trained.rows[f"{name}-cached"]["mean"] - trained.rows[name]["mean"])
        table.add(row, without, with_cache, gain, *baselines, *theirs)
    return finding
