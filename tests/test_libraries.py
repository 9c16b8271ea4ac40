"""Host libraries are imported when asked for, and torchvision's missing operators stop nobody."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sources import nodes

import mnemos
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


def test_timm_imports_with_its_data_and_torchvision_has_its_operators():
    libraries.timm()
    import timm.data  # noqa: F401
    import torchvision

    boxes, scores = torch.tensor([[0.0, 0.0, 1.0, 1.0]] * 2), torch.tensor([0.5, 0.6])
    assert torchvision.ops.nms(boxes, scores, 0.5).tolist() == [1]
    if libraries._declared is not None:  # torchvision was built for another PyTorch
        with pytest.raises(RuntimeError, match="custom C"):
            torchvision.ops.ps_roi_align(torch.zeros(1, 4, 4, 4), torch.zeros(1, 5), 2)


# The private names of transformers and torchvision that are used, each by the module that has it, with the reason. Of
# their own classes all are read with a fallback, but for what a subclass overrides.
PRIVATE = {
    "transformers.modeling_utils": {
        "_init_weights": "overridden: how a model of ours is initialised inside of theirs",
        "_tied_weights_keys": "set: the names that share a weight in this model, which depend on its settings",
        "_is_hf_initialized": "the mark of a weight that was read from a checkpoint",
        "_keys_to_ignore_on_load_unexpected": "extended while a host is read, whose caches are read after it",
    },
    "transformers.configuration_utils": {"_name_or_path": "left out of saved settings: a path of this machine"},
    "transformers.generation.utils": {
        "_supports_default_dynamic_cache": "overridden: the state is the cache",
        "_prepare_cache_for_generation": "overridden: assisted decoding needs the state before the first call",
    },
    "transformers.models.auto.auto_factory": {"_model_mapping": "the class of models that an Auto class would build"},
    "transformers.trainer": {
        "_prepare_inputs": "moves a batch to the device in a training step of our own",
        "_train_batch_size": "the rows of a process, which Trainer may have changed",
    },
    "torchvision.extension": {"_has_ops": "replaced where its operators do not load (`torchvision`)"},
    "torchvision.ops.boxes": {"_assert_has_ops": "replaced likewise"},
    "torchvision.models.detection.rpn": {"_post_nms_top_n": "the number of regions, to count a detector's FLOPs"},
}


def private_names(module: str) -> set[str]:
    """The private names that a module of a library gives to functions, variables and attributes."""
    source = inspect.getsource(importlib.import_module(module))
    return set(re.findall(r"(?:\bself\.|\bcls\.|\bdef |^\s*)(_[a-z]\w*)", source, re.M))


def used(nodes: list[ast.AST], theirs: set[str]) -> set[str]:
    """Which of their private names a file uses: as attributes, as text, or by overriding a method."""
    own = {x.name for x in nodes[0].body if isinstance(x, ast.FunctionDef)}
    for x in nodes:  # attributes that the file gives to objects of its own
        if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store) and ast.unparse(x.value) == "self":
            own.add(x.attr)
    names = {ast.Attribute: "attr", ast.Constant: "value", ast.FunctionDef: "name"}
    found = {getattr(x, names[type(x)]) for x in nodes if type(x) in names}
    return {x for x in found if isinstance(x, str) and x in theirs} - own


def test_private_names_of_transformers_and_torchvision_are_listed():
    libraries.transformers()
    more = ("transformers.cache_utils", "transformers.tokenization_utils_base", "torchvision.ops.roi_align")
    have = {module: private_names(module) for module in (*PRIVATE, *more)}
    for module, names in PRIVATE.items():
        assert have[module] >= names.keys(), f"the installed version lacks a name of {module}"
    theirs = set().union(*have.values()) - {*dir(torch.nn.Module()), *dir(torch.zeros(1))}  # tests/test_compat.py
    found = {}
    for path in Path(mnemos.__file__).parent.rglob("*.py"):
        text = path.read_text()
        if re.search("transformers|torchvision|Hugging Face|detector", text):
            found |= dict.fromkeys(used(nodes(path), theirs), path)
    assert found.keys() == set().union(*PRIVATE.values()), found


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
