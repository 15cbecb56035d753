"""Every picture of the project is readable, on a light and on a dark page."""

import math
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'revdeq[demo]'")

import evidence_report
import maze_picture
import plots
import readable
import table
import torch
from matplotlib import style
from matplotlib.figure import Figure

from revdeq.cli import demo
from revdeq.training import record
from revdeq.training.data import Mazes

RESULTS = Path(__file__).parents[1] / "bench" / "results"
PAGES = {"": readable.LIGHT, "-dark": readable.DARK}
MEASURED = [RESULTS / "amd-epyc-2-threads" / name for name in ("results.csv", "looped.csv")]
PICTURES = [picture for path in MEASURED for picture in plots.figures(table.read(path))]


@pytest.mark.parametrize(
    ("name", "suffix", "figure"),
    [
        pytest.param(*picture, id=picture[0] + picture[1], marks=[pytest.mark.full] if picture[1] else [])
        for picture in PICTURES  # dark pictures are the same in other colours
    ],
)
def test_the_plots_of_the_benchmarks(name, suffix, figure):
    assert readable.complaints(figure, PAGES[suffix]) == []


@pytest.mark.parametrize("name", ["transfer", "budgets"])
def test_the_pictures_of_the_evidence(name):
    _, figures = evidence_report.page(RESULTS / "evidence")
    assert readable.complaints(figures[name]) == []


def test_the_pictures_of_a_maze():
    inputs, targets = Mazes(cells=12).made(1, torch.Generator().manual_seed(0))
    answers = {n: targets[0] * min(1.0, n / 16) for n in maze_picture.FRAMES}
    figure = maze_picture.side_by_side(inputs[0], targets[0], answers)
    assert readable.complaints(figure) == []
    moving = maze_picture.animation(inputs[0], answers, 12)
    for frame in (0, len(maze_picture.FRAMES) - 1):
        moving._draw_frame(maze_picture.FRAMES[frame])
        assert readable.complaints(moving._fig) == []
    moving._draw_was_started = True  # or it warns that it was never shown


@pytest.mark.parametrize("metric", ["accuracy", "perplexity"])
def test_the_plot_of_a_training(metric, monkeypatch, tmp_path):
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **kw: drawn.append(figure) or save(figure, *args, **kw)
    )
    rows = [dict.fromkeys(record.COLUMNS, "") | {"update": 20 * k, "loss": 9 / k + 1} for k in range(1, 41)]
    for row in rows[9::10]:
        score = 1000 / row["update"] if metric == "perplexity" else row["update"] / 1000
        row.update(evaluation_loss=row["loss"] + 0.3, metric=score)
    record.plot(tmp_path, rows, metric)
    (figure,) = drawn
    assert readable.complaints(figure) == []


def test_the_picture_of_the_demo():
    """With an error that is 0, one that is beyond the plot, and one that is NaN."""
    n = len(demo.PLOTTED_DEPTHS)
    memory = {method: [(k + 1) * 2.0**20 * n for n in demo.PLOTTED_DEPTHS] for k, method in enumerate(demo.METHODS)}
    errors = {"a": [0.0] * n, "b": [1e-7] * (n - 2) + [40.0, math.nan], "c": [3e-7] * n}
    solved = {bits: [min(1.0, n / bits) for n in demo.SOLVED_DEPTHS] for bits in demo.LENGTHS}
    figure = demo.picture(memory, {f"float64 state, beta {k}": row for k, row in errors.items()}, solved)
    assert readable.complaints(figure) == []


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
    assert any("a legend hides 'b'" in words for words in readable.complaints(figure))
    right.get_legend().remove()
    right.legend(loc="lower left")
    assert readable.complaints(figure) == []

    figure, left, right = panels(layout="constrained")
    left.set_xticks([0.50, 0.51], ["one half", "a little more"])
    assert any("overlap" in words for words in readable.complaints(figure))

    figure, left, right = panels(layout="constrained")
    left.plot([0.4, 0.6], [0.9, 0.9], "o")
    left.annotate("4", (0.4, 0.9), (0, 8), textcoords="offset points", ha="center")
    assert readable.complaints(figure) == []
    left.annotate("6", (0.6, 0.9), ha="center", va="center")
    assert any("'6' hides a point" in words for words in readable.complaints(figure))

    with style.context("dark_background"):
        figure, left, right = panels(layout="constrained")
        left.set_title("t")
    assert any("is hardly visible on #ffffff" in words for words in readable.complaints(figure))
    assert readable.complaints(figure, readable.DARK) == []
