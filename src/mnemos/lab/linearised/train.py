"""From a decoder and texts to a linearised decoder: `mnemos linearise`. Each of two stages is a run of `lab/run`.

    RUN/linearised.json        settings, model and text     RUN/transfer, RUN/next_token   the run of each stage
        adapter.safetensors    the new parameters               teacher                    the decoder's predictions
        result.json            both stages                      model                      the decoder

The rate falls in the last `decay` of a stage's updates. The checkpoint before the fall is kept: a folder that is opened
again with more `tokens` goes on from it, as if they had been the setting from the start.
"""

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import mnemos
from mnemos import generators
from mnemos.atomic import check_output_folder, write_json
from mnemos.errors import say
from mnemos.hosts.linearise import RECORD, name_heads
from mnemos.hosts.linearised_file import save_adapter
from mnemos.lab.errors import Interrupted, TrainingFailed
from mnemos.lab.hosted.hub import HF, check_folder, read_config, read_decoder, read_tokenizer
from mnemos.lab.run import checkpoint
from mnemos.lab.run.files import Measurement, read_object
from mnemos.lab.run.fit import OwnData, OwnModel
from mnemos.lab.run.progress import clock, progress
from mnemos.lab.run.recipe import OptimConfig, Recipe, ScheduleConfig, TrainConfig, as_json, differing
from mnemos.lab.run.run import Run
from mnemos.types import InputError, JSONObject

from .assess import assess, plan_assessment
from .ranked import choose_full
from .settings import LinearisedConfig
from .stages import AttentionTransfer, NextToken, Parameters, Teacher
from .text_batches import Pieces, read_texts

Stage = Literal["transfer", "next_token"]
SETTINGS, ADAPTER, ASSESSED = "linearised.json", "adapter.safetensors", "assessed.json"
_PER_HEAD = ("log_gamma", "rate")  # parameters of one number a head, which move farther than feature maps
_FASTER = 10.0  # their learning rate, in units of that of feature maps
_NAMES = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")  # of a configuration
_NEVER = 2**62  # updates between two evaluations: there is one at the end


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
    # --- whatever may be refused, before anything takes long ---
    model = str(model)
    check_folder(model)
    check_settings(out, settings)
    _say(f"reading the text of {', '.join(map(str, text))}")
    texts, tests = read_texts(text), read_texts(test)
    _say(f"loading {model}")
    config = read_config(model, trust_remote_code)
    if hasattr(config, RECORD) or hasattr(config, "mnemos"):
        what = "that is linearised" if hasattr(config, RECORD) else "with gated caches"
        raise InputError(f"{model}: expected a decoder without a memory, found one {what}; name its original")
    tokenizer = read_tokenizer(model, trust_remote_code)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    plans = {name: plan_assessment(tokenizer, one, positions, f"--test {name}") for name, one in tests.items()}
    decoder: Any = read_decoder(model, trust_remote_code, dtype=torch.float32)
    _say(f"cutting {sum(map(len, texts.values())):,} characters into tokens")

    # --- training, and the decoder in a folder of its own ---
    about: JSONObject = {"name": Path(model.removeprefix(HF)).name}
    training = Training(decoder, tokenizer, texts, settings, out, teacher=teacher, about=about)
    result = training.run()
    if training.low_rank:
        mnemos.hosts.merge_updates(decoder)
    decoder.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")

    # --- measurements ---
    if test:
        _say(f"measuring on {', '.join(tests)}")
        measured = {}
        with progress(False, out.name, 0, 0) as display:
            for name, one in tests.items():
                measured[name] = assess(decoder, tokenizer, one, display=display, name=name, **plans[name])
        write_json(out / ASSESSED, measured)
        result |= {"test": measured}
    return result


class Training:
    """A decoder that is linearised here and trained in a folder; see the module for what it does.

    decoder: a causal decoder of Transformers, not linearised; its weights are frozen. texts: {name: text} to train on.
    teacher: the folder of the teacher's predictions, by default in `folder`. about: what is written with both, beside
    the SHA-256 of the model and the text. Raises InputError if the folder has a training with other settings, of
    another model or text, or of more tokens, and for settings that the model does not allow.
    """

    def __init__(
        self,
        decoder: Any,
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

        # --- settings, decoder and text fit together, and to what the folder has ---
        config = decoder.config.get_text_config()
        limits = [("context", getattr(config, "max_position_embeddings", None) or settings.context, "positions")]
        limits += [("top", config.vocab_size, "tokens of the vocabulary")] if settings.loss == "distil" else []
        for name, most, of in limits:
            if (value := getattr(settings, name)) > most:
                raise InputError(
                    f"{name}: expected at most the {most:,} {of} of the decoder, found {value:,}; lower it"
                )
        self.about: JSONObject = {
            **(about or {}),
            "text": self.pieces.sha256,
            "names": sorted(texts),
            "model": _sha256(decoder),
        }
        check_settings(folder, settings, self.about)
        done = _updates_done(folder / "next_token")
        if done > self.updates("next_token"):
            raise InputError(
                f"{folder}: expected at least the {done * settings.length * settings.rows:,} tokens of the run so far, "
                f"found {settings.tokens:,}; raise tokens"
            )

        # --- the decoder and what is trained of it ---
        self.decoder = decoder.eval().requires_grad_(False)
        torch.manual_seed(settings.seed)
        self.full = settings.full
        if (count := settings.full_count) is not None:
            self.full = choose_full(decoder, self.pieces, settings, self.about, folder, quiet) if count else ()
        self.report = mnemos.linearise(decoder, **settings.arguments, full=self.full or None)
        if not quiet and settings.full and settings.full_count is None:
            heads = [name_heads(one.name, one.full_heads) for one in self.report.changed if one.full_heads]
            _say(f"left whole: {', '.join([*(one.name for one in self.report.left), *heads])}")
        self.maps, self.low_rank = dict(self.report.maps), dict(self.report.updates)
        self.step: Any = mnemos.functional(decoder)
        self.teacher = None
        if settings.loss == "distil":
            known = {"context": settings.context, **self.about}
            self.teacher = Teacher(decoder, teacher or folder / "teacher", settings.top, known)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / SETTINGS, {"settings": asdict(settings), "model": self.about, "full": self.full})

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return self.maps | self.low_rank

    def updates(self, stage: Stage) -> int:
        """The updates of a stage: of whole groups of pieces."""
        settings, first = self.settings, stage == "transfer"
        tokens = settings.transfer_tokens if first else settings.tokens
        length = settings.transfer_length if first else settings.length
        return -(-tokens // (settings.context * settings.rows)) * (settings.context // length)

    def run(self) -> JSONObject:
        """Train both stages, write result.json and the trained parameters, and return the result.

        Raises Interrupted after SIGINT or SIGTERM, with a checkpoint, and TrainingFailed for a loss that is no number.
        """
        stages: list[Stage] = []
        if self.maps and self.settings.transfer_tokens:
            stages.append("transfer")
        if self.settings.tokens and self.trained:
            stages.append("next_token")
        if not self.quiet:
            self._say_how_long(stages)
        done: JSONObject = {}
        for stage in stages:
            # --- from the newest checkpoint of the stage's folder on ---
            folder = self.folder / stage
            recipe, task, parameters = self.stage(stage)
            steps, resume = recipe.train.steps, (folder / "recipe.json").is_file()
            longer = resume and read_object(folder / "recipe.json", {"train": dict})["train"].get("steps") != steps
            try:
                extended = steps if longer else None
                run = Run.open(recipe, folder, resume, steps=extended, task=task, model=parameters, quiet=self.quiet)
                trained = run.train(count_flops=False)
            except Interrupted:
                at = _updates_done(folder)
                raise Interrupted(f"interrupted; the same command continues from update {at} of {steps}") from None
            except TrainingFailed as error:
                problem = str(error).replace("lower optim.lr or lower optim.grad_clip", "lower the rates")
                raise TrainingFailed(problem) from None

            # --- what result.json has of it ---
            losses = [line.values["loss"] for line in Measurement.read_all(folder) if line.kind == "train"]
            done[stage] = {
                "updates": trained.steps,
                "tokens": trained.tokens,
                "seconds": trained.seconds,
                "last_loss": losses[-1],
                "held_out_loss": trained.valid["loss"],
                "peak_bytes": trained.peak_bytes,
            }
        save_adapter(self.decoder, self.folder / ADAPTER, self.about)
        count = {"maps": self.maps, "updates": self.low_rank}
        sizes = {name: sum(value.numel() for value in parameters.values()) for name, parameters in count.items()}
        result = {"settings": asdict(self.settings), "stages": done, "parameters": sizes}
        write_json(self.folder / "result.json", result)
        return result

    def stage(self, stage: Stage) -> tuple[Recipe, AttentionTransfer | NextToken, Parameters]:
        """A stage as a recipe of the laboratory's loop, with its task and what it trains."""
        settings, first = self.settings, stage == "transfer"
        task: AttentionTransfer | NextToken
        if first:
            changed = {one.name: self.decoder.get_submodule(one.name) for one in self.report.changed}
            task = AttentionTransfer(self.pieces, settings.transfer_length, self.decoder, changed)
        else:
            task = NextToken(self.pieces, settings.length, self.step, self.teacher)

        # --- what is trained, and how fast ---
        map_rate = settings.transfer_rate if first else settings.map_rate
        rates = {name: map_rate * (_FASTER if name.endswith(_PER_HEAD) else 1.0) for name in self.maps}
        rates |= {} if first else dict.fromkeys(self.low_rank, settings.rate)
        for name, value in self.trained.items():
            value.requires_grad_(name in rates)
        parameters = Parameters({name: self.trained[name] for name in rates}, rates, rate := max(rates.values()))
        # The transfer's loss is a mean over attentions; each is trained as if its own were the loss.
        share = 1 / len(self.report.changed) if first else 1.0

        recipe = Recipe(
            name=f"{stage.replace('_', ' ')} of {self.folder.name}",
            about=f"stage of mnemos linearise in {self.folder.name}",
            model=OwnModel("linearised decoder", sum(value.numel() for value in parameters.values())),
            data=OwnData(train=f"pieces {self.pieces.sha256}"),
            optim=OptimConfig(
                lr=rate,
                betas=(0.9, 0.99),
                eps=1e-8 * share,
                weight_decay=0.0,
                grad_clip=share,
                schedule=ScheduleConfig("trapezoid", warmup=8, fall=settings.decay),
            ),
            train=TrainConfig(
                steps=self.updates(stage),
                batch_size=settings.rows,
                seed=settings.seed,
                log_every=task.parts,
                checkpoint_every=task.parts,
                eval_every=_NEVER,
                keep=1,
                accelerator="cpu",
                precision=settings.precision,
            ),
        )
        return recipe, task, parameters

    def _say_how_long(self, stages: Sequence[Stage]) -> None:
        """Say how long each stage will take, and both: an update of each is timed, and undone."""
        every: list[float] = []
        for stage in stages:
            recipe, task, parameters = self.stage(stage)
            rows, done = recipe.train.batch_size, _updates_done(self.folder / stage)
            left = recipe.train.steps - done
            if left <= 0:
                continue

            # --- the teacher's predictions of a piece that it has not kept ---
            predicting, about = 0.0, ""
            if isinstance(task, NextToken) and self.teacher is not None:
                groups = range(done // task.parts, recipe.train.steps // task.parts)
                numbers = {number for group in groups for number in self.pieces.group(group, rows)}
                if unseen := [number for number in numbers if not self.teacher.path(number).is_file()]:
                    began = time.perf_counter()
                    self.teacher.predictions(unseen[:1], self.pieces.ids[unseen[:1]])
                    predicting = (time.perf_counter() - began) * len(unseen)
                    about = f", {clock(predicting)} of it for what the decoder itself predicts"

            # --- forward and backward of an update ---
            with generators.preserve():
                batch = task.train_batch(0, rows, recipe.train.seed)
                began = time.perf_counter()
                with torch.autocast("cpu", torch.bfloat16, enabled=recipe.train.precision == "bf16-mixed"):
                    task.loss(parameters, task.forward(parameters, batch, None)[0], batch).backward()
                seconds = time.perf_counter() - began
            for value in parameters.values():
                value.grad = None
            every.append(seconds * left + predicting)
            whole = clock(every[-1])
            _say(f"{stage.replace('_', ' ')}: {left:,} updates of {task.max_length:,} tokens, about {whole}{about}")
        if len(every) > 1:
            _say(f"about {clock(sum(every))} in all, without the measurements after it")


def _updates_done(folder: Path) -> int:
    return next(iter(checkpoint.steps(folder / "checkpoints")), 0)


def check_settings(folder: Path, settings: LinearisedConfig, about: JSONObject | None = None) -> None:
    """Raise InputError if a folder has a training with other settings than these; `tokens` may differ.

    about: the model and text of the training, where they are known already.
    """
    check_output_folder(folder)
    if not (folder / SETTINGS).is_file():
        return
    before = read_object(folder / SETTINGS, {"settings": dict, "model": dict})
    own = {
        "settings": asdict(settings) | {"tokens": before["settings"].get("tokens")},
        "model": about or before["model"],
    }
    own |= {"full": before.get("full")}
    if other := differing(before, as_json(own)):
        raise InputError(
            f"{folder}: the training has another {other}; set it to that of the folder, or name another folder"
        )


def _sha256(decoder: Any) -> str:
    """The SHA-256 of a model's configuration, but for names and versions, and of its weights with their names."""
    config = {name: value for name, value in decoder.config.to_diff_dict().items() if name not in _NAMES}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, value in sorted(decoder.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _say(text: str) -> None:
    """A line that tells what begins, on standard error, as those of the progress in a log."""
    say(text, file=sys.stderr, flush=True)
