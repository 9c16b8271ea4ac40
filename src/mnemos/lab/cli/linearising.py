"""The command that makes a trained decoder an RNN: `mnemos linearise`."""

from pathlib import Path

from tyro.conf import OmitArgPrefixes

from mnemos.errors import say
from mnemos.lab.linearised.settings import LinearisedConfig


def linearise(
    model: str,
    *,
    text: tuple[Path, ...],
    out: Path,
    test: tuple[Path, ...] = (),
    teacher: Path | None = None,
    trust_remote_code: bool = False,
    settings: OmitArgPrefixes[LinearisedConfig] = LinearisedConfig(),  # noqa: B008 - it is frozen
) -> int:
    """Give a trained decoder of Transformers a state of constant size, and train what is new in two stages.

    The same command continues a training that was interrupted, and one with more --tokens goes on.

    Args:
        model: a decoder of Transformers with its tokenizer: a folder of save_pretrained, or hf:NAME of the hub
        text: files or folders to train on
        out: the run's folder; RUN/model: the result
        test: files that are measured afterwards, each of at least 16,384 tokens
        teacher: where the predictions of the decoder itself are kept, for several runs (RUN/teacher)
        trust_remote_code: run the Python code that the model brings, which can do whatever you can
    """
    from mnemos.lab.linearised.train import train_folder

    result = train_folder(model, text, settings, out, teacher=teacher, test=test, trust_remote_code=trust_remote_code)
    for name, stage in result["stages"].items():
        said = f"{stage['updates']} updates, {stage['tokens']:,} tokens, {stage['seconds']:.0f} s"
        say(f"{name.replace('_', ' ')}: {said}")
    for name, measured in result.get("test", {}).items():
        ranges = (f"{at} {one['perplexity']:.2f}" for at, one in measured["positions"].items())
        say(f"{name}: perplexity at positions {', '.join(ranges)}; {measured['bits_per_byte']:.3f} bits per byte")
        if "recall" not in measured:  # see `plan_assessment`
            say("  told facts were not asked for: too few positions, or places that begin with the same token")
            continue
        told = (f"{one['distance']:,}: {sum(one['choice'])}" for one in measured["recall"]["distances"])
        say(f"  of {measured['recall']['rows']} told facts chosen among ten, by tokens since: {', '.join(told)}")
    say(f"{out / 'model'}: the decoder; mnemos chat and mnemos.hosts.from_pretrained load it")
    return 0
