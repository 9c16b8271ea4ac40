"""Models of memory tokens from their equations: a loop over segments with an explicit mask, in float64; only torch.

Every segment is written out as [front ; tokens ; back] and read as a whole; nothing is cached.
"""

import math

import torch
from torch import Tensor


def logits(weights: dict[str, Tensor], config, tokens: list[int]) -> tuple[Tensor, object]:
    """[T, V] of one new row, and its memory at the end."""
    w = {name: x.double() for name, x in weights.items()}
    kind, said, memory = config.name, [], None
    layers, length = config.layers, config.segment
    if kind == "rmt":
        memory = w["memory.start"]
    if kind == "armt":
        features = 2 * config.memory.nu * config.memory.key_dim
        memory = [(torch.zeros(features, config.dim).double(), torch.zeros(features).double()) for _ in range(layers)]
    for start in range(0, len(tokens), length):
        ids = tokens[start : start + length]
        whole = len(ids) == length
        front = {"rmt": memory, "memory-transformer": w.get("memory.start"), "armt": None}[kind]
        back = {"rmt": memory, "memory-transformer": None, "armt": w.get("memory_tokens")}[kind]
        kinds = ["front"] * (0 if front is None else len(front)) + ["token"] * len(ids)
        parts = [] if front is None else [front]
        parts.append(torch.stack([w["embedding.weight"][i] for i in ids]))
        if whole and back is not None:
            parts.append(back)
            kinds += ["back"] * len(back)
        x = torch.cat(parts)
        first = kinds.index("token")
        outputs, new = read(w, config, x, kinds, memory)
        head = w["embedding.weight"] if config.tied else w["head.weight"]
        shift = 0 if config.tied else w["head.bias"]
        said += [head @ y + shift for y in outputs[first : first + len(ids)]]
        if whole and back is not None:
            memory = outputs[first + length :] if kind == "rmt" else new
    return torch.stack(said), memory


def read(w, config, x: Tensor, kinds: list[str], memory):
    """The normed outputs of every token of a segment, and ARMT's memory of each layer."""
    causal = config.causal_memory if config.name == "memory-transformer" else config.memory.causal
    n, new = len(kinds), []
    mask = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        for j in range(n):
            a, b = kinds[i], kinds[j]
            if a == "front":
                sees = b == "front" and (j <= i or not causal)
            elif a == "token":
                sees = b == "front" or (b == "token" and j <= i)
            else:
                sees = b != "back" or j <= i or not causal
            mask[i, j] = i == j or sees
    if config.position == "learned":
        x = x + w["positions.weight"][:n]
    if config.position == "sinusoidal":
        x = x + torch.stack([sinusoid(i, config.dim) for i in range(n)])
    for layer in range(config.layers):
        name = f"blocks.{layer}"
        if config.name == "armt":
            x = x + torch.stack([held(config, memory[layer], feature(w, config, layer, "query", y)) for y in x])
        if config.norm == "pre":
            x = x + attention(w, config, name, norm(w, f"{name}.attention_norm", x), mask)
            x = x + mlp(w, config, name, norm(w, f"{name}.mlp_norm", x))
        else:
            x = norm(w, f"{name}.attention_norm", x + attention(w, config, name, x, mask))
            x = norm(w, f"{name}.mlp_norm", x + mlp(w, config, name, x))
        if config.name == "armt":
            new.append(stored(w, config, layer, memory[layer], [x[i] for i in range(n) if kinds[i] == "back"]))
    return (norm(w, "final_norm", x) if config.norm == "pre" else x), new


def attention(w, config, name: str, x: Tensor, mask: Tensor) -> Tensor:
    d, width, heads = config.dim, config.dim // config.num_heads, []
    both = x @ w[f"{name}.attention.qkv.weight"].T + w[f"{name}.attention.qkv.bias"]
    for h in range(config.num_heads):
        q, k, v = (both[:, part * d + h * width : part * d + (h + 1) * width] for part in range(3))
        if config.position == "rotary":
            q, k = (torch.stack([turned(y, i) for i, y in enumerate(z)]) for z in (q, k))
        powers = torch.exp(q @ k.T / math.sqrt(width)) * mask
        heads.append(powers @ v / powers.sum(1, keepdim=True))
    return torch.cat(heads, 1) @ w[f"{name}.attention.output.weight"].T + w[f"{name}.attention.output.bias"]


def turned(x: Tensor, place: int) -> Tensor:
    parts = []
    for pair in range(len(x) // 2):
        angle = place / 10000 ** (2 * pair / len(x))
        a, b = x[2 * pair], x[2 * pair + 1]
        parts += [a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)]
    return torch.stack(parts)


def sinusoid(place: int, dim: int) -> Tensor:
    """Rounded to float32, as the models' tables are."""
    angles = [place / 10000 ** (2 * (c // 2) / dim) for c in range(dim)]
    return torch.tensor([math.cos(a) if c % 2 else math.sin(a) for c, a in enumerate(angles)]).float().double()


def mlp(w, config, name: str, x: Tensor) -> Tensor:
    hidden = x @ w[f"{name}.mlp.expand.weight"].T + w[f"{name}.mlp.expand.bias"]
    hidden = hidden.clamp(min=0) if config.activation == "relu" else hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    return hidden @ w[f"{name}.mlp.contract.weight"].T + w[f"{name}.mlp.contract.bias"]


def norm(w, name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(1, keepdim=True) + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]


def feature(w, config, layer: int, projection: str, x: Tensor) -> Tensor:
    """DPFP-ν of a projected token, divided by its length."""
    x = w[f"associations.{layer}.{projection}.weight"] @ x
    both = [max(e, 0 * e) for e in x] + [max(-e, 0 * e) for e in x]
    found = torch.stack([both[i] * both[i - j] for j in range(1, config.memory.nu + 1) for i in range(len(both))])
    return found / torch.sqrt((found**2).sum()) if float(found.detach().abs().sum()) else found


def held(config, memory: tuple[Tensor, Tensor], phi: Tensor) -> Tensor:
    weight = phi @ memory[1]
    return phi @ memory[0] / (max(weight, 0 * weight + 1) if config.memory.bounded else weight + 1e-5)


def stored(w, config, layer: int, memory: tuple[Tensor, Tensor], tokens: list[Tensor]) -> tuple[Tensor, Tensor]:
    a, z = memory
    one = torch.tensor(1.0).double()
    keys = [feature(w, config, layer, "key", token) for token in tokens]
    for phi in keys:
        z = z + min(max(1 - memory[1] @ phi, 0 * one), one) * phi
    for phi, token in zip(keys, tokens, strict=True):
        share, normaliser = one, memory[1]
        if config.memory.bounded:
            share = min(one, max(phi @ z, one) / max(sum(phi @ other for other in keys), one))
            normaliser = z
        name = f"associations.{layer}"
        beta = 1 / (1 + torch.exp(-(w[f"{name}.strength.weight"][0] @ token) - w[f"{name}.strength.bias"][0]))
        a = a + beta * share * torch.outer(
            phi, w[f"{name}.value.weight"] @ token - held(config, (memory[0], normaliser), phi)
        )
    return a, z
