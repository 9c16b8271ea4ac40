"""`mnemos predict` for texts and recordings, and for tasks whose models read no files; for photos see test_photos.

Then `mnemos sample`: pictures, text and tokens of runs.
"""

import io
import json
import re
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refuses
from safetensors.numpy import load_file
from spoken_standins import tone, wav
from trained_runs import trained

import mnemos
from mnemos.errors import printable
from mnemos.lab.cli import main
from mnemos.lab.evaluate.predict import predict, read_preprocessing
from mnemos.lab.report import report
from mnemos.lab.run.trained import sample_run
from mnemos.lab.speech.audio import filterbanks, normalise
from mnemos.lab.speech.ctc import Transcriber
from mnemos.lab.tasks.task import Sampling


def continuation(model: torch.nn.Module, prompt: bytes, length: int) -> str:
    """The definition: the whole text again for each byte."""
    tokens = [0, *prompt]
    for _ in range(length):
        logits, _ = model(torch.tensor([tokens]))
        tokens.append(int(logits[0, -1].argmax()))
    return bytes(tokens[1 + len(prompt) :]).decode(errors="replace")


def test_a_language_model_continues_files_and_the_standard_input(
    text_run, tmp_path, monkeypatch, capsys, output, refused
):
    model = mnemos.load(text_run)
    prompts = {"a.txt": b"the cat sat on the mat, and then " * 3, "b.txt": b"dog"}
    for name, prompt in prompts.items():
        (tmp_path / name).write_bytes(prompt)
    wanted = [continuation(model, prompt, 7) for prompt in prompts.values()]
    assert [one.text for one in predict(text_run, [tmp_path], length=7)] == wanted
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(prompts["b.txt"])))
    assert output("predict", text_run, tmp_path / "a.txt", "-", "--length", "7") == printable(
        f"{tmp_path / 'a.txt'}: {wanted[0]}\n-: {wanted[1]}\n"
    )
    (tmp_path / "b.txt").write_bytes(b"")
    assert "--top: expected --length for a model of text" in refused(
        "predict", text_run, tmp_path / "b.txt", "--top", "2"
    )
    files = [str(tmp_path / name) for name in ("b.txt", "a.txt")]
    assert main(["predict", str(text_run), *files, "--length", "7"]) == 1
    said = capsys.readouterr()
    assert said.out == printable(f"{files[1]}: {wanted[0]}\n"), "the text after the empty one"
    problem = f"{files[0]}: expected text that the model continues, found 0 bytes; add text to it"
    assert said.err == f"mnemos: {problem}\n"
    assert [one.problem for one in predict(text_run, files, length=7)] == [problem, ""]


class Spy(Transcriber):
    def transcribe(self, frames: torch.Tensor, mask: torch.Tensor | None = None) -> list[list[int]]:
        self.frames = frames
        return [[1, 0, 1]]


def test_a_recogniser_writes_down_recordings(spoken_run, tmp_path, capsys, output):
    folder = spoken_run
    about = json.loads((folder / "model/preprocessing.json").read_text())
    assert about == {"is": "recordings", "names": ["high", "low"], "rate": 8000, "bands": 40}

    file = tmp_path / "new.wav"
    samples = tone(1, 0, 9)
    file.write_bytes(wav(samples))
    noisy = (samples + np.random.default_rng(0).standard_normal(len(samples), np.float32)).astype(np.float32) / 32768
    spy = Spy()
    assert [one.text for one in read_preprocessing(folder).predict(spy, [file], {})] == ["low high low"]
    assert torch.allclose(spy.frames[0], normalise(filterbanks(torch.from_numpy(noisy), 8000, 40)), atol=1e-4)
    assert re.fullmatch(rf"{file}:( low| high| )*\n", output("predict", folder, file))
    assert len(list(predict(folder, [folder.parent / "spoken"]))) == 16
    refuses(r"--top: expected no options for a model of recordings", predict, folder, [file], top=1)

    (tmp_path / "fast.wav").write_bytes(wav(tone(1, 0, 9, 16000), 16000))
    capsys.readouterr()
    assert main(["predict", str(folder), str(tmp_path / "fast.wav"), str(file)]) == 1
    said = capsys.readouterr()
    assert said.err == f"mnemos: {tmp_path}/fast.wav: expected 8000 Hz as in training, found 16000 Hz; resample it\n"
    assert said.out.startswith(f"{file}:"), "the recording after it"


SMALL = {"layers": 1, "dim": 16, "num_heads": 2, "mlp": 16}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return trained("digits-pixels", tmp_path_factory.mktemp("pixels") / "run", SMALL)


def test_a_run_of_pictures_shows_some_in_its_report(pictures):
    found = load_file(pictures / "samples.safetensors")
    assert found["samples"].shape == (24, 8, 8, 1)
    assert found["completions"].shape == (8, 3, 8, 8, 1)
    # The upper half is the picture's.
    assert (found["completions"][:, :, :4] == found["originals"][:, None, :4]).all()
    text = report([pictures]).read_text()
    assert '<section id="pictures"' in text
    assert text.count('<img class="pixels"') == 2


def test_pictures_are_drawn_again_with_another_seed(pictures, output):
    before = load_file(pictures / "samples.safetensors")["samples"]
    written = pictures / "sampled"
    assert re.search(r"\b5 .* 8 x 8 x 1 .* 15 completions", output("sample", pictures, "--count", "5", "--seed", "0"))
    same = load_file(written / "samples.safetensors")["samples"]
    assert same.shape == (5, 8, 8, 1)
    main(["sample", str(pictures), "--count", "24"])
    assert np.array_equal(load_file(written / "samples.safetensors")["samples"], before)
    main(["sample", str(pictures), "--count", "24", "--seed", "1", "--top-k", "9"])
    assert not np.array_equal(load_file(written / "samples.safetensors")["samples"], before)
    assert np.array_equal(load_file(pictures / "samples.safetensors")["samples"], before), "the report's stay"
    for name in ("samples.png", "completions.png"):
        with Image.open(written / name) as image:
            assert image.size[0] > 500


def test_text_goes_on_from_a_prompt(text_run, capsys, output, refused):
    folder = text_run
    first = output("sample", folder, "--prompt", "never was", "--length", "40", "--top-k", "5")
    assert first.startswith("never was")
    main(["sample", str(folder), "--prompt", "never was", "--length", "40", "--top-k", "5"])
    assert capsys.readouterr().out == first
    greedy = ["sample", str(folder), "--prompt", "never was", "--length", "40", "--temperature", "0"]
    plain = output(*greedy)
    assert output(*greedy[:-2], "--min-p", "1") == plain, "the most probable token alone"
    begins = torch.tensor([[0, *b"never was"]])  # as each document does in training, with a start token
    written, _ = mnemos.Stream(mnemos.load(folder).eval()).prefill(begins).generate(40, temperature=0)
    assert plain == printable("never was" + bytes(written[0].tolist()).decode(errors="replace")) + "\n"
    stop = plain[len("never was") :][:2]
    assert main([*greedy, "--stop", stop, "--count", "2"]) == 0
    cut = plain[: plain.index(stop, len("never was")) + len(stop)]
    assert capsys.readouterr().out.split("\n" + "─" * 40 + "\n") == [cut + "\n"] * 2


def test_what_cannot_be_sampled_is_refused(pictures, classifier_run, tmp_path):
    for run, sampling, words in (
        (tmp_path, Sampling(), r"no recipe\.json"),
        (pictures, Sampling(count=0), "^--count: expected at least 1, found 0"),
        (pictures, Sampling(length=-2), "^--length: expected at least 1, found -2"),
        (pictures, Sampling(prompt="7"), "--prompt"),
        (pictures, Sampling(temperature=float("nan")), "temperature.* found nan"),
        (pictures, Sampling(stop="7"), "--stop: expected none, .* found '7'"),
        (classifier_run, Sampling(), "mnemos eval"),
    ):
        refuses(words, sample_run, run, sampling)
