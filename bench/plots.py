"""Plots of a table of measurements, each for a light and for a dark page."""

import sys
from collections import defaultdict
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import table

matplotlib.use("Agg")

COLORS = {
    "bare": "#8c8c8c",
    "reversible": "#2f7ed8",
    "reversible, exact state": "#13b5b1",
    "stored graph": "#e4572e",
    "checkpoint": "#f2a541",
    "torchdeq Anderson, IFT": "#9b5de5",
    "torchdeq Broyden, IFT": "#c77dff",
    "torchdeq Anderson, phantom": "#e5989b",
    "fused": "#2f7ed8",
    "fused, exact state": "#13b5b1",
    "unfused": "#e4572e",
    "unfused, in place": "#f2a541",
    "torch.compile": "#9b5de5",
    "copy": "#8c8c8c",
}
BLOCKS = ("conv block", "transformer block")
FLOOR = 1e-9
"""An error of 0 is drawn here, on a logarithmic axis."""


def draw(rows, folder):
    series = defaultdict(dict)
    for row in rows:
        series[row.benchmark, row.provider, row.dtype, row.quantity][row.size] = row
    for suffix, style in (("", "default"), ("-dark", "dark_background")):
        with plt.style.context(
            [style, {"savefig.transparent": True, "font.size": 9, "axes.grid": True, "grid.alpha": 0.25}]
        ):
            for name, figure in _figures(series):
                figure.savefig(folder / f"{name}{suffix}.png", dpi=150, bbox_inches="tight")
                plt.close(figure)


def _figures(series):
    if any(key[0] == "forward half-step" for key in series):
        yield "bandwidth", _bandwidth(series)
    if any(key[0].startswith("step, ") for key in series):
        yield "memory", _against_depth(series, "bytes", "peak memory, MiB", 2**-20)
        yield "time", _against_depth(series, "seconds", "time of a step, ms", 1e3)
        yield "error", _against_depth(series, "gradient error", "error of the gradient (against float64)")
        yield "depth", _summary(series)
    if any(key[0].startswith("breakdown") for key in series):
        yield "breakdown", _breakdown(series)


def _bandwidth(series):
    """Achieved bandwidth by size; the copy is the limit."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for axis, direction in zip(axes, ("forward", "backward"), strict=True):
        for provider in ("fused", "fused, exact state", "unfused", "unfused, in place", "torch.compile", "copy"):
            points = series[f"{direction} half-step", provider, "float32", "seconds"]
            sizes = sorted(points)
            speeds = [points[n].bytes_moved / points[n].p50 / 1e9 for n in sizes]
            line = "--" if provider == "copy" else "-"
            axis.plot(sizes, speeds, line, color=COLORS[provider], label=provider, marker=".")
        axis.set(xscale="log", yscale="log", title=f"{direction} half-step, float32 f", xlabel="elements")
        axis.set_xscale("log", base=2)
    axes[0].set_ylabel("GB/s of the least that must be moved")
    axes[1].legend(frameon=False, fontsize=7)
    return figure


def _lines(axis, series, benchmark, providers, quantity, factor=1.0):
    for provider in providers:
        points = series.get((benchmark, provider, "float32", quantity), {})
        sizes = sorted(points)
        if sizes:
            values = [max(points[n].p50 * factor, FLOOR) for n in sizes]  # a NaN is left out
            axis.plot(sizes, values, color=COLORS[provider], label=provider, marker=".")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("steps N (2 N evaluations)")


def _against_depth(series, quantity, label, factor=1.0):
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for axis, block in zip(axes, BLOCKS, strict=True):
        _lines(axis, series, f"step, {block}", list(COLORS)[:8], quantity, factor)
        axis.set_title(block)
    axes[0].set_ylabel(label)
    axes[1].legend(frameon=False, fontsize=7)
    return figure


def _summary(series):
    """For the README: memory, and what the reconstruction adds to the gradient's error."""
    figure, (memory, error) = plt.subplots(1, 2, figsize=(9, 3.2))
    providers = ("stored graph", "checkpoint", "torchdeq Anderson, IFT", "reversible", "reversible, exact state")
    _lines(memory, series, "step, conv block", providers, "bytes", 2**-20)
    memory.set_title("peak memory of a training step, MiB")
    memory.legend(frameon=False, fontsize=7)
    _lines(error, series, "step, conv block", providers[3:], "reversal error")
    _lines(error, series, "step, conv block", providers[2:3], "gradient error")
    error.lines[-1].set_label("torchdeq Anderson, IFT (against the fixed point's)")
    error.set_title("error of the gradient")
    error.axhline(FLOOR, color="#8c8c8c", linewidth=0.7, linestyle=":")
    error.annotate("0", (1, FLOOR), textcoords="offset points", xytext=(-10, -3), color="#8c8c8c")
    error.legend(frameon=False, fontsize=7)
    return figure


def _breakdown(series):
    figure, axis = plt.subplots(figsize=(9, 2.2))
    problems = [p for p in (*BLOCKS, "tiny f") if any(key[0] == f"breakdown, {p}" for key in series)]
    colors = plt.get_cmap("tab20").colors
    for y, problem in enumerate(problems):
        parts = {
            key[1]: next(iter(points.values())).p50
            for key, points in series.items()
            if key[0] == f"breakdown, {problem}"
        }
        whole, left = sum(parts.values()), 0.0
        for color, (part, seconds) in zip(colors, parts.items(), strict=False):
            axis.barh(y, seconds / whole, left=left, color=color, label=part if y == 0 else None)
            left += seconds / whole
    axis.set_yticks(range(len(problems)), problems)
    axis.set_xlabel("share of a training step")
    axis.invert_yaxis()
    axis.grid(False)
    axis.legend(frameon=False, fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1))
    return figure


if __name__ == "__main__":
    draw(table.read(Path(sys.argv[1])), Path(sys.argv[1]).parent)
