"""The training of a linearised decoder: attention transfer, then low-rank updates and feature maps together.

    training = Training(model, tokenizer, settings, folder)
    training.run()                     # both stages, from the newest checkpoint on; the model is trained in place

**Stage 1, attention transfer.** The frozen model reads a row of text once. Each of its attentions gives its inputs and
its output, and the linearised attention reads the same inputs: the loss of a layer is ‖y − y*‖²/‖y*‖² of the outputs
after the output projection. No gradient passes between layers. Feature maps, γ and β are trained.

**Stage 2.** Low-rank updates and, at a lower rate, feature maps are trained on the next token: by distillation, KL from
the distribution of the model before it was linearised (`pieces.divergence`), or by the labels. A piece of `context`
tokens is read in updates of `length` tokens. The state goes on from update to update without gradient, and inside an
update the gradient passes through the state. There is no recomputation of the forward, so an update needs the
activations of `length` tokens.

**The rate** rises in the first 8 updates of a stage, is constant, and falls to 0 in a straight line in the last
`decay` of the updates. The checkpoint before the fall is kept: a folder that is opened again with more `tokens` goes on
from it, as if they had been the setting from the start.

**Resume is exact.** A checkpoint is written between groups of pieces, where there is no state. A training that was
killed and started again with the same command gives the same weights bit for bit, on the same machine and versions.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mnemos
from mnemos.atomic import append, open_to_append, write_json
from mnemos.errors import say
from mnemos.hosts.linearise import RECORD
from mnemos.lab.errors import Interrupted, TrainingFailed
from mnemos.lab.hosted.hub import HF, check_folder, read_config, read_decoder, read_tokenizer
from mnemos.lab.run import checkpoint
from mnemos.lab.run.devices import peak_bytes
from mnemos.lab.run.files import Measurement, Provenance, read_object
from mnemos.lab.run.progress import progress
from mnemos.lab.run.provenance import command_line, now, provenance, source
from mnemos.lab.run.stopping import StopSignals
from mnemos.ops import dense_layer
from mnemos.types import InputError, JSONObject

from .assess import assess, plan_assessment
from .original import calls_of_original
from .pieces import Pieces, Teacher, divergence, groups, read_texts
from .settings import LinearisedConfig

VERSION = 2  # of a training: 1 had a lower learning rate of β, and a setting fit_tokens
SETTINGS, TRAINED, ASSESSED = "linearised.json", "trained.safetensors", "assessed.json"
_WARMUP, _CLIP = 8, 1.0
_PER_HEAD = ("log_gamma", "rate")  # parameters of one number a head, which move farther than feature maps
_FASTER = 10.0  # their learning rate, in units of that of feature maps
_NAMES = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")  # of a configuration
_SAVED = 20.0  # seconds of training between two checkpoints, at least


class Training:
    """A decoder that is linearised here and trained in a folder; see the module for what it does.

    model: a causal decoder of Transformers, not linearised; its weights are frozen. texts: {name: text} to train on.
    teacher: the folder of the teacher's predictions, by default in `folder`. about: what is kept with both, beside the
    SHA-256 of the model and the text. Raises InputError if the folder has a training with other settings, of another
    model or text, or of more tokens, and for settings that the model does not allow.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        texts: dict[str, str],
        settings: LinearisedConfig,
        folder: Path,
        *,
        teacher: Path | None = None,
        about: JSONObject | None = None,
        quiet: bool = False,
    ) -> None:
        self.settings, self.folder, self.quiet = settings, folder, quiet
        self.pieces = Pieces(tokenizer, texts, settings.context, settings.seed)
        _check(settings, model.config.get_text_config())
        self.about: JSONObject = {**(about or {}), "text": self.pieces.sha256, "names": sorted(texts)}
        self.about["model"] = _sha256(model)
        check_settings(folder, settings)
        self._check_folder()
        self.model = model.eval().requires_grad_(False)
        torch.manual_seed(settings.seed)
        self.report = mnemos.linearise(model, **settings.arguments)
        self.maps, self.updates = dict(self.report.maps), dict(self.report.updates)
        self.trained: dict[str, nn.Parameter] = self.maps | self.updates
        self.step = mnemos.functional(model)
        self.teacher = None
        if settings.loss == "distil":
            about = {"context": settings.context, **self.about}
            self.teacher = Teacher(model, teacher or folder / "teacher", settings.top, about)
        self._open()

    def run(self) -> JSONObject:
        """Train both stages, write result.json and the trained parameters, and return the result.

        Raises Interrupted after SIGINT or SIGTERM, with a checkpoint, and TrainingFailed for a loss that is no number.
        """
        done: JSONObject = {}
        dense = dense_layer.using(dense_layer.Choice.from_json(Provenance.read(self.folder).dense))
        with dense, StopSignals() as signals:
            if self.maps and self.settings.transfer_tokens:
                done["transfer"] = _Stage(self, "transfer", signals).run()
            if self.settings.tokens and self.trained:
                done["next_token"] = _Stage(self, "next_token", signals).run()
        checkpoint.write(self.folder / TRAINED, {name: value.detach() for name, value in self.trained.items()})
        result = {
            "settings": asdict(self.settings),
            "stages": done,
            "parameters": {"maps": _count(self.maps), "updates": _count(self.updates)},
        }
        write_json(self.folder / "result.json", result)
        write_json(self.folder / Provenance.FILE, read_object(self.folder / Provenance.FILE) | {"finished": now()})
        return result

    def _check_folder(self) -> None:
        """Raise InputError if the folder has a training of another model or text, or of more tokens."""
        if not (self.folder / SETTINGS).is_file():
            return
        if _read_settings(self.folder)["model"] != self.about:
            raise InputError(
                f"{self.folder}: expected a training of this model and text, found one of others; name another folder"
            )
        found, each = checkpoint.newest(self.folder / "next_token"), self.settings.context * self.settings.rows
        if found is not None and -(-self.settings.tokens // each) < (groups := found[1]["groups"]):
            raise InputError(
                f"{self.folder}: expected at least the {groups * each:,} tokens of the run so far, found "
                f"{self.settings.tokens:,}; raise tokens"
            )

    def _open(self) -> None:
        """Make the folder, or note that its training is continued."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path, new = self.folder / SETTINGS, not (self.folder / SETTINGS).is_file()
        write_json(path, {"version": VERSION, "settings": asdict(self.settings), "model": self.about})
        if new:
            made = provenance(self.settings.seed, "cpu")
            Provenance(**made).write(self.folder)
            return
        about = read_object(self.folder / Provenance.FILE)
        entry = {"at": now(), **source(), "command": command_line()}
        write_json(self.folder / Provenance.FILE, about | {"resumed": [*about.get("resumed", []), entry]})


class _Stage:
    """One of the two stages: its parameters, its optimiser and its place in the text."""

    def __init__(self, training: Training, name: Literal["transfer", "next_token"], signals: StopSignals) -> None:
        self.training, self.name, self.signals = training, name, signals
        settings = training.settings
        first = name == "transfer"
        tokens = settings.transfer_tokens if first else settings.tokens
        self.groups = -(-tokens // (settings.context * settings.rows))
        self.length = settings.transfer_length if first else settings.length
        self.each = settings.context // self.length  # updates of a group
        self.updates = self.groups * self.each
        self.falls = self._last_at_whole_rate(self.groups)
        self.parameters = training.maps if first else training.trained
        rate = settings.transfer_rate if first else settings.map_rate
        split: dict[float, list[nn.Parameter]] = {rate: [], _FASTER * rate: []}
        for parameter_name, value in training.maps.items():
            split[_FASTER * rate if parameter_name.endswith(_PER_HEAD) else rate].append(value)
        rates = [(settings.rate, [] if first else list(training.updates.values())), *split.items()]
        sets: list[JSONObject] = [{"params": values, "rate": one} for one, values in rates if values]
        self.optimizer = torch.optim.AdamW(sets, weight_decay=0.0, betas=(0.9, 0.99), foreach=True)
        self.folder = training.folder / name
        self.group, self.seconds, self.last, self.peak = 0, 0.0, 0.0, 0
        self.saved = 0  # the group at which the newest checkpoint begins

    def run(self) -> JSONObject:
        """Train from the newest checkpoint on; with more groups than before, from the one before the rate fell."""
        self.folder.mkdir(exist_ok=True)
        self._load()
        if not self.training.quiet and self.group < self.groups:
            _say(f"{self.name.replace('_', ' ')}: {self.updates} updates of {self.length} tokens")
        settings, kept = self.training.settings, self.falls // self.each  # whole groups before the rate falls
        for values in self.training.trained.values():
            values.requires_grad_(False)
        for values in self.parameters.values():
            values.requires_grad_(True)
        saved = time.monotonic()
        named = f"{self.name.replace('_', ' ')} of {self.training.folder.name}"
        with progress(self.training.quiet, named, self.updates, self.group * self.each) as display:
            for numbers, ids in groups(self.training.pieces, settings.rows, self.group, self.groups):
                began = time.monotonic()
                losses = []
                for update, loss in enumerate(self._losses(numbers, ids), 1 + self.group * self.each):
                    losses.append(loss)
                    rate = self._update(update)
                    display.updated(update, {"loss": loss, "lr": rate}, _peak)
                    if self.signals.asked and len(losses) < self.each and self.saved == self.group:
                        self._end()  # the checkpoint is that of this group's beginning
                self.seconds += time.monotonic() - began
                self.group, self.last = self.group + 1, sum(losses) / len(losses)
                step = self.group * self.each
                line = Measurement(self.name, step, {"loss": self.last, "seconds": self.seconds, "tokens": self.tokens})
                with open_to_append(self.training.folder / Measurement.FILE) as file:
                    append(file.fileno(), line.to_line().encode())
                if self.group == kept:
                    checkpoint.write(self.folder / f"constant-{self.group:06d}.safetensors", self._state())
                over = self.group == self.groups or self.signals.asked
                if over or time.monotonic() - saved > _SAVED:
                    self._keep_checkpoint(step)
                    saved = time.monotonic()
                if self.signals.asked:
                    self._end()
        self.peak = max(self.peak, _peak())
        done = {"updates": self.updates, "tokens": self.tokens, "seconds": self.seconds, "last_loss": self.last}
        return done | {"peak_bytes": self.peak}

    def _end(self) -> NoReturn:
        """Raise Interrupted after a signal, where the newest checkpoint is one of `self.group` groups."""
        step = self.group * self.each
        raise Interrupted(f"interrupted; the same command continues from update {step} of {self.updates}")

    @property
    def tokens(self) -> int:
        """Tokens read so far."""
        return self.group * self.training.settings.context * self.training.settings.rows

    def _losses(self, numbers: list[int], ids: Tensor) -> Iterator[float]:
        """The loss of each update of a group, with its gradients in the parameters."""
        model = self.training.model
        parts = ids.split(self.length, 1)
        if self.name == "transfer":
            changed = {one.name: model.get_submodule(one.name) for one in self.training.report.changed}
            for part in parts:
                yield transfer_gradients(model, changed, part)
            return
        known = self.training.teacher.of(numbers, ids) if self.training.teacher is not None else None
        state = None
        for i, part in enumerate(parts):
            here = slice(i * self.length, (i + 1) * self.length)
            logits, state = self.training.step(part, state)
            if known is not None:
                loss = divergence(logits, *(values[:, here] for values in known)).mean()
            else:
                targets = F.pad(ids[:, 1:], (0, 1), value=-100)[:, here]
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            del logits
            loss.backward()
            state = mnemos.detach(state)
            yield loss.item()

    def _update(self, update: int) -> float:
        """Step the optimiser; returns the learning rate of the first group of parameters."""
        fall = max(self.updates - self.falls, 1)
        factor = min(1.0, update / _WARMUP, (self.updates - update + 1) / fall if update > self.falls else 1.0)
        for one in self.optimizer.param_groups:
            one["lr"] = one["rate"] * factor
        size = nn.utils.clip_grad_norm_(self.parameters.values(), _CLIP)
        if not bool(size.isfinite()):
            raise TrainingFailed(
                f"{self.training.folder}: the gradient of update {update} is not finite; lower the learning rate"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(self.optimizer.param_groups[0]["lr"])

    def _last_at_whole_rate(self, groups: int) -> int:
        """The last update before the rate falls in a training of so many groups."""
        updates = groups * self.each
        return updates - int(self.training.settings.decay * updates)

    def _state(self) -> JSONObject:
        return {
            "group": self.group,
            "groups": self.groups,
            "seconds": self.seconds,
            "last": self.last,
            "peak": max(self.peak, _peak()),
            **checkpoint.of_parameters(self.parameters, self.optimizer),
        }

    def _keep_checkpoint(self, step: int) -> None:
        checkpoint.write(checkpoint.path_of(self.folder, step), self._state())
        checkpoint.prune(self.folder, step, keep=1)
        self.saved = self.group

    def _load(self) -> None:
        """Continue: from the newest checkpoint, or, if the number of groups has grown, from one at the whole rate."""
        found = checkpoint.newest(self.folder)
        if found is None:
            return
        state = found[1]
        if state["groups"] != self.groups:
            whole = [checkpoint.read(path) for path in sorted(self.folder.glob("constant-*.safetensors"))]
            at_rate = [
                one for one in [*whole, state] if one["group"] * self.each <= self._last_at_whole_rate(one["groups"])
            ]
            if not at_rate:
                return
            state = max(at_rate, key=lambda one: one["group"])
        self.group, self.seconds, self.last = state["group"], state["seconds"], state["last"]
        self.peak, self.saved = state["peak"], self.group
        checkpoint.into_parameters(state, self.parameters, self.optimizer)


def transfer_gradients(model: Any, changed: dict[str, nn.Module], ids: Tensor, weights: Tensor | None = None) -> float:
    """Stage 1 on the rows `ids` [B, T]: adds the gradients of the sum of the layers' losses; returns their mean.

    weights [B, T]: of the tokens in the loss; None: all alike.

    Cost: one forward of the frozen model, and of each attention alone a forward and a backward without its projections'
    weights. Memory: the inputs and outputs of all attentions, and the activations of one.
    """
    seen = calls_of_original(model, changed, ids)
    total = 0.0
    for name, module in changed.items():
        given, named, wanted = seen.pop(name)
        found = module(*given, **named)[0]
        errors, sizes = ((found - wanted).square(), wanted.square())
        if weights is not None:
            errors, sizes = errors * weights[..., None], sizes * weights[..., None]
        loss = errors.sum() / sizes.sum()
        loss.backward()
        total += loss.item()
    return total / len(changed)


def check_settings(folder: Path, settings: LinearisedConfig) -> None:
    """Raise InputError if a folder has a training with other settings than these; `tokens` may differ."""
    if not (folder / SETTINGS).is_file():
        return
    before = _read_settings(folder)["settings"]
    here = asdict(settings)
    for name in {**here, **before}:
        if name != "tokens" and before.get(name) != here.get(name):
            raise InputError(
                f"{folder}: expected a training with {name} {here.get(name)!r}, found one with {before.get(name)!r}; "
                f"set {name} to that of the folder, or name another"
            )


def _check(settings: LinearisedConfig, config: Any) -> None:
    """Raise InputError for settings that a decoder with this configuration does not allow."""
    positions = getattr(config, "max_position_embeddings", None) or settings.context
    limits = [("context", positions, "positions")]
    if settings.loss == "distil":
        limits.append(("top", config.vocab_size, "tokens of the vocabulary"))
    for name, most, of in limits:
        if (value := getattr(settings, name)) > most:
            raise InputError(f"{name}: expected at most the {most:,} {of} of the decoder, found {value:,}; lower it")


def _read_settings(folder: Path) -> Any:
    """What a training's folder says of its settings, model and text; raises InputError for one of another version."""
    found = read_object(folder / SETTINGS)
    if (version := found.get("version", 1)) != VERSION:
        raise InputError(
            f"{folder}: expected a training of version {VERSION}, found one of version {version}, whose learning rates "
            "and settings differ; train again in another folder"
        )
    found["settings"].setdefault("half_life", 0)  # as trainings were before there was one
    return found


def _sha256(model: Any) -> str:
    """The SHA-256 of a model's configuration, but for names and versions, and of its weights with their names."""
    config = {name: value for name, value in model.config.to_diff_dict().items() if name not in _NAMES}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _say(text: str) -> None:
    """A line that tells what begins, on standard error, as those of the progress in a log."""
    say(text, file=sys.stderr, flush=True)


def _count(parameters: dict[str, nn.Parameter]) -> int:
    return sum(value.numel() for value in parameters.values())


_peak = partial(peak_bytes, torch.device("cpu"))


def load(model: Any, folder: Path) -> LinearisedConfig:
    """Linearise a decoder as the training in a folder did, with its trained parameters; returns the settings.

    Raises InputError for a folder of another version.
    """
    settings = LinearisedConfig(**_read_settings(folder)["settings"])
    report = mnemos.linearise(model.eval().requires_grad_(False), **settings.arguments)
    saved = checkpoint.read(folder / TRAINED)
    with torch.no_grad():
        for name, value in {**report.maps, **report.updates}.items():
            value.copy_(saved[name])
    return settings


def train_folder(
    model: str | Path,
    text: Sequence[Path],
    settings: LinearisedConfig,
    out: Path,
    teacher: Path | None = None,
    test: Sequence[Path] = (),
    trust_remote_code: bool = False,
) -> JSONObject:
    """Linearise and train the decoder of a folder, or hf:NAME of the hub: what `mnemos linearise` does.

    out: the run's folder, with result.json, the measurements on `test` in assessed.json, and the decoder in `model`,
    its low-rank updates added to its weights, which `mnemos.hosts.from_pretrained` loads. Returns both results. Raises
    InputError before the training for texts that are too short, and for a decoder that has caches or is linearised.
    """
    check_folder(str(model))
    check_settings(out, settings)
    if links := [path for path in (out / "model").glob("*") if path.is_symlink()]:
        raise InputError(f"{links[0]}: expected a file or a new name to write to, found a link; remove it")
    model = str(model)
    _say(f"reading the text of {', '.join(map(str, text))}")
    texts, tests = read_texts(text), read_texts(test)
    _say(f"loading {model}")
    config = read_config(model, trust_remote_code)
    for has, found in (
        (hasattr(config, RECORD), "one that is linearised"),
        (hasattr(config, "mnemos"), "one with gated caches"),
        (config.model_type.startswith("mnemos"), config.model_type),
    ):
        if has:
            raise InputError(f"{model}: expected a decoder without a memory, found {found}; name that it was made from")
    tokenizer = read_tokenizer(model, trust_remote_code)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    plans = {name: plan_assessment(tokenizer, one, positions, f"--test {name}") for name, one in tests.items()}
    decoder: Any = read_decoder(model, trust_remote_code, dtype=torch.float32)
    _say(f"cutting {sum(map(len, texts.values())):,} characters into tokens")
    about: JSONObject = {"name": Path(model.removeprefix(HF)).name}
    training = Training(decoder, tokenizer, texts, settings, out, teacher=teacher, about=about)
    result = training.run()
    if training.updates:
        mnemos.hosts.merge_updates(decoder)
    decoder.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    if test:
        _say(f"measuring on {', '.join(tests)}")
        measured = {}
        with progress(False, out.name, 0, 0) as display:
            for name, one in tests.items():
                measured[name] = assess(decoder, tokenizer, one, display=display, name=name, **plans[name])
        write_json(out / ASSESSED, measured)
        result |= {"test": measured}
    return result
