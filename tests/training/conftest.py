import pytest
import torch
from sample_data import write_cifar, write_encoding, write_wikitext

from revdeq.training import record


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Small data sets in the official formats."""
    folder = tmp_path_factory.mktemp("data")
    write_cifar(folder), write_encoding(folder), write_wikitext(folder)
    return folder


@pytest.fixture(autouse=True)
def one_thread_own_cache_and_no_picture(tmp_path_factory, monkeypatch, request):
    """A picture takes longer than the updates of a small training."""
    monkeypatch.setenv("REVDEQ_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    if "with_picture" not in request.fixturenames:
        monkeypatch.setattr(record, "plot", lambda *args: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def with_picture():
    """For the test that looks at the picture of a training."""
