"""Host libraries are imported when asked for, and torchvision's missing operators stop nobody."""

import subprocess
import sys

import pytest
import torch

from mnemos import libraries
from mnemos.errors import install_command
from mnemos.types import InputError


@pytest.mark.parametrize(("name", "extra"), [("timm", "vision"), ("transformers", "hf")])
def test_a_missing_library_names_its_install_command(monkeypatch, name, extra):
    libraries.timm()
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(InputError) as raised:
        getattr(libraries, name)()
    assert name in str(raised.value)
    assert str(raised.value).endswith(f"run: {install_command(extra)}")


@pytest.mark.parametrize(
    ("name", "source", "words"),
    [
        ("sacremoses", "import a_part_of_it", "No module named 'a_part_of_it'"),
        ("torchvision", "raise RuntimeError('operator torchvision::nms is broken')", "is broken"),
    ],
)
def test_a_library_that_fails_itself_says_so_in_its_own_words(name, source, words, tmp_path, monkeypatch):
    """It is there: an install command would not help."""
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises((ModuleNotFoundError, RuntimeError), match=words):
        getattr(libraries, name)()


def test_timm_imports_with_its_data_and_torchvision_has_its_operators():
    libraries.timm()
    import timm.data  # noqa: F401
    import torchvision

    boxes, scores = torch.tensor([[0.0, 0.0, 1.0, 1.0]] * 2), torch.tensor([0.5, 0.6])
    assert torchvision.ops.nms(boxes, scores, 0.5).tolist() == [1]
    if libraries._declared is not None:  # torchvision was built for another PyTorch
        with pytest.raises(RuntimeError, match="custom C"):
            torchvision.ops.ps_roi_align(torch.zeros(1, 4, 4, 4), torch.zeros(1, 5), 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("names", ["transformers timm", "timm transformers"])
def test_a_fresh_process_can_ask_in_any_order(names):
    calls = "; ".join(f"mnemos.libraries.{name}()" for name in names.split())
    code = f"import mnemos; {calls}; import timm.data, transformers.models.pvt.modeling_pvt"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_version_that_was_not_tested_is_told_once(recwarn):
    libraries.tell_untested("timm", "1.0.99")
    libraries.tell_untested("another", "0.1")
    assert not recwarn.list
    for _ in range(2):
        libraries.tell_untested("timm", "9.1.0")
    assert [str(one.message).partition(":")[0] for one in recwarn.list] == [
        "mnemos was tested with timm 1.0, found 9.1.0"
    ]
