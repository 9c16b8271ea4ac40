"""`mnemos predict` for texts and recordings, and for tasks whose models read no files."""

import io
import json
import re
import sys

import numpy as np
import pytest
import torch
from spoken_standins import tone, wav, write_recordings
from trained_runs import trained

import mnemos
from mnemos import InputError
from mnemos.errors import printable
from mnemos.lab.cli import main
from mnemos.lab.evaluate.predict import predict, read_preprocessing
from mnemos.lab.speech.audio import filterbanks, normalise
from mnemos.lab.speech.ctc import Transcriber


def continuation(model: torch.nn.Module, prompt: bytes, length: int) -> str:
    """The definition: the whole text again for each byte."""
    tokens = [0, *prompt]
    for _ in range(length):
        logits, _ = model(torch.tensor([tokens]))
        tokens.append(int(logits[0, -1].argmax()))
    return bytes(tokens[1 + len(prompt) :]).decode(errors="replace")


def test_a_language_model_continues_files_and_the_standard_input(text_run, tmp_path, monkeypatch, capsys):
    model = mnemos.load(text_run)
    prompts = {"a.txt": b"the cat sat on the mat, and then " * 3, "b.txt": b"dog"}
    for name, prompt in prompts.items():
        (tmp_path / name).write_bytes(prompt)
    wanted = [continuation(model, prompt, 7) for prompt in prompts.values()]
    assert [one.text for one in predict(text_run, [tmp_path], length=7)] == wanted
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(prompts["b.txt"])))
    assert main(["predict", str(text_run), str(tmp_path / "a.txt"), "-", "--length", "7"]) == 0
    assert capsys.readouterr().out == printable(f"{tmp_path / 'a.txt'}: {wanted[0]}\n-: {wanted[1]}\n")
    (tmp_path / "b.txt").write_bytes(b"")
    assert main(["predict", str(text_run), str(tmp_path / "b.txt"), "--top", "2"]) == 2
    assert "--top: expected --length for a model of text" in capsys.readouterr().err
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


def test_a_recogniser_writes_down_recordings(tmp_path, capsys):
    spoken = write_recordings(tmp_path / "spoken")
    data = {"path": str(spoken), "longest": 2, "test_takes": 1, "valid_takes": 1, "rows": 6}
    model = {"vocab_size": 2, "layers": 1, "dim": 16, "num_heads": 2, "mlp": 32}
    folder = trained("spoken-digits-linear", tmp_path / "run", model, data)
    about = json.loads((folder / "model/preprocessing.json").read_text())
    assert about == {"is": "recordings", "names": ["high", "low"], "rate": 8000, "bands": 40}

    file = tmp_path / "new.wav"
    samples = tone(1, 0, 9)
    file.write_bytes(wav(samples))
    noisy = (samples + np.random.default_rng(0).standard_normal(len(samples), np.float32)).astype(np.float32) / 32768
    spy = Spy()
    assert [one.text for one in read_preprocessing(folder).predict(spy, [file], {})] == ["low high low"]
    assert torch.allclose(spy.frames[0], normalise(filterbanks(torch.from_numpy(noisy), 8000, 40)), atol=1e-4)
    assert main(["predict", str(folder), str(file)]) == 0
    assert re.fullmatch(rf"{file}:( low| high| )*\n", capsys.readouterr().out)
    assert len(list(predict(folder, [spoken]))) == 16
    with pytest.raises(InputError, match=r"--top: expected no options for a model of recordings"):
        predict(folder, [file], top=1)

    (tmp_path / "fast.wav").write_bytes(wav(tone(1, 0, 9, 16000), 16000))
    capsys.readouterr()
    assert main(["predict", str(folder), str(tmp_path / "fast.wav"), str(file)]) == 1
    said = capsys.readouterr()
    assert said.err == f"mnemos: {tmp_path}/fast.wav: expected 8000 Hz as in training, found 16000 Hz; resample it\n"
    assert said.out.startswith(f"{file}:"), "the recording after it"


def test_a_task_that_reads_no_files_says_so(tmp_path, capsys):
    small = {"dim": 16, "layers": 1, "num_heads": 2}
    folder = trained("short-listops", tmp_path / "run", small, {"train_size": 100, "valid_size": 20, "test_size": 20})
    assert main(["predict", str(folder), "prompt.txt"]) == 2
    said = capsys.readouterr().err
    assert re.search(r"expected a model that reads files \(.*, text, .*\), found one whose task does not", said)
    assert said.count("\n") == 1
