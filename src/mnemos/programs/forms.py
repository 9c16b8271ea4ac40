"""What layers and models compute inside an exported graph: PyTorch's own operators, for any number of tokens.

Elsewhere a layer computes in the way that is fastest: by kernels, by what it reads in the values of its inputs, and by
the number of tokens. A graph is traced once for all numbers of rows and tokens, and has none of these. `adapt` gives a
model whose parts compute in the forms of this file; what is not named in `FORMS`, and what a subclass computes in its
own way, is traced as it is. What is written for one token of each row has few operators, because their number is most
of what a runtime's step costs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos._compat import parameters_of, pytree, scanned, with_children
from mnemos.attention.cross import CrossAttention
from mnemos.attention.gated import GatedBranch, GatedCacheAttention
from mnemos.attention.linear import LinearAttention, PlacedSums, Sums
from mnemos.attention.recurrent import RecurrentAttention, ShortConvolution
from mnemos.attention.relative import RelativeHeads
from mnemos.attention.softmax import SoftmaxAttention
from mnemos.memory.key_values import KeyValues
from mnemos.memory.row_blocks import CacheState
from mnemos.models.lstm import LSTM, LSTMState
from mnemos.models.memformer import Memformer, MemformerState, Past, Read
from mnemos.models.segments import Layout, SegmentAttention, SegmentCache, SegmentModel, SegmentState, with_pass
from mnemos.models.transformer import LearnedPositions
from mnemos.ops.linear import LinearState
from mnemos.ops.linear.feature_maps import FeatureMap, Pointwise, elu
from mnemos.ops.padding import zero_invalid
from mnemos.ops.positions import Rotary, count_seen, positions, rotate, sinusoids
from mnemos.ops.relative_position import distance_scores, hide
from mnemos.types import InputError, S, State, leaves, map_state

Form = Literal["operators", "onnxruntime"]
CHUNK = 64  # tokens of a chunk of linear attention


def adapt(model: nn.Module, form: Form = "operators") -> nn.Module:
    """A model with the same weights, without gradient, whose parts have the forms of a graph. The model is not changed.

    form: of causal linear attention, of the delta rule and decayed attention and of their convolutions: "operators", or
    "onnxruntime", ONNX Runtime's own kernels. The model has weights of float32 or float64, is in eval mode, and is
    always given a state.
    """
    copies: dict[int, nn.Module] = {}
    weights: dict[int, nn.Parameter] = {}  # a weight may have two names

    def frozen(x: Tensor | None) -> nn.Parameter | None:
        return None if x is None else weights.setdefault(id(x), nn.Parameter(x.detach(), requires_grad=False))

    def copy_part(part: nn.Module) -> nn.Module:
        if id(part) not in copies:
            below = part.named_modules(remove_duplicate=False)  # a child may have two names
            children = {name: copy_part(child) for name, child in below if name and "." not in name}
            parameters = {name: frozen(x) for name, x in parameters_of(part).items()}
            copies[id(part)] = copy = with_children(part, children, parameters)
            for cls, methods in FORMS.items():
                copy.__dict__.update({name: partial(f, copy) for name, f in methods.items() if _is_of(cls, part, name)})
            for cls, (names, method) in FORMS_OF_BOTH.items():
                if _is_of(cls, part, *names):
                    copy.__dict__[names[0]] = partial(method, copy, form)
            if isinstance(rotary := part.__dict__.get("rotary"), Rotary):
                copy.__dict__["rotary"] = _Cosines(rotary.base, rotary.scaling)
        return copies[id(part)]

    return copy_part(model)


def _is_of(cls: type[nn.Module], part: nn.Module, *names: str) -> bool:
    """Whether the part has these methods of the class: one of a subclass, or of the part alone, computes otherwise."""
    return isinstance(part, cls) and all(
        name not in part.__dict__ and getattr(type(part), name) is getattr(cls, name) for name in names
    )


# --- control flow, where neither a number of tokens nor a value of a tensor is known ---


def token_by_token(
    token: Callable[[Any, tuple[Tensor, ...]], tuple[Tensor, Any]], state: S, inputs: Sequence[Tensor]
) -> tuple[Tensor, S]:
    """y [B, T, ..] and the state after `y, state = token(state, inputs)` for each token.

    inputs: tensors [B, T, ..], of which `token` gets a token each, [B, 1, ..]; its y is [B, 1, ..]. The state has the
    same shapes before and after a token. For one token the function is called; else the graph has a loop, whose cost is
    that of T calls.
    """
    if is_one(inputs[0].shape[1]):
        return token(state, tuple(inputs))
    structure = pytree.tree_flatten(state)
    shapes = [x.shape[1:] for x in leaves(state)]

    def step(carry: list[Tensor], inputs: tuple[Tensor, ...]) -> tuple[list[Tensor], Tensor]:
        rows = inputs[0].shape[0]
        for x, shape in zip(carry, shapes, strict=True):  # a loop's body is traced alone, and has to be told
            if x.shape != (rows, *shape):
                raise InputError(f"expected a state of {(rows, *shape)}, found {tuple(x.shape)}")
        y, after = token(unflatten(carry, structure), tuple(x[:, None] for x in inputs))
        return _own(leaves(after)), y[:, 0].clone()

    carry, y = scanned(step, _own(leaves(state)), tuple(x.transpose(0, 1) for x in inputs))
    return y.transpose(0, 1), unflatten(carry, structure)


def changed_if_any(rows: Tensor, change: Callable[..., S], state: S, *others: State) -> S:
    """`change(state, *others)` if one of the rows [B] is True, else the state: what is computed for some rows alone.

    The change has the structure, shapes and types of the state.
    """
    kept, structure = pytree.tree_flatten(state), pytree.tree_flatten((state, others))
    count = len(leaves(state))

    def compute(*parts: Tensor) -> list[Tensor]:
        before, more = unflatten(parts, structure)
        pairs = zip(leaves(change(before, *more)), parts, strict=False)
        return _own([x.reshape(old.shape) for x, old in pairs])  # a branch has to be told that the sizes are the same

    def keep(*parts: Tensor) -> list[Tensor]:
        return _own(parts[:count])

    return unflatten(torch.cond(rows.any(), compute, keep, tuple(leaves((state, others)))), kept)


def unflatten(tensors: Sequence[Tensor], flat: tuple[list[Any], Any]) -> Any:
    """What was flattened, with other tensors; parts that are None stay so."""
    rest = iter(tensors)
    return pytree.tree_unflatten([next(rest) if isinstance(x, Tensor) else x for x in flat[0]], flat[1])


def is_one(size: int | torch.SymInt) -> bool:
    """Whether a size is known to be 1. Other sizes are not compared, because a graph has one form for all."""
    return isinstance(size, int) and size == 1


def _own(parts: Sequence[Tensor]) -> list[Tensor]:
    """Copies: a loop and a branch return neither what they were given nor the same memory twice."""
    return [x.clone(memory_format=torch.contiguous_format) for x in parts]


# --- positions ---


@dataclass(frozen=True)
class _Cosines(Rotary):
    """Rotations without complex numbers, which the formats of graphs do not have."""

    def turns(
        self, t: int, width: int, start: Tensor | None = None, device: Any = None, mask: Tensor | None = None
    ) -> Tensor:
        """The cosines and then the sines by which `rotate` multiplies each channel, [B or 1, T, 1, 2·width]."""
        each = self.frequencies(width, device)[:, None] * (2 * torch.arange(2, device=device) - 1)
        angle = positions(t, start, mask, device)[..., None, None].to(each.dtype) * each.flatten()
        return torch.cat([angle.cos(), angle.sin()], -1)


def _add_positions(self: LearnedPositions, y: Tensor, seen: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """`LearnedPositions.forward`, which reads no value: the look-up in the table raises its own error."""
    return y + F.embedding(positions(y.shape[1], seen, mask, y.device), self.weight)


# --- softmax attention ---


def _softmax(
    self: nn.Module, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, causal: bool, dropout: float = 0.0
) -> Tensor:
    """`mnemos.attention.softmax.attend`. For one token, a query that sees no key reads the mean of all values."""
    b, _, h, d = q.shape
    one, groups = is_one(q.shape[1]), h // k.shape[2]
    if groups > 1 and one and (visible is None or visible.shape[1] == 1):
        shared = q.unflatten(2, (-1, groups))[:, 0].transpose(1, 2)
        return _softmax(self, shared, k, v, visible, False).transpose(1, 2).flatten(1, 2)[:, None]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    if one:
        scores = q.reshape(b, h, 1, d) @ k.transpose(1, 2).mT * d**-0.5
        if visible is not None and visible.dtype == torch.bool:
            scores = torch.where(visible, scores, torch.finfo(scores.dtype).min)
        elif visible is not None:
            scores = (scores + visible.to(q.dtype)).clamp(min=torch.finfo(scores.dtype).min)
        return (torch.softmax(scores, -1) @ v.transpose(1, 2)).reshape(b, 1, h, -1)
    if visible is not None and visible.is_floating_point():
        visible = visible.to(q.dtype)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if (more := v.shape[-1] - d) > 0:
        q, k = F.pad(q, (0, more)), F.pad(k, (0, more))
    return F.scaled_dot_product_attention(q, k, v, visible, 0.0, causal, scale=d**-0.5).transpose(1, 2)


# --- linear attention, convolutions, and layers that forget or correct ---


def _linear_heads(
    self: LinearAttention, form: Form, x: Tensor, state: Sums | None, mask: Tensor | None
) -> tuple[Tensor, Sums | None]:
    """`LinearAttention.compute_heads`: queries and keys together, which takes half the operators."""
    t, phi, turns, seen = x.shape[1], self.phi(), None, None
    if isinstance(state, PlacedSums):
        state, seen = state
    if self.rotary is not None:
        turns = self.rotary.turns(t, self.dim // self.num_heads, seen, x.device, mask)
    qkv = self.qkv(x)
    if not self.causal:
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        q, k = (q, k) if turns is None else (rotate(q, turns), rotate(k, turns))
        return _linear_everything(q, k, v, phi, mask, self.eps), None
    q, k, v = _features(qkv, self.num_heads, phi, turns)
    k, v = zero_invalid(k, mask), zero_invalid(v, mask)
    assert state is not None
    causal = _linear_token if is_one(t) else _linear_chunks if form == "operators" else _linear_kernel
    y, *after = causal(q, k, v, *state, self.eps)
    sums = LinearState(*after)
    return y, sums if seen is None else PlacedSums(sums, count_seen(x, seen, mask))


def _features(qkv: Tensor, heads: int, phi: FeatureMap, turns: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """φ(q), φ(k) and v [B, T, H, ·] of qkv [B, T, 3·H·D]; turns: rotations of queries and keys before φ, or None."""
    qk, v = qkv.split([2 * qkv.shape[2] // 3, qkv.shape[2] // 3], 2)
    if turns is None and isinstance(phi, Pointwise):
        q, k = (part.unflatten(2, (heads, -1)) for part in phi(qk).chunk(2, 2))
    else:
        qk = qk.unflatten(2, (2 * heads, -1))
        q, k = phi(qk if turns is None else rotate(qk, turns)).chunk(2, 2)
    return q, k, v.unflatten(2, (heads, -1))


def _linear_everything(q: Tensor, k: Tensor, v: Tensor, phi: FeatureMap, mask: Tensor | None, eps: float) -> Tensor:
    """Linear attention of q [B, T, H, D] to all keys k [B, N, H, D] and values v [B, N, H, M], before φ."""
    q, k, v = phi(q), zero_invalid(phi(zero_invalid(k, mask)), mask), zero_invalid(v, mask)
    s, z = torch.einsum("bnhd,bnhm->bhdm", k, v), k.sum(1)
    return torch.einsum("bthd,bhdm->bthm", q, s) / (torch.einsum("bthd,bhd->bth", q, z)[..., None] + eps)


def _linear_token(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y, s, z after one token. ONNX Runtime's kernel is slower, because its operands have other shapes than these."""
    b, _, h, m = v.shape
    q, k = q.reshape(b, h, 1, -1), k.reshape(b, h, -1)
    s, z = s + k[..., None] * v.reshape(b, h, 1, m), z + k
    y = (q @ s) / (q @ z[..., None] + eps)
    return y.reshape(b, 1, h, m), s, z


def _linear_chunks(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y, s, z with all chunks of a call side by side: O(T·(C + D')·M) time and O(T·D'·M/C) memory."""
    t, m = q.shape[1], v.shape[3]
    n = (t + 2 * CHUNK - 1) // CHUNK  # with one of padding: a graph of one chunk at least has one form
    v = F.pad(v, (0, 1), value=1.0)  # the values' last column of ones sums the keys: the normaliser
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, n * CHUNK - t)).unflatten(1, (n, CHUNK)).transpose(2, 3) for x in (q, k, v))
    before = torch.cat([s, z[..., None]], -1)[:, None]  # [B, 1, H, D, M + 1]
    sums = torch.cat([before, k.mT @ v], 1).cumsum(1)
    y = torch.tril(q @ k.mT) @ v + q @ sums[:, :-1]
    y = (y[..., :m] / (y[..., m:] + eps)).transpose(2, 3).flatten(1, 2)
    y = y.index_select(1, torch.arange(t, device=y.device))  # a slice would have to know that there are as many
    return y, sums[:, -1, ..., :m], sums[:, -1, ..., m]


def _linear_kernel(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y, s, z by ONNX Runtime's kernel, which has no normaliser: a running sum of the keys gives it."""
    y, s = _runtime_kernel("linear", q, k, v, s, (), 1.0)
    sums = z[:, None] + k.cumsum(1)
    return y / ((q * sums).sum(-1, keepdim=True) + eps), s, sums[:, -1]


def _runtime_kernel(
    rule: str, q: Tensor, k: Tensor, v: Tensor, s: Tensor, gates: tuple[Tensor | None, ...], scale: float
) -> tuple[Tensor, Tensor]:
    """y and the sums by com.microsoft.LinearAttention. gates: (decay, beta), or none.

    com.microsoft.GatedDeltaNet computes the same, but takes transposed sums, and was slower where it was tried (1.32).
    ONNX has an operator LinearAttention (from opset 27), which ONNX Runtime 1.32 runs as the function that defines it,
    a loop over tokens.
    """
    b, t, h, m = v.shape
    y, s = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::LinearAttention",
        (*(x.flatten(2) for x in (q, k, v)), s, *gates),
        {"q_num_heads": h, "kv_num_heads": h, "update_rule": rule, "scale": scale},
        dtypes=(v.dtype, s.dtype),
        shapes=((b, t, h * m), s.shape),
        version=1,
    )
    return y.unflatten(2, (h, m)), s


def _convolve(
    self: ShortConvolution, form: Form, x: Tensor, window: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`ShortConvolution.forward`."""
    assert window is not None
    t, width = x.shape[1], self.weight.shape[1]
    if form == "onnxruntime":
        y, window = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::CausalConvWithState",
            (x, self.weight[:, None], self.bias, window),
            {"activation": "silu", "channels_last": 1},
            dtypes=(x.dtype, x.dtype),
            shapes=(x.shape, window.shape),
            version=1,
        )
        return y, window
    read = torch.cat([window, x], 1)
    if is_one(t):
        y = (read * self.weight.T).sum(1, keepdim=True)
        y = y if self.bias is None else y + self.bias
    else:
        y = F.conv1d(read.mT, self.weight[:, None], self.bias, groups=self.weight.shape[0]).mT
    return F.silu(y), read[:, 1 - width :]


def _recur(
    self: RecurrentAttention,
    form: Form,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    decay: Tensor | None,
    sums: Tensor | None,
    mask: Tensor | None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`RecurrentAttention.recur`: token by token, or by ONNX Runtime's kernel."""
    assert sums is not None
    scale, groups = q.shape[3] ** -0.5 if scale is None else scale, v.shape[2] // q.shape[2]
    if groups > 1:
        q, k = (x[:, :, :, None].expand(-1, -1, -1, groups, -1).flatten(2, 3) for x in (q, k))
    if form == "onnxruntime":
        rule = "gated" if beta is None else "delta" if decay is None else "gated_delta"
        return _runtime_kernel(rule, q, k, v, sums, (None if decay is None else decay.flatten(2), beta), scale)

    def token(s: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        q, k, v, *gates = (x[:, 0] for x in inputs)
        if decay is not None:
            g = gates.pop().exp()
            s = s * (g[..., None] if g.dim() == 3 else g[..., None, None])
        k = k[:, :, None]
        v = v[:, :, None]
        u = v if beta is None else gates.pop()[..., None, None] * (v - k @ s)
        s = s + k.mT * u
        return (scale * (q[:, :, None] @ s))[:, None, :, 0], s

    return token_by_token(token, sums, [x for x in (q, k, v, beta, decay) if x is not None])


# --- relative attention ---


def _relative_read(self: RelativeHeads[Any], x: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
    """`RelativeHeads.read`."""
    if is_one(t := x.shape[1]):
        return self.read_few(x, context, mask)
    heads = (self.num_heads, -1)
    k, v = self.key_value(context).unflatten(-1, (2, *heads)).unbind(2)
    r = self.position(self.distances(context.shape[1], 0 if self.causal else 1 - t, x)).unflatten(-1, heads)
    content, scores = _relative_scores(self, self.query(x).unflatten(-1, heads), r, context.shape[1], mask)
    k, v = k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)
    return F.scaled_dot_product_attention(content, k, v, scores, scale=1.0).permute(1, 2, 0, 3)


def _relative_scores(
    self: RelativeHeads[Any], q: Tensor, r: Tensor, n: int, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(q + u)/√D, [H, B, T, D], and the scores of distances with hidden keys, [H, B, T, N]."""
    b, t, h, d = q.shape
    place = ((q + self.position_bias) * d**-0.5).permute(2, 0, 1, 3)
    r = r.transpose(0, 1).to(place.dtype)
    query, key = torch.arange(n - t, n, device=q.device)[:, None], torch.arange(n, device=q.device)
    if is_one(t):
        scores = distance_scores(place, r, n)
    else:  # the views of `distance_scores` would limit the program to some lengths
        scores = torch.bmm(place.reshape(h, b * t, d), r.mT).view(h, b, t, -1)
        column = torch.arange(n, device=q.device) + torch.arange(t - 1, -1, -1, device=q.device)[:, None]
        scores = scores.gather(3, column.clamp(max=r.shape[1] - 1).expand(h, b, t, n))
    seen = key <= query if self.causal else torch.ones(1, 1, dtype=torch.bool, device=key.device)
    if self.window is not None:
        seen = seen & (key > query - self.window)
    seen = seen.expand(t, n)[None] if mask is None else (seen & mask[:, None]) | (key == query)
    return ((q + self.content_bias) * d**-0.5).permute(2, 0, 1, 3), hide(scores, seen)


# --- gated caches ---


def _branch(self: GatedBranch, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`GatedBranch.attend`."""
    if self.grc.branch == "linear":
        return _linear_everything(query, key, value, elu, None, 1e-6)
    return _softmax(self, query, key, value, None, False)


def _read_in_blocks(
    self: GatedCacheAttention,
    x: Tensor,
    own: Tensor | None,
    summary: Tensor,
    walked: CacheState | None,
    mask: Tensor | None,
) -> tuple[Tensor, CacheState]:
    """`GatedCacheAttention.read_in_blocks`, token by token: rows may be anywhere in their blocks."""
    start = self.contents()
    assert walked is not None

    def token(before: CacheState, inputs: tuple[Tensor, ...]) -> tuple[Tensor, CacheState]:
        new, *rest = inputs
        position = before.seen % self.block
        at = position[:, None] == torch.arange(self.block, device=position.device)
        cache = before.started(start).cache
        y = self.answer(rest[0], cache, *rest[1:])
        partial = torch.where(at[..., None], new, before.partial)
        done = position == self.block - 1

        def update(cache: Tensor, partial: Tensor, done: Tensor) -> Tensor:
            # The other rows are updated too, and that is dropped.
            after = self.update(partial, cache if self.grc.write else start)
            return torch.where(done[:, None, None], after, cache)

        cache = changed_if_any(done, update, cache, partial, done)
        return y, CacheState(cache, partial.masked_fill(done[:, None, None], 0), before.seen + 1)

    return token_by_token(token, walked, (summary.to(start.dtype), x, *([] if own is None else [own])))


# --- models ---


def _lstm(
    self: LSTM, x: Tensor, state: LSTMState | None = None, mask: Tensor | None = None
) -> tuple[Tensor, LSTMState]:
    """`LSTM.forward` in plain operators, which every format of graphs has."""
    assert state is not None

    def token(before: LSTMState, inputs: tuple[Tensor, ...]) -> tuple[Tensor, LSTMState]:
        y, states = inputs[0][:, 0], []
        for layer in range(self.config.layers):
            h, c = (part[:, layer].to(y.dtype) for part in before)
            w_y, w_h, b_y, b_h = self.lstm.all_weights[layer]
            i, f, g, o = (F.linear(y, w_y, b_y) + F.linear(h, w_h, b_h)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            y = torch.sigmoid(o) * torch.tanh(c)
            states.append((y, c))
        return y[:, None], LSTMState(*(torch.stack(part, 1) for part in zip(*states, strict=True)))

    y, after = token_by_token(token, state, [self.embedding(x)])
    return self.head(y), after


def _segments_read(
    self: SegmentModel, x: Tensor, state: SegmentState | None, mask: Tensor | None
) -> tuple[Tensor, SegmentState]:
    """`SegmentModel.read` after a state of `pad_to_capacity`: rows may be anywhere in their segments."""
    front, length = self.front, self.config.segment
    assert state is not None

    def read_front(caches: tuple[SegmentCache, ...], memory: State, rows: Tensor) -> tuple[SegmentCache, ...]:
        fronts = tuple(cache.others for cache in caches)
        new = map_state(
            lambda old, x: torch.where(rows[:, None, None, None], x, old), fronts, self.read_front(fronts, memory)
        )
        return tuple(cache._replace(others=front) for cache, front in zip(caches, new, strict=True))

    def token(before: SegmentState, inputs: tuple[Tensor, ...]) -> tuple[Tensor, SegmentState]:
        (x,), (seen, memory, caches) = inputs, before
        position = seen % length
        begins, ends = position == 0, position == length - 1
        if front:
            caches = changed_if_any(begins, read_front, caches, memory, begins)
        layout = Layout(0, 1, 0)
        y, new, _ = self.run_blocks(self.embedding(x), layout, front + position, None, caches, memory)
        caches = tuple(with_pass(cache, one, layout) for cache, one in zip(caches, new, strict=True))
        if self.back:
            memory = changed_if_any(ends, self.read_back, memory, caches, ends)
        caches = tuple(cache._replace(own=_after(cache.own, ends)) for cache in caches)
        return y, SegmentState(seen + 1, memory, caches)

    return token_by_token(token, state, [x])


def _segments_positions(self: SegmentModel, like: Tensor) -> Tensor:
    """`SegmentModel.table`. A loop of a graph takes no tensor that is neither a weight nor computed."""
    if self.positions is not None:
        return self.positions.weight
    c, length = self.config, self.front + self.config.segment + self.back
    if c.position == "rotary":
        return _Cosines().turns(length, c.dim // c.num_heads, None, like.device)[0].to(like.dtype)
    return sinusoids(torch.arange(length, device=like.device), c.dim).to(like.dtype)


def _memformer(
    self: Memformer, x: Tensor, state: MemformerState | None = None, mask: Tensor | None = None
) -> tuple[Tensor, MemformerState]:
    """`Memformer.forward` after a state of `pad_to_capacity`: rows may be anywhere in their segments."""
    assert state is not None
    length = self.config.segment

    def sources(caches: tuple[SegmentCache, ...], read: Read) -> tuple[SegmentCache, ...]:
        # For rows within a segment the result is the same again.
        pairs = zip(self.decoder.blocks, caches, strict=True)
        return tuple(cache._replace(others=block.keys_values(read.sources)) for block, cache in pairs)

    def write(past: Past, segment: Tensor, ends: Tensor) -> Past:
        # The segments of the other rows are written too, and that is dropped.
        def choose(old: Tensor, x: Tensor) -> Tensor:
            return torch.where(ends.view(-1, *[1] * (x.dim() - 1)), x.to(old.dtype), old)

        after: Past = map_state(choose, past, self.write(past, segment))
        return after

    def token(before: MemformerState, inputs: tuple[Tensor, ...]) -> tuple[Tensor, MemformerState]:
        (x,), position = inputs, before.seen % length
        begins, ends, new = position == 0, position == length - 1, before.seen == 0

        # --- what the segment before left: its encoded tokens and the memory ---
        encoded, valid = changed_if_any(
            new, lambda past, new: self.encode_start(past[0], past[1], new), (before.encoded, before.valid), new
        )
        read = Read(encoded, valid, self.slots(before.memory) if self.decoder.memory else None)
        caches = changed_if_any(begins, sources, before.layers, read)

        # --- the token ---
        y, caches = self.decoder(self.embedding(x), None, position, read, caches)

        # --- the end of a segment, which is written into the memory ---
        at = position[:, None] == torch.arange(length, device=x.device)
        segment = torch.where(at, x, before.pending)
        encoded, valid, memory = changed_if_any(ends, write, (encoded, valid, before.memory), segment, ends)
        tokens, marks = segment.masked_fill(ends[:, None], 0), (before.pending_valid | at) & ~ends[:, None]
        layers = tuple(cache._replace(own=_after(cache.own, ends)) for cache in caches)
        return y, MemformerState(before.seen + 1, memory, encoded, valid, tokens, marks, layers)

    y, after = token_by_token(token, state, [x])
    return self.head(y), after


def _after(own: KeyValues, ends: Tensor) -> KeyValues:
    """Keys with one token more than they may keep, without the oldest; empty in the rows [B] that are True."""
    valid, seen = own.valid[:, 1:] & ~ends[:, None], own.seen.masked_fill(ends, 0)
    return KeyValues(own.k[:, 1:], own.v[:, 1:], valid, seen)


FORMS: dict[type[nn.Module], dict[str, Callable[..., Any]]] = {
    CrossAttention: {"attend": _softmax},
    GatedBranch: {"attend": _branch},
    GatedCacheAttention: {"read_in_blocks": _read_in_blocks},
    LearnedPositions: {"forward": _add_positions},
    LSTM: {"forward": _lstm},
    Memformer: {"forward": _memformer},
    RelativeHeads: {"read": _relative_read},
    SegmentAttention: {"attend": _softmax},
    SegmentModel: {"read": _segments_read, "table": _segments_positions},
    SoftmaxAttention: {"attend": _softmax},
}
# The method of a layer that has a form of each name, which it gets first. More names: methods that the form leaves out.
FORMS_OF_BOTH: dict[type[nn.Module], tuple[tuple[str, ...], Callable[..., Any]]] = {
    LinearAttention: (("compute_heads", "attend"), _linear_heads),
    RecurrentAttention: (("recur",), _recur),
    ShortConvolution: (("forward",), _convolve),
}
