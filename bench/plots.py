"""Plots of a table of measurements, each for a light and for a dark page."""

import math
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import table
from matplotlib.ticker import LogLocator, NullFormatter

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
    "ours, schedule": "#e4572e",
    "ours, tuned": "#2f7ed8",
    "ours, beta .8": "#13b5b1",
    "ours, beta .5": "#8c8c8c",
    "Anderson": "#9b5de5",
    "Broyden": "#f2a541",
    "implicit": "#13b5b1",
    "truncated, last 4 calls": "#8c8c8c",
    "reversible, f of 4 calls": "#9b5de5",
    "reversible, checkpoint in f": "#13b5b1",
    "revdeq.loop": "#e5989b",
}
LOOPED = (
    "stored graph",
    "checkpoint",
    "truncated, last 4 calls",
    "reversible, f of 4 calls",
    "reversible, checkpoint in f",
    "reversible",
    "revdeq.loop",
)
LABELS = {
    "fused": "ours, float64 state",
    "fused, exact state": "ours, exact state",
    "unfused": "unfused PyTorch",
    "unfused, in place": "unfused PyTorch, in place",
    "copy": "a copy of the same bytes",
    "Anderson as it is, IFT": "Anderson with defaults, IFT",
    "f again": "f, evaluated again",
    "products": "vector-Jacobian products",
    "invert and adjoint": "inverse and adjoint",
    "own, forward": "overhead, forward",
    "own, backward": "overhead, backward",
}
"""What legends say, where that is not the provider's name."""
WIDTHS = {"stored graph": 5.0, "checkpoint": 3.8, "reversible": 3.2}
"""Some curves coincide: the ones drawn first are wider, so that all are visible."""
BLOCKS = ("conv block", "transformer block")
FOUR = (*BLOCKS, "trained conv block", "trained transformer block")
GRADIENTS = {
    "ours, tuned, implicit": ("#2f7ed8", "o-"),
    "ours, tuned, exact": ("#13b5b1", "o-"),
    "ours, schedule, implicit": ("#e4572e", "o-"),
    "ours, schedule, exact": ("#e4572e", "o:"),
    "ours, beta .8, implicit": ("#2f7ed8", "s:"),
    "ours, beta .8, exact": ("#13b5b1", "s:"),
    "Anderson, IFT": ("#9b5de5", "^-"),
    "Anderson as it is, IFT": ("#9b5de5", "v:"),
    "Broyden, IFT": ("#f2a541", "D-"),
    "Anderson, phantom": ("#e5989b", "P-"),
}
STEPS = (
    "stored graph",
    "checkpoint",
    "reversible",
    "reversible, exact state",
    "torchdeq Anderson, IFT",
    "torchdeq Broyden, IFT",
    "torchdeq Anderson, phantom",
)
HEADLINE = 8
"""The depth that the documents quote."""
FLOOR = 1e-9
"""Where a logarithmic axis shows an error of 0."""


def draw(rows, folder):
    for name, suffix, figure in figures(rows):
        figure.savefig(folder / f"{name}{suffix}.png", dpi=150)
        plt.close(figure)


def figures(rows):
    """Name, suffix and figure of each plot of a table."""
    series = defaultdict(dict)
    for row in rows:
        series[row.benchmark, row.provider, row.dtype, row.quantity][row.size] = row
    for suffix, style in (("", "default"), ("-dark", "dark_background")):
        with plt.style.context(
            [style, {"savefig.transparent": True, "font.size": 9, "axes.grid": True, "grid.alpha": 0.25}]
        ):
            for name, figure in _figures(series):
                plt.close(figure)  # or pyplot keeps a reference
                yield name, suffix, figure


def _figures(series):
    if any(key[0] == "forward half-step" for key in series):
        yield "bandwidth", _bandwidth(series)
    if any(key[0].startswith("step, ") for key in series):
        yield "memory", _memory(series)
        yield "depth", _summary(series)
    if any(key[1].startswith("keep ") for key in series):
        yield "dial", _dial(series)
    if any(key[0].startswith("breakdown") for key in series):
        yield "breakdown", _breakdown(series)
    if any(key[0].startswith("gradient, ") for key in series):
        yield "convergence", _residuals(series)
        yield "gradient", _distances(series)
    if any(key[0].startswith("held out, ") for key in series):
        yield "schedule", _schedules(series)
    if any(key[0].startswith("steps taken, ") for key in series):
        yield "examples", _steps_taken(series)
    if any(key[0] == "looped, depth" for key in series):
        yield "looped", _looped(series)


def _bandwidth(series):
    """Achieved bandwidth by tensor size; a plain copy is the limit."""
    figure, axes = _two_panels(sharey=True)
    for axis, direction in zip(axes, ("forward", "backward"), strict=True):
        for provider in ("fused", "fused, exact state", "unfused", "unfused, in place", "torch.compile", "copy"):
            points = series[f"{direction} half-step", provider, "float32", "seconds"]
            sizes = sorted(points)
            speeds = [points[n].bytes_moved / points[n].p50 / 1e9 for n in sizes]
            line = "--" if provider == "copy" else "-"
            axis.plot(sizes, speeds, line, color=COLORS[provider], label=LABELS.get(provider, provider), marker=".")
        axis.set(yscale="log", title=f"{direction} half-step, float32 f", xlabel="elements")
        axis.set_xscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("effective bandwidth, GB/s")
    return _with_legend(figure)


def _two_panels(**settings):
    return plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained", **settings)


def _with_legend(figure):
    """One legend for all panels, above them."""
    lines = {line.get_label(): line for axis in figure.axes for line in axis.lines}
    shown = {label: line for label, line in lines.items() if not label.startswith("_")}
    columns = 4 if len(shown) > 6 else 3 if len(shown) > 5 else len(shown)
    figure.legend(shown.values(), shown, loc="outside upper center", ncols=columns, frameon=False, fontsize=8)
    return figure


def _lines(axis, series, benchmark, providers, quantity, factor=1.0):
    for provider in providers:
        points = series.get((benchmark, provider, "float32", quantity), {})
        sizes = sorted(points)
        if sizes:
            values = [max(points[n].p50 * factor, FLOOR) for n in sizes]
            for n in (n for n in sizes if math.isnan(points[n].p50)):
                at, place = (n, 0.97), ("data", "axes fraction")
                axis.annotate("NaN", at, xycoords=place, ha="center", va="top", color=COLORS[provider], fontsize=9)
            width = WIDTHS.get(provider, 1.2)
            label = {"reversible": "reversible, float64 state"}.get(provider, provider)
            axis.plot(sizes, values, "o-", color=COLORS[provider], label=label, linewidth=width, markersize=width + 2)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_yscale("log")
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("steps N (2 N evaluations)")


def _plain_numbers(axis):
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")


def _memory(series):
    figure, axes = _two_panels(sharey=True)
    for axis, block in zip(axes, BLOCKS, strict=True):
        _lines(axis, series, f"step, {block}", STEPS, "bytes", 2**-20)
        axis.set_title(block)
    _plain_numbers(axes[0])
    axes[0].set_ylabel("peak memory, MiB")
    return _with_legend(figure)


def _summary(series):
    """For the README: memory, and the gradient error that reconstruction adds."""
    figure, (memory, error) = _two_panels()
    providers = ("stored graph", "checkpoint", "torchdeq Anderson, IFT", "reversible", "reversible, exact state")
    _lines(memory, series, "step, conv block", providers, "bytes", 2**-20)
    memory.set(title="peak memory of a training step", ylabel="MiB")
    _plain_numbers(memory)
    _lines(error, series, "step, conv block", providers[3:], "reversal error")
    error.set_title("gradient error added by reconstruction")
    error.set_ylabel("relative error")
    error.set_yticks([1, 1e-2, 1e-4, 1e-6, 1e-8, FLOOR], ["1", *(f"$10^{{{k}}}$" for k in (-2, -4, -6, -8)), "0"])
    error.set_ylim(FLOOR / 3, 1)
    return _with_legend(figure)


def _panels_of_blocks(series, start):
    """A figure with one panel per measured block, two in a row; and a dict of the panels."""
    blocks = [block for block in FOUR if any(key[0] == f"{start}, {block}" for key in series)]
    columns = min(2, len(blocks))
    rows = math.ceil(len(blocks) / columns)
    size = 4.5 * columns, 0.9 + 2.9 * rows
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    panels = dict(zip(blocks, axes.flat, strict=False))
    for axis in axes.flat[len(blocks) :]:
        axis.remove()
    for block, axis in panels.items():
        axis.set_title(block)
    return figure, panels


def _residuals(series):
    """Residual by the number of evaluations."""
    figure, panels = _panels_of_blocks(series, "residual")
    for block, axis in panels.items():
        for provider in ("ours, tuned", "ours, beta .8", "ours, beta .5", "Anderson", "Broyden"):
            points = series.get((f"residual, {block}", provider, "float32", "residual"), {})
            values = [points[k].p50 for k in sorted(points)]
            axis.plot(sorted(points), values, color=COLORS[provider], label=provider)
        axis.set(yscale="log", xlim=(0, 62), ylim=(1e-4, 2), xlabel="evaluations of f", ylabel="‖f(z) - z‖ / ‖z‖")
        axis.yaxis.set_minor_formatter(NullFormatter())
    return _with_legend(figure)


def _schedules(series):
    """Residual on held-out batches. Each point has its own schedule or pair, tuned for that number of evaluations."""
    figure, panels = _panels_of_blocks(series, "held out")
    for block, axis in panels.items():
        for provider, style in (("ours, schedule", "o-"), ("ours, tuned", "s-"), ("Anderson", "^:")):
            points = series.get((f"held out, {block}", provider, "float32", "residual"), {})
            values = [points[k].p50 for k in sorted(points)]
            axis.plot(sorted(points), values, style, color=COLORS[provider], label=provider, markersize=4)
            axis.set_xticks(sorted(points))
        axis.set(yscale="log", xlabel="evaluations of f", ylabel="‖f(z) - z‖ / ‖z‖")
        axis.yaxis.set_minor_formatter(NullFormatter())
    return _with_legend(figure)


def _distances(series):
    """Distance from the gradient of the fixed point, against time."""
    figure, panels = _panels_of_blocks(series, "gradient")
    for block, axis in panels.items():
        for provider, (color, style) in GRADIENTS.items():
            seconds, distances = (
                series.get((f"gradient, {block}", provider, "float32", quantity), {})
                for quantity in ("seconds", "distance")
            )
            sizes = [k for k in sorted(seconds) if distances[k].p50 < 10]
            if not sizes:
                continue
            times = [1e3 * seconds[k].p50 for k in sizes]
            axis.plot(
                times,
                [distances[k].p50 for k in sizes],
                style,
                color=color,
                label=LABELS.get(provider, provider),
                markersize=4,
                linewidth=1.2,
            )
        axis.set(xscale="log", yscale="log", xlabel="forward and backward pass, ms")
        axis.set_ylabel("distance to the fixed point's gradient")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        for labels in (axis.xaxis, axis.yaxis):
            labels.set_minor_formatter(NullFormatter())
    return _with_legend(figure)


def _dial(series):
    """Time against memory, by `keep`."""
    figure, axes = _two_panels()
    for axis, block in zip(axes, BLOCKS, strict=True):
        points = defaultdict(dict)
        for (benchmark, provider, _, quantity), rows in series.items():
            if benchmark == f"step, {block}" and HEADLINE in rows:
                points[provider][quantity] = rows[HEADLINE].p50
        kept = sorted((int(name.removeprefix("keep ")), name) for name in points if name.startswith("keep "))
        kept.insert(0, (0, "reversible"))

        def place(name, points=points):
            return points[name]["bytes"] / 2**20, points[name]["time over stored graph"]

        curve = [place(name) for _, name in kept]
        axis.plot(*zip(*curve, strict=True), "o-", color=COLORS["reversible"], label="ours, by `keep`")
        for i, ((k, _), at) in enumerate(zip(kept, curve, strict=True)):
            beside = [time for _, time in (*curve[max(0, i - 1) : i], *curve[i + 1 : i + 2])]
            offset = 0, 6 if at[1] >= sum(beside) / len(beside) else -13  # where the curve bends away
            if k == 0:
                offset = -9, -3  # keep=2 needs little more memory, and has its own label right there
            axis.annotate(str(k), at, offset, textcoords="offset points", ha="center", fontsize=8)
        for name, label, marker in (
            ("stored graph", "stored graph", "s"),
            ("checkpoint", "checkpoint", "D"),
            ("torchdeq Anderson, IFT", "torchdeq Anderson, IFT", "^"),
            ("implicit", "ours, implicit gradient", "v"),
        ):
            axis.plot(*place(name), marker, linestyle="none", color=COLORS[name], label=label, markersize=7)
        axis.set(title=block, xlabel="peak memory, MiB", xlim=(0, None), ylim=(0.5, 1.5))
    axes[0].set_ylabel("time relative to the stored graph")
    return _with_legend(figure)


def _looped(series):
    """Memory and time by depth, for every method of training a loop."""
    figure, axes = _two_panels()
    for axis, quantity, factor, title in (
        (axes[0], "bytes", 2**-20, "peak memory, MiB"),
        (axes[1], "seconds", 1e3, "forward and backward pass, ms"),
    ):
        for provider in LOOPED:
            points = series["looped, depth", provider, "float32", quantity]
            values = [factor * points[n].p50 for n in sorted(points)]
            width = WIDTHS.get(provider, 1.2) / 2
            axis.plot(
                sorted(points), values, "o-", color=COLORS[provider], label=provider, linewidth=width, markersize=4
            )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set(title=title, xlabel="calls of the block")
        axis.xaxis.set_major_formatter("{x:g}")
        _plain_numbers(axis)
        axis.yaxis.set_minor_formatter(NullFormatter())
    return _with_legend(figure)


def _steps_taken(series):
    """A histogram of the steps that puzzles take, for each size."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for axis, kind in zip(axes, ("mazes", "prefix sums"), strict=True):
        found = {key[1]: points for key, points in series.items() if key[0] == f"steps taken, {kind}"}
        if not found:
            continue
        last = max(step for points in found.values() for step in points)
        width = 4 if last > 40 else 2
        edges = range(0, last + width, width)
        colors = plt.get_cmap("viridis")
        for row, points in enumerate(found.values()):
            counts = [sum(points[n].p50 for n in points if edge < n <= edge + width) for edge in edges]
            heights = [0.9 * count / max(counts) for count in counts]
            color = colors(0.15 + 0.75 * row / len(found))
            axis.bar(edges, heights, width, bottom=row, align="edge", color=color, edgecolor="none")
        axis.set_yticks(range(len(found)), found)
        axis.set(title=kind, xlabel="steps per example", xlim=(0, None))
        axis.grid(visible=False, axis="y")
    return figure


def _breakdown(series):
    figure, axis = plt.subplots(figsize=(9, 2.6), layout="constrained")
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
            label = LABELS.get(part, part) if y == 0 else None
            axis.barh(y, seconds / whole, left=left, color=color, label=label)
            left += seconds / whole
    axis.set_yticks(range(len(problems)), problems)
    axis.set_xlabel("share of a training step")
    axis.set_xlim(0, 1)
    axis.invert_yaxis()
    axis.grid(False)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    return figure


if __name__ == "__main__":
    draw(table.read(Path(sys.argv[1])), Path(sys.argv[1]).parent)
