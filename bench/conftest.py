import pytest
import torch


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    """How many times faster the fused half-step is than each provider."""
    benchmarks = getattr(getattr(config, "_benchmarksession", None), "benchmarks", [])
    if not benchmarks:
        return
    write = terminalreporter.write_line
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    terminalreporter.section(f"times faster than (medians, turn by turn; {device})")
    write(f"{'':28}{'fused':>12}{'unfused':>10}{'copy':>10}{'with norms':>12}")
    for benchmark in benchmarks:
        seconds = benchmark.extra_info["seconds"]
        fused = seconds["fused"]
        names = ("unfused", "copy", "fused with norms")
        ratios = [f"{seconds[name] / fused:.2f}x" if name in seconds else "" for name in names]
        write(f"{benchmark.group:28}{fused * 1e6:9.1f} us{ratios[0]:>10}{ratios[1]:>10}{ratios[2]:>12}")
