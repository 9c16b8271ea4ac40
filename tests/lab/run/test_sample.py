"""`mnemos sample`: pictures, text and tokens of runs, small ones."""

import re

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file
from trained_runs import trained

from mnemos import InputError
from mnemos.lab.cli import main
from mnemos.lab.report import report
from mnemos.lab.run.trained import sample_run
from mnemos.lab.tasks.task import Sampling

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


def test_pictures_are_drawn_again_with_another_seed(pictures, capsys):
    before = load_file(pictures / "samples.safetensors")["samples"]
    written = pictures / "sampled"
    assert main(["sample", str(pictures), "--count", "5", "--seed", "0"]) == 0
    assert re.search(r"\b5 .* 8 x 8 x 1 .* 15 completions", capsys.readouterr().out)
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


def test_pictures_whose_first_byte_is_drawn_too(tmp_path):
    folder = trained("digits-pixels", tmp_path / "run", SMALL | {"max_length": 64}, {"start": True})
    found = load_file(folder / "samples.safetensors")
    assert found["samples"].shape == (24, 8, 8, 1)
    assert len({int(picture[0, 0, 0]) for picture in found["samples"]}) > 4, "a fresh model draws it from all bytes"
    assert (found["completions"][:, :, :4] == found["originals"][:, None, :4]).all()


def test_text_goes_on_from_a_prompt(text_run, capsys):
    folder = text_run
    assert main(["sample", str(folder), "--prompt", "never was", "--length", "40", "--top-k", "5"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("never was")
    main(["sample", str(folder), "--prompt", "never was", "--length", "40", "--top-k", "5"])
    assert capsys.readouterr().out == first
    main(["sample", str(folder), "--count", "2", "--length", "10"])
    assert "────" in capsys.readouterr().out
    assert main(["sample", str(folder), "--prompt", "never", "--count", "1", "--length", "1"]) == 0
    assert len(capsys.readouterr().out.removeprefix("never").rstrip("\n")) == 1
    greedy = ["sample", str(folder), "--prompt", "never was", "--length", "40", "--temperature", "0"]
    assert main(greedy) == 0
    plain = capsys.readouterr().out
    assert main([*greedy[:-2], "--min-p", "1"]) == 0
    assert capsys.readouterr().out == plain, "the most probable token alone"
    stop = plain[len("never was") :][:2]
    assert main([*greedy, "--stop", stop, "--count", "2"]) == 0
    cut = plain[: plain.index(stop, len("never was")) + len(stop)]
    assert capsys.readouterr().out.split("\n" + "─" * 40 + "\n") == [cut + "\n"] * 2
    assert main([*greedy, "--stop", ""]) == 2
    assert "--stop: expected a text" in capsys.readouterr().err


def test_other_languages_go_on_from_rows_of_the_test_split(tmp_path, capsys):
    folder = trained("copy", tmp_path / "run", SMALL, {"length": 16, "rows": 8})
    assert main(["sample", str(folder), "--count", "3", "--temperature", "0"]) == 0
    said = capsys.readouterr().out
    assert said.count("read ") == said.count("wrote") == 3
    with pytest.raises(InputError, match=r"--prompt: .*found 'x'"):
        sample_run(folder, Sampling(prompt="x"))
    with pytest.raises(InputError, match=r"--stop: expected none, .* found 'x'"):
        sample_run(folder, Sampling(stop="x"))


def test_what_cannot_be_sampled_is_refused(pictures, tmp_path):
    with pytest.raises(InputError, match=r"no recipe\.json"):
        sample_run(tmp_path, Sampling())
    with pytest.raises(InputError, match=r"^--count: expected at least 1, found 0"):
        sample_run(pictures, Sampling(count=0))
    with pytest.raises(InputError, match=r"^--length: expected at least 1, found -2"):
        sample_run(pictures, Sampling(length=-2))
    with pytest.raises(InputError, match="--prompt"):
        sample_run(pictures, Sampling(prompt="7"))
    with pytest.raises(InputError, match=r"temperature.* found nan"):
        sample_run(pictures, Sampling(temperature=float("nan")))
    classifier = trained("digits", tmp_path / "run", SMALL)
    with pytest.raises(InputError, match="mnemos eval"):
        sample_run(classifier, Sampling())


def test_damaged_samples_are_named(pictures, tmp_path):
    copy = tmp_path / "run"
    copy.mkdir()
    for file in ("recipe.json", "metrics.jsonl", "samples.json"):
        (copy / file).write_bytes((pictures / file).read_bytes())
    (copy / "samples.safetensors").write_bytes(b"no")
    with pytest.raises(InputError, match=r"samples\.json"):
        report([copy])
