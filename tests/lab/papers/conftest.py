import pytest

from mnemos.lab.papers import drawing


@pytest.fixture(autouse=True)
def coarse_pictures(monkeypatch):
    """Pictures of a tenth of the points: what is drawn is the same."""
    monkeypatch.setattr(drawing, "DPI", 50)
