"""The options of `pytest bench/test_update.py`, and its table."""

from pathlib import Path

import pytest
import test_update
from table import Results, device_name

KEY = pytest.StashKey[Results]()


def pytest_addoption(parser):
    parser.addoption("--out", type=Path, help="the CSV to add the measurements to")
    parser.addoption("--quick", action="store_true", help="two sizes and few rounds")


@pytest.fixture(scope="session")
def results(request):
    request.config.stash[KEY] = made = Results(request.config.getoption("--out"))
    return made


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    if KEY in config.stash:
        terminalreporter.section(f"turn by turn, {device_name()}")
        terminalreporter.write_line(test_update.table(config.stash[KEY]))
