"""Every picture that the project makes can be read, on a light and on a dark page."""

import math
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'revdeq[demo]'")

import plots
import readable
import table
from matplotlib import style
from matplotlib.figure import Figure

from revdeq.cli import demo

RESULTS = Path(__file__).parents[1] / "bench" / "results"
PAGES = {"": readable.LIGHT, "-dark": readable.DARK}
PICTURES = list(plots.figures(table.read(RESULTS / "amd-epyc-2-threads" / "results.csv")))


@pytest.mark.parametrize(("name", "suffix", "figure"), PICTURES, ids=[name + suffix for name, suffix, _ in PICTURES])
def test_the_plots_of_the_benchmarks(name, suffix, figure):
    assert readable.complaints(figure, PAGES[suffix]) == []


def test_every_plot_is_of_what_is_committed():
    committed = {path.stem for path in (RESULTS / "amd-epyc-2-threads").glob("*.png")}
    assert committed == {name + suffix for name, suffix, _ in PICTURES}


def test_no_panel_draws_torchdeqs_distance_from_the_fixed_points_gradient_beside_our_errors():
    for name in ("error", "depth"):
        (figure,) = (figure for other, suffix, figure in PICTURES if (other, suffix) == (name, ""))
        errors = [axes for axes in figure.axes if "error" in axes.get_ylabel() or name == "error"]
        assert errors
        for axes in errors:
            assert not [line for line in axes.lines if "torchdeq" in line.get_label()]


N = len(demo.PLOTTED_DEPTHS)


@pytest.mark.parametrize(
    "errors",
    [
        pytest.param({"a": [1e-8] * N, "b": [3e-7] * N, "c": [2e-7] * N, "exact": [0.0] * N}, id="none is lost"),
        pytest.param({"a": [0.0] * N, "b": [1e-7] * (N - 2) + [40.0, math.nan], "c": [math.nan] * N}, id="some are"),
    ],
)
def test_the_demos_picture(errors):
    memory = {method: [(k + 1) * 2.0**20 * n for n in demo.PLOTTED_DEPTHS] for k, method in enumerate(demo.METHODS)}
    solved = {bits: [min(1.0, n / bits) for n in demo.SOLVED_DEPTHS] for bits in demo.LENGTHS}
    figure = demo.picture(memory, {f"float64 state, beta {k}": row for k, row in errors.items()}, solved)
    assert readable.complaints(figure) == []
    assert [len(axes.get_legend().get_texts()) for axes in figure.axes][::2] == [len(demo.METHODS), len(demo.LENGTHS)]
    crosses = [x for line in figure.axes[1].lines if line.get_marker() == "x" for x in line.get_xdata()]
    lost = [n for row in errors.values() for n, e in zip(demo.PLOTTED_DEPTHS, row, strict=True) if not e < 1]
    assert crosses == lost


def panels(**layout):
    figure = Figure(figsize=(8, 3), **layout)
    left, right = figure.subplots(1, 2)
    left.plot([0, 1], [0, 1], label="a")
    right.plot([0, 1], [1, 0], label="b")
    return figure, left, right


def test_a_figure_that_cannot_be_read_is_noticed():
    figure, left, right = panels(layout="constrained")
    assert readable.complaints(figure) == []
    right.plot([], [], "x", clip_on=False)
    right.set(xscale="log", yscale="log", ylim=(1e-9, 1))
    assert any("of the figure's width" in words for words in readable.complaints(figure))

    figure, left, right = panels()
    left.set_position([0.3, 0.1, 0.15, 0.8])
    assert any("has 15% of the figure's width" in words for words in readable.complaints(figure))

    figure, left, right = panels()
    left.set_ylabel("a label\nof very\nmany\nlines")
    assert any("reaches beyond the figure" in words for words in readable.complaints(figure))

    figure, left, right = panels(layout="constrained")
    right.legend(loc="upper left")
    assert any("a legend lies on 'b'" in words for words in readable.complaints(figure))
    right.get_legend().remove()
    right.legend(loc="lower left")
    assert readable.complaints(figure) == []

    figure, left, right = panels(layout="constrained")
    left.set_xticks([0.50, 0.51], ["one half", "a little more"])
    assert any("lie on each other" in words for words in readable.complaints(figure))

    with style.context("dark_background"):
        figure, left, right = panels(layout="constrained")
        left.set_title("t")
    assert any("can hardly be seen on #ffffff" in words for words in readable.complaints(figure))
    assert readable.complaints(figure, readable.DARK) == []
