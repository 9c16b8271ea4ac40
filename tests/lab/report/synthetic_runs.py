"""Writes run and comparison folders as the other rooms do, with numbers that look like a small ListOps study."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from mnemos.lab.report.read import read_tasks

LAYERS = ("blocks.0.attention", "blocks.1.attention")
COMMIT = "5bb3d1d0c0ffee5bb3d1d0c0ffee5bb3d1d0c0ff"
VARIANTS = {
    "demo": {"end": 0.512, "spread": 0.03, "parameters": 70282},
    "demo-cached": {"end": 0.559, "spread": 0.007, "parameters": 91402},
    "demo-wider": {"end": 0.552, "spread": 0.014, "parameters": 91146},
}


def read(folders):
    """The results of runs of one task."""
    (results,) = read_tasks(folders)
    return results


def edited(path, **fields):
    """Changes fields of a JSON file; returns what it was before."""
    before = json.loads(path.read_text())
    path.write_text(json.dumps(before | fields))
    return before


def recipe(name, seed, steps):
    cache = {"preset": "paper", "length": 32} if "cached" in name else None
    sizes = {"width": 64, "layers": 2, "attention": {"is": "softmax"}, "mlp": 210 if "wider" in name else 128}
    return {
        "name": name,
        "about": f"ListOps <short>, the {name} variant",
        "model": {"is": "transformer", **sizes, "cache": cache},
        "data": {"is": "listops", "depth": 3},
        "optim": {"name": "adamw", "lr": 3e-3},
        "train": {"steps": steps, "batch_size": 64, "seed": seed},
    }


def write_run(folder, name="demo", seed=0, steps=2500, gates=None, metrics=None, finished=True, explained=None):
    """A run folder. `metrics` replaces the records; `gates`, `explained` default to a cached variant's."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng([seed, *name.encode()])
    variant = VARIANTS.get(name, VARIANTS["demo"])
    cached = "cached" in name
    offset = {0: -1.0, 1: 0.1, 2: 0.9}.get(seed, 0.0) * variant["spread"]
    (folder / "recipe.json").write_text(json.dumps(recipe(name, seed, steps)))
    provenance = {
        **{"commit": COMMIT, "dirty": False, "seed": seed, "resumed": []},
        "versions": {"python": "3.11.9", "torch": "2.13.0", "mnemos": "0.1.0"},
        **{"device": "cpu", "cpu": "AVX2, 2 cores", "threads": 2},
        "command": ["mnemos", "train", name, "--train.seed", str(seed)],
        "started": f"2025-11-21T07:0{seed}:00+00:00",
        "finished": f"2025-11-21T07:0{seed + 1}:02+00:00",
    }
    (folder / "run.json").write_text(json.dumps(provenance, indent=2))
    end = variant["end"] + offset
    records = metrics if metrics is not None else _records(random, end, steps, cached if gates is None else gates)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if finished:
        (folder / "result.json").write_text(json.dumps(_result(name, seed, steps, end, cached, random), indent=2))
    if cached if explained is None else explained:
        write_explained(folder, random)
    return folder


def write_explained(folder, random):
    """explain.json and explain.safetensors of a model of two layers, as if its inputs were pictures."""
    count, grid = 4, (3, 5)
    arrays = {"pictures": random.integers(0, 256, (count, 12, 20, 3), np.uint8)}
    for i in range(len(LAYERS)):
        arrays[f"self.{i}"] = random.normal(size=(count, *grid)).astype(np.float32)
        arrays[f"memory.{i}"] = random.normal(size=(count, *grid)).astype(np.float32)
    save_file(arrays, folder / "explain.safetensors")
    maps = {"grid": grid, "weight": 0.25, "correlation": [-0.75, 0.25, 0.5, 0.125], "memory_own": 0.125}
    maps |= {"self_own": 0.875}
    pictures = {"split": "test", "index": list(range(count)), "label": [0, 0, 1, 1], "guess": [0, 1, 1, 1]}
    explained = {
        "pictures": {**pictures, "names": ["cat", "dog"]},
        "left": None,
        "sizes": {"train": 96000, "valid": 2000, "test": 2000},
        "middle": 0,
        "layers": [{"name": name, "share": [0.4, 0.5, 0.6, 0.7], "maps": maps} for name in LAYERS],
    }
    (folder / "explain.json").write_text(json.dumps(explained))


def _records(random, end, steps, gates):
    records = []
    mix = random.normal(0, 0.02, (2, 4))
    for step in range(50, steps + 1, 50):
        done = 1 - np.exp(-3.2 * step / steps)
        accuracy = 0.106 + (end - 0.106) * done / (1 - np.exp(-3.2))
        noise = random.normal(0, 0.035)
        loss = 2.3 - 2.4 * end * done
        records.append(
            {"kind": "train", "step": step, "loss": loss - noise, "accuracy": accuracy + noise, "lr": 3e-3}
            | {"grad_norm": 0.8, "seconds": step * 0.021, "tokens": step * 900}
        )
        if step % 250 == 0:
            records.append(
                {"kind": "valid", "step": step, "loss": loss + 0.02, "accuracy": accuracy + random.normal(0, 0.006)}
            )
        if gates and step % 100 == 0:
            mix = mix + random.normal([[-0.004], [0.012]], 0.02, (2, 4))
            records.append({"kind": "gates", "step": step, "layers": [_layer(i, mix, done) for i in range(2)]})
    return records


def _layer(i, mix, done):
    return {
        "name": LAYERS[i],
        "mix": (1 / (1 + np.exp(-mix[i]))).tolist(),
        "update": {"mean": 0.5 - 0.08 * done * (i + 1), "saturated": 0.05 * done + 0.02 * i},
        "reset": {"mean": 0.5 + 0.05 * done * (i + 1), "saturated": 0.03 * done},
        "cache": {"rms": 0.4 + 0.5 * done + 0.2 * i, "rank": 14 - 6 * done + i, "max": 3.1 + done},
    }


def _result(name, seed, steps, end, cached, random):
    controls = {
        "emptied": {"loss": 1.08, "accuracy": end - 0.002 + 0.002 * (seed - 1)},
        "closed": {"loss": 1.21, "accuracy": end - 0.044 + 0.004 * (seed - 1)},
        "exchanged": {"loss": 1.07, "accuracy": end + 0.001 * (seed - 1)},
    }
    accuracy = {"higher_is_better": True, "about": "The share of right answers.", "bounds": [0.0, 1.0]}
    scores = {"test": {"loss": 1.07, "accuracy": end}, "valid": {"loss": 1.06, "accuracy": end + 0.004}}
    costs = {"flops": 3_100_000 if not cached else 4_200_000, "seconds": 52.0 + 9 * cached + seed}
    costs |= {"parameters": VARIANTS.get(name, VARIANTS["demo"])["parameters"], "peak_bytes": 311 * 2**20}
    described = {"metric": "accuracy", "metrics": {"accuracy": accuracy}, "majority": 0.106}
    found = {"recipe": name, "seed": seed, "steps": steps, **scores, **described, **costs}
    return found | ({"controls": controls} if cached else {})


def write_comparison(folder, seeds=(0, 1, 2), variants=tuple(VARIANTS), with_controls=True, with_runs=True, **fields):
    """A comparison folder over `variants`; `fields` replace those of comparison.json."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows, listed, places = [], [], {}
    for name in variants:
        places[name] = [f"{name}-{seed}" for seed in seeds]
        for seed, place in zip(seeds, places[name], strict=True):
            write_run(folder / place, name, seed)
        results = [json.loads((folder / p / "result.json").read_text()) for p in places[name]]
        tested = [r["test"]["accuracy"] for r in results]
        cost = {
            key: float(np.mean([r[key] for r in results])) for key in ("parameters", "flops", "seconds", "peak_bytes")
        }
        role = {"baseline_of": None, "memory": "cache" if "cached" in name else None}
        rows.append({"name": name, **_spread(tested), "seeds": len(seeds), **cost, **role})
        for kind in results[0].get("controls", {}):
            values = [r["controls"][kind]["accuracy"] for r in results]
            listed.append({"name": name, "control": kind, **_spread(values), "seeds": len(seeds)})
    comparison = {"metric": "accuracy", "higher_is_better": True, "bounds": [0.0, 1.0], "majority": 0.106, "rows": rows}
    comparison |= {"controls": listed} if with_controls else {}
    comparison |= {"runs": places} if with_runs else {}
    comparison |= {"provenance": {"command": ["mnemos", "compare", *variants], "commit": COMMIT}}
    (folder / "comparison.json").write_text(json.dumps(comparison | fields, indent=2))
    return folder


def _spread(values):
    return {"mean": float(np.mean(values)), "std": float(np.std(values, ddof=1)) if len(values) > 1 else None}
