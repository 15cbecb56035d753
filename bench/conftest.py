from pathlib import Path

import pytest
from table import Table, device_name

from revdeq.cli.doctor import ENOUGH

ENDURING = 22
"""log2 of the size from which no cache holds the tensors, and launches take a negligible share of the time."""


def pytest_addoption(parser):
    parser.addoption("--table", type=Path, help="the CSV to add the measurements to")
    parser.addoption("--quick", action="store_true", help="small sizes and few rounds")


@pytest.fixture
def quick(request):
    return request.config.getoption("--quick")


@pytest.fixture(scope="session")
def table(request, tmp_path_factory):
    path = request.config.getoption("--table")
    return Table(path or tmp_path_factory.mktemp("bench") / "update.csv")


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    """How many times faster the fused half-step is than each provider."""
    benchmarks = getattr(getattr(config, "_benchmarksession", None), "benchmarks", [])
    if not benchmarks:
        return
    names = ("unfused", "unfused, in place", "torch.compile", "copy", "fused with norms", "fused, exact state")
    terminalreporter.section(f"times faster than (medians, turn by turn; {device_name()})")
    header = ("unfused", "in place", "compiled", "copy", "with norms", "exact state")
    terminalreporter.write_line(f"{'':26}{'fused':>12}" + "".join(f"{name:>13}" for name in header))
    for benchmark in benchmarks:
        ratios = benchmark.extra_info["ratios"]
        cells = (f"{ratios[name]:12.2f}x" if name in ratios else " " * 13 for name in names)
        terminalreporter.write_line(
            f"{benchmark.group:26}{benchmark.extra_info['seconds'] * 1e6:9.1f} us{''.join(cells)}"
        )
    terminalreporter.section(f"share of a copy's bandwidth, from 2^{ENDURING} elements on; below {ENOUGH}: marked *")
    for benchmark in benchmarks:
        if int(benchmark.group.rpartition("^")[2]) >= ENDURING:
            shares = bandwidth_shares(benchmark.extra_info["ratios"])
            cells = (f"{name} {share:.2f}{'*' if share < ENOUGH else ''}" for name, share in shares.items())
            terminalreporter.write_line(f"{benchmark.group:26}{', '.join(cells)}")


def bandwidth_shares(ratios):
    """The time of a copy of the same bytes, over the time of the fused half-steps."""
    return {name: ratios["copy"] / ratio for name, ratio in ratios.items() if name.startswith("fused")}
