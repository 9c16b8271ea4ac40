"""The command that makes a trained decoder an RNN: `mnemos linearise`."""

import inspect
from argparse import BooleanOptionalAction
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin

from mnemos.errors import say

from .parsers import SOURCE, TRUST, CommandParser


def linearise(arguments: list[str]) -> int:
    """Linearise a decoder, train what is new, measure it and save it."""
    about = "Give a trained decoder of Transformers a state of constant size, and train what is new in two stages. "
    about += "The same command continues a training that was interrupted, and one with more --tokens goes on."
    parser = CommandParser("linearise", about)
    parser.add_argument("model", metavar="FOLDER", help=SOURCE)
    parser.add_argument(
        "--text", nargs="+", type=Path, required=True, metavar="PATH", help="files or folders to train on"
    )
    parser.add_argument(
        "--test",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="files that are measured afterwards, each of at least 16,384 tokens",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="RUN", help="the run's folder; RUN/model: the result"
    )
    about = "where the predictions of the decoder itself are kept, for several runs (RUN/teacher)"
    parser.add_argument("--teacher", type=Path, metavar="DIR", help=about)
    parser.add_argument("--trust-remote-code", action="store_true", help=TRUST)
    from mnemos.lab.linearised.settings import LinearisedConfig

    meanings = _meanings(LinearisedConfig)
    for one in fields(LinearisedConfig):
        about = f"{meanings[one.name]} (%(default)s)"
        option = f"--{one.name.replace('_', '-')}"
        if isinstance(one.default, bool):
            parser.add_argument(option, action=BooleanOptionalAction, default=one.default, help=about)
        elif get_origin(one.type) is Literal:
            parser.add_argument(option, choices=get_args(one.type), default=one.default, help=about)
        else:
            metavar = "X" if isinstance(one.default, float) else "N"
            parser.add_argument(option, type=type(one.default), default=one.default, metavar=metavar, help=about)
    options = parser.parse_args(arguments)

    settings = LinearisedConfig(**{one.name: getattr(options, one.name) for one in fields(LinearisedConfig)})
    from mnemos.lab.linearised.train import train_folder

    more = {"teacher": options.teacher, "test": options.test or (), "trust_remote_code": options.trust_remote_code}
    found = train_folder(options.model, options.text, settings, options.out, **more)
    for name, stage in found["stages"].items():
        said = f"{stage['updates']} updates, {stage['tokens']:,} tokens, {stage['seconds']:.0f} s"
        say(f"{name.replace('_', ' ')}: {said}")
    for name, measured in found.get("test", {}).items():
        ranges = (f"{at} {one['perplexity']:.2f}" for at, one in measured["positions"].items())
        say(f"{name}: perplexity at positions {', '.join(ranges)}; {measured['bits_per_byte']:.3f} bits per byte")
        if "recall" not in measured:  # see `plan_assessment`
            say("  told facts were not asked for: too few positions, or places that begin with the same token")
            continue
        told = (f"{one['distance']:,}: {sum(one['choice'])}" for one in measured["recall"]["distances"])
        say(f"  of {measured['recall']['rows']} told facts chosen among ten, by tokens since: {', '.join(told)}")
    say(f"{options.out / 'model'}: the decoder; mnemos chat and mnemos.hosts.from_pretrained load it")
    return 0


def _meanings(config: type) -> dict[str, str]:
    """The meanings of a configuration's fields, from "Attributes:" of its docstring; "" with -OO."""
    found = dict.fromkeys((one.name for one in fields(config)), "")
    _, _, lines = (inspect.getdoc(config) or "").partition("\nAttributes:\n")
    for line in inspect.cleandoc(lines).replace("\n    ", " ").splitlines():  # a line for each field
        name, _, meaning = line.partition(": ")
        found[name] = meaning.removesuffix(".")
    return found
