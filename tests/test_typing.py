"""The package's types as a program outside it sees them; mypy reads tests/typed_program.py."""

import dataclasses
import inspect
from pathlib import Path

import pytest

import mnemos

SOURCE = Path(mnemos.__file__).parents[1]


def test_models_have_the_signature_of_their_configurations():
    """For `help`, editors and notebooks: the configuration's fields with their defaults and meanings."""
    for model, config in ((mnemos.Transformer, mnemos.TransformerConfig), (mnemos.Memformer, mnemos.MemformerConfig)):
        names = [f.name for f in dataclasses.fields(config)]
        found = inspect.signature(model).parameters
        assert [*found] == ["config", *names]
        assert found["dim"].default == config().dim
        said = (inspect.getdoc(model) or "").partition("\nFields:\n")[2]
        meanings = [line.split(":")[0].strip() for line in said.splitlines() if line[4:5].strip()]
        assert meanings == names


def test_the_package_says_that_it_is_typed():
    """Without `py.typed` a checker takes every name of an installed package for Any."""
    pytest.importorskip("mypy")
    from mypy.modulefinder import FindModuleCache, ModuleNotFoundReason, SearchPaths
    from mypy.options import Options

    assert (SOURCE / "mnemos" / "py.typed").is_file()
    installed = SearchPaths((), (), (str(SOURCE),), ())  # as if the folder were site-packages
    found = FindModuleCache(installed, None, Options()).find_module("mnemos")
    assert not isinstance(found, ModuleNotFoundReason), found
