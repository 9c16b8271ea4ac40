import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def _what_is_alive_stays():
    """Each `train` of transformers searches all objects for garbage: a second, after some thousand tests."""
    gc.collect()
    gc.freeze()
