"""Memformer's forward from SPEC and equations: a row, a token, a head at a time, in float64. It imports only torch."""

import math

import torch
from torch import Tensor


def logits(weights: dict[str, Tensor], config: object, tokens: list[int]) -> tuple[Tensor, Tensor | None]:
    """[T, V] for one fresh row, and the slots that were written at the end."""
    return _Row(weights, config).run(tokens)


class _Row:
    def __init__(self, weights: dict[str, Tensor], config) -> None:
        self.w, self.c = {name: x.double() for name, x in weights.items()}, config
        self.radius = config.memory.radius or math.sqrt(config.dim)

    def run(self, tokens: list[int]) -> tuple[Tensor, Tensor | None]:
        """E_0 is BOS, encoded with M_0; then segment after segment: the decoder, the encoder, the writer."""
        length = self.c.segment
        slots = None
        if self.c.memory.slots:
            slots = [self.radius * v / v.norm() for v in self.w["memory.bias"]]
        bos = self.w["bos.weight"][0] if self.c.bos is None else self.w["embedding.weight"][self.c.bos]
        before = {-1: self.encode([bos], slots)[0]}  # place -> encoding; the present segment begins at 0
        said = []
        for start in range(0, len(tokens), length):
            x = [self.w["embedding.weight"][t] for t in tokens[start : start + length]]
            said += self.decode(x, before, slots)
            if len(x) == length:
                encoded = self.encode(x, slots)
                if slots is not None and self.c.memory.write:
                    slots = self.write(slots, encoded)
                before = {i - length: encoded[i] for i in range(length)}
        written = slots is not None and self.c.memory.write
        return torch.stack(said), torch.stack(slots) if written else None

    def encode(self, x: list[Tensor], slots: list[Tensor] | None) -> list[Tensor]:
        x = [*x, *(self.w["encoder.cls"] if self.c.cls else [])]
        for layer in range(self.c.encoder_layers):
            name = f"encoder.blocks.{layer}"
            x = self.self_attention(name, x, "encoder.bias.bias", both=True)
            if slots is not None:
                x = self.read(name, 0, x, slots)
            x = [y + self.mlp(f"{name}.mlp", self.norm(f"{name}.mlp_norm", y)) for y in x]
        return [self.norm("encoder.norm", y) for y in x]

    def decode(self, x: list[Tensor], before: dict[int, Tensor], slots: list[Tensor] | None) -> list[Tensor]:
        for layer in range(self.c.decoder_layers):
            name = f"decoder.blocks.{layer}"
            x = self.self_attention(name, x, "decoder.own_bias.bias", both=False)
            x = self.read(name, 0, x, list(before.values()), list(before))
            if self.c.decoder_reads:
                x = self.read(name, 1, x, slots)
            x = [y + self.mlp(f"{name}.mlp", self.norm(f"{name}.mlp_norm", y)) for y in x]
        head = self.w["embedding.weight"] if self.c.tied else self.w["head.weight"]
        shift = 0 if self.c.tied else self.w["head.bias"]
        return [head @ self.norm("decoder.norm", y) + shift for y in x]

    def write(self, slots: list[Tensor], heard: list[Tensor]) -> list[Tensor]:
        """Eq. 4–8 and §3.4.3."""
        heads = self.c.memory.num_heads or self.c.num_heads
        w_q, w_k, w_v = (self.w[f"memory.{part}.weight"] for part in ("query", "key", "value"))
        new = []
        for i, slot in enumerate(slots):
            parts = []
            for h in range(heads):
                cut = slice(h * self.c.dim // heads, (h + 1) * self.c.dim // heads)
                query = (w_q @ slot)[cut]
                score = [query @ (w_k @ y)[cut] for y in (slot, *heard)]
                score = [s / math.sqrt(len(query)) / self.c.memory.temperature for s in score]
                if self.c.memory.self_logit is not None:
                    score[0] = score[0] + self.w["memory.self_logit"][i * heads + h]
                share = torch.softmax(torch.stack(score), 0)
                values = [slot[cut], *((w_v @ y)[cut] for y in heard)]
                parts.append(sum(a * v for a, v in zip(share, values, strict=True)))
            moved = torch.cat(parts)
            if self.c.memory.forgetting:
                moved = moved + self.w["memory.bias"][i]
            new.append(self.radius * moved / moved.norm())
        return new

    def self_attention(self, name: str, x: list[Tensor], bias: str, both: bool) -> list[Tensor]:
        """Each token with what it takes from all, or from those up to itself."""
        d, new = self.c.dim, []
        parts = torch.stack([self.affine(f"{name}.attention.qkv", self.norm(f"{name}.attention_norm", y)) for y in x])
        for i, y in enumerate(x):
            seen = parts if both else parts[: i + 1]
            biases = [self.bias(bias, j - i, both) for j in range(len(seen))]
            heads = parts[i, :d], seen[:, d : 2 * d], seen[:, 2 * d :], biases
            new.append(y + self.attend(f"{name}.attention.output", *heads))
        return new

    def read(
        self, name: str, number: int, x: list[Tensor], source: list[Tensor], places: list[int] | None = None
    ) -> list[Tensor]:
        """Eq. 1–3: each token with what it takes from the source, whose places, if it has any, have biases."""
        read, d, new = f"{name}.reads.{number}", self.c.dim, []
        parts = torch.stack([self.affine(f"{read}.key_value", y) for y in source])
        for i, y in enumerate(x):
            query = self.affine(f"{read}.query", self.norm(f"{name}.read_norms.{number}", y))
            bias = places and [self.bias("decoder.read_bias.bias", place - i, both=False) for place in places]
            new.append(y + self.attend(f"{read}.output", query, parts[:, :d], parts[:, d:], bias))
        return new

    def attend(self, name: str, query: Tensor, keys: Tensor, values: Tensor, bias: list[Tensor] | None) -> Tensor:
        parts, width = [], self.c.dim // self.c.num_heads
        for h in range(self.c.num_heads):
            cut = slice(h * width, (h + 1) * width)
            score = keys[:, cut] @ query[cut] / math.sqrt(width)
            if bias is not None:
                score = score + torch.stack([b[h] for b in bias])
            parts.append(torch.softmax(score, 0) @ values[:, cut])
        return self.affine(name, torch.cat(parts))

    def bias(self, name: str, distance: int, both: bool) -> Tensor:
        """T5's buckets for key − query: exact when near, then logarithmic; behind the query in the second half."""
        n, offset = self.c.buckets, 0
        if both:
            n //= 2
            offset = n if distance > 0 else 0
            distance = abs(distance)
        else:
            distance = max(0, -distance)
        if distance < n // 2:
            return self.w[name][offset + distance]
        far = math.log(distance / (n // 2)) / math.log(self.c.max_distance / (n // 2))
        return self.w[name][offset + min(n - 1, n // 2 + int(far * (n - n // 2)))]

    def mlp(self, name: str, x: Tensor) -> Tensor:
        hidden = self.affine(f"{name}.expand", x)
        return self.affine(f"{name}.contract", 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2))))

    def affine(self, name: str, x: Tensor) -> Tensor:
        return self.w[f"{name}.weight"] @ x + self.w[f"{name}.bias"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        centred = x - x.mean()
        return centred / torch.sqrt((centred**2).mean() + 1e-5) * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]
