"""The model card of an exported run: what the model is, how it is used, and the run's own numbers with their origin."""

import math
from typing import Any

from mnemos import libraries
from mnemos.config import ModelConfig
from mnemos.types import JSONObject

from .files import Provenance, Result, Scores

PIPELINES = {
    "MnemosForCausalLM": "text-generation",
    "MnemosForSeq2SeqLM": "translation",
    "MnemosForSequenceClassification": "text-classification",
}
_AUTO = {
    "MnemosForCausalLM": "AutoModelForCausalLM",
    "MnemosForSeq2SeqLM": "AutoModelForSeq2SeqLM",
    "MnemosForSequenceClassification": "AutoModelForSequenceClassification",
}


def model_card(
    name: str,
    config: ModelConfig,
    architecture: str,
    recipe: JSONObject,
    result: Result | None,
    run: Provenance | None,
    reads: bool,
) -> str:
    """README.md of a checkpoint.

    recipe: as JSON; {} where it is missing. reads: whether the folder has a tokenizer. Numbers are those of the result,
    with the rows that were scored; the names of the data's files are given, their folders are not.
    """
    attention = getattr(config, "attention", None)
    kind = f"`{config.name}`" + (f" with the attention `{attention.name}`" if attention is not None else "")
    parts = [
        _front(name, architecture, recipe, result, reads),
        f"# {name}",
        f"A model of the library mnemos: {kind}. {recipe.get('about', '')}".rstrip(),
        _use(name, architecture, reads),
        _numbers(result),
        _origin(recipe, result, run),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _front(name: str, architecture: str, recipe: JSONObject, result: Result | None, reads: bool) -> str:
    libraries.transformers()
    from huggingface_hub import EvalResult, ModelCardData

    task = str(recipe.get("data", {}).get("is", "data"))
    pipeline = PIPELINES[architecture] if reads else None
    scores = [
        EvalResult(
            task_type=pipeline or "other",
            dataset_type=task,
            dataset_name=str(recipe.get("name") or task),
            dataset_split=split,
            metric_type=metric,
            metric_value=value,
        )
        for split, of_split in _scores(result).items()
        for metric, value in of_split.items()
        if not math.isnan(value)
    ]
    named: dict[str, Any] = {"model_name": name, "eval_results": scores} if scores else {}
    data = ModelCardData(library_name="transformers", tags=["mnemos"], pipeline_tag=pipeline, **named)
    return f"---\n{data.to_yaml()}\n---"


def _use(name: str, architecture: str, reads: bool) -> str:
    lines = [
        f"from transformers import {_AUTO[architecture]}{', AutoTokenizer' if reads else ''}",
        "",
        f'model = {_AUTO[architecture]}.from_pretrained("{name}", trust_remote_code=True)',
    ]
    if reads:
        lines.append(f'tokenizer = AutoTokenizer.from_pretrained("{name}")')
        lines.append('inputs = tokenizer("...", return_tensors="pt")')
        if architecture != "MnemosForSequenceClassification":
            lines.append("tokens = model.generate(**inputs, max_new_tokens=100)")
    code = "\n".join(lines)
    return (
        "```console\npip install 'mnemos-torch[hf]'\n```\n\n"
        f"```python\n{code}\n```\n\n"
        "The file modeling_mnemos.py of this checkpoint only imports that library. After `import mnemos.hugging_face` "
        "and `mnemos.hugging_face.register()` it is loaded without `trust_remote_code`."
    )


def _scores(result: Result | None) -> dict[str, Scores]:
    return {} if result is None else {"valid": result.valid, "test": result.test or {}}


def _numbers(result: Result | None) -> str:
    metrics = list(dict.fromkeys(metric for scores in _scores(result).values() for metric in scores))
    if not metrics or result is None:
        return "## Numbers\n\nThe exported folder has no numbers of a run."
    rows = result.scored_rows
    head = "| | " + " | ".join(
        f"{split} ({rows[split]} rows)" if split in rows else split for split in ("valid", "test")
    )
    lines = [f"{head} |", "|---|---|---|"]
    for metric in metrics:
        values = (scores.get(metric, math.nan) for scores in _scores(result).values())
        lines.append(f"| {metric} | " + " | ".join(map(_text, values)) + " |")
    for guess, value in result.reference.items():
        lines.append(f"| {guess} | | {_text(value)} |")
    sizes = {"parameters": "parameters", "state_bytes": "bytes of state per row", "tokens": "tokens read in training"}
    found = {text: getattr(result, key) for key, text in sizes.items()}
    said = [f"{value:,} {text}" for text, value in found.items() if value is not None]
    return "## Numbers\n\n" + "\n".join(lines) + ("\n\n" + "; ".join(said) + "." if said else "")


def _text(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6g}"


def _origin(recipe: JSONObject, result: Result | None, run: Provenance | None) -> str:
    if run is None:
        return ""
    data, seed, steps = run.data, *((result.seed, result.steps) if result is not None else (None, None))
    files = [str(one.get("name")) for one in data.get("files") or []]
    lines = [f"Recipe `{recipe.get('name')}`, seed {seed}, {steps} updates."]
    if files:
        more = f" and {data['count'] - len(files[:5])} more" if (data.get("count") or 0) > 5 else ""
        lines.append(f"Data: {', '.join(files[:5])}{more}; SHA-256 {data.get('sha256')}.")
    dirty = " with changes" if run.dirty else ""
    lines.append(
        f"Code: mnemos {run.versions.get('mnemos')} at commit {str(run.commit)[:12]}{dirty}, PyTorch "
        f"{run.versions.get('torch')}, {run.threads} threads of {run.cpu}, device {run.device}."
    )
    return "## Origin\n\n" + "\n".join(lines)
