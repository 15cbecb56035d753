import pytest
import torch


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    """Each provider's time over that of `fused`, by group: how many times faster the fused half-step is."""
    times = {}
    for benchmark in getattr(getattr(config, "_benchmarksession", None), "benchmarks", []):
        times.setdefault(benchmark.group, {})[benchmark.extra_info["provider"]] = benchmark.stats.min
    if not times:
        return
    write = terminalreporter.write_line
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    terminalreporter.section(f"times faster than (minima; {device})")
    write(f"{'':28}{'fused':>12}{'unfused':>10}{'copy':>10}{'with norms':>12}")
    for group, row in times.items():
        fused = row["fused"]
        ratios = [f"{row[p] / fused:.2f}x" if p in row else "" for p in ("unfused", "copy", "fused with norms")]
        write(f"{group:28}{fused * 1e6:9.1f} us{ratios[0]:>10}{ratios[1]:>10}{ratios[2]:>12}")
