import pytest

from revdeq.training import record


@pytest.fixture(autouse=True)
def without_pictures(request, monkeypatch):
    """A picture takes longer than the updates of a small training."""
    if "with_pictures" not in request.fixturenames:
        monkeypatch.setattr(record, "plot", lambda *args: None)


@pytest.fixture
def with_pictures():
    """For tests that look at the picture of a training."""
