"""The model card of an exported run: what the model is, how it is used, and the run's own numbers with their origin."""

from collections.abc import Mapping
from typing import Any

from mnemos import libraries
from mnemos.config import ModelConfig
from mnemos.types import JSONObject

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


def model_card(name: str, config: ModelConfig, architecture: str, found: Mapping[str, JSONObject], reads: bool) -> str:
    """README.md of a checkpoint.

    found: "recipe", "result" and "run", the contents of the run's files; {} where missing. reads: whether the folder
    has a tokenizer. Numbers are those of result.json, with the rows that were scored; the names of the data's files
    are given, their folders are not.
    """
    recipe, result, run = found["recipe"], found["result"], found["run"]
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


def _front(name: str, architecture: str, recipe: JSONObject, result: JSONObject, reads: bool) -> str:
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
        for split in ("valid", "test")
        for metric, value in (result.get(split) or {}).items()
        if isinstance(value, (int, float))
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


def _numbers(result: JSONObject) -> str:
    metrics = list(dict.fromkeys(metric for split in ("valid", "test") for metric in result.get(split) or {}))
    if not metrics:
        return "## Numbers\n\nThe exported folder has no numbers of a run."
    rows = result.get("scored_rows") or {}
    head = "| | " + " | ".join(
        f"{split} ({rows[split]} rows)" if split in rows else split for split in ("valid", "test")
    )
    lines = [f"{head} |", "|---|---|---|"]
    for metric in metrics:
        values = ((result.get(split) or {}).get(metric) for split in ("valid", "test"))
        lines.append(f"| {metric} | " + " | ".join("" if v is None else f"{v:.6g}" for v in values) + " |")
    for guess, value in (result.get("reference") or {}).items():
        lines.append(f"| {guess} | | {value:.6g} |" if value is not None else f"| {guess} | | |")
    sizes = {"parameters": "parameters", "state_bytes": "bytes of state per row", "tokens": "tokens read in training"}
    said = [f"{result[key]:,} {text}" for key, text in sizes.items() if isinstance(result.get(key), int)]
    return "## Numbers\n\n" + "\n".join(lines) + ("\n\n" + "; ".join(said) + "." if said else "")


def _origin(recipe: JSONObject, result: JSONObject, run: JSONObject) -> str:
    if not run:
        return ""
    data, versions = run.get("data") or {}, run.get("versions") or {}
    files = [str(one.get("name")) for one in data.get("files") or []]
    lines = [f"Recipe `{recipe.get('name')}`, seed {result.get('seed')}, {result.get('steps')} updates."]
    if files:
        more = f" and {data['count'] - len(files[:5])} more" if (data.get("count") or 0) > 5 else ""
        lines.append(f"Data: {', '.join(files[:5])}{more}; SHA-256 {data.get('sha256')}.")
    dirty = " with changes" if run.get("dirty") else ""
    lines.append(
        f"Code: mnemos {versions.get('mnemos')} at commit {str(run.get('commit'))[:12]}{dirty}, PyTorch "
        f"{versions.get('torch')}, {run.get('threads')} threads of {run.get('cpu')}, device {run.get('device')}."
    )
    return "## Origin\n\n" + "\n".join(lines)
