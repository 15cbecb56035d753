"""`python -m revdeq demo`, at a size of seconds."""

import dataclasses
import signal

import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

import readable

from revdeq import training
from revdeq.cli import demo
from revdeq.training import run as training_run


@pytest.fixture
def small(monkeypatch):
    load = demo.Digits.load

    def few():
        digits = load()
        return demo.Digits(digits.images[:128], digits.labels[:128], digits.test_images[:10], digits.test_labels[:10])

    monkeypatch.setattr(demo.Digits, "load", few)
    for name, value in {"DEPTHS": (1, 2), "PLOTTED_DEPTHS": (1, 16), "EPOCHS": 1, "SOLVED_DEPTHS": (1, 3)}.items():
        monkeypatch.setattr(demo, name, value)
    preset = training.PRESETS["prefix-tiny"]
    brief = dataclasses.replace(preset.training, updates=2)
    settings = {**preset.settings, "channels": 4}
    monkeypatch.setitem(training.PRESETS, "prefix-tiny", dataclasses.replace(preset, training=brief, settings=settings))


def test_the_demo_prints_costs_and_solved_puzzles_and_plots_them(small, monkeypatch, capsys, tmp_path):
    drawn, picture = [], demo.picture
    monkeypatch.setattr(demo, "picture", lambda *args: drawn.append((args, picture(*args))) or drawn[-1][1])
    rows = demo.run(tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    for row in rows:
        assert any(line.startswith(f"{row.model.method:14} {row.model.max_steps:2} ") for line in text.splitlines())
    assert [line[:7] for line in text.splitlines() if " bits" in line and "%" in line] == [
        "16 bits",
        "32 bits",
        "64 bits",
    ]
    (((memory, errors, solved), figure),) = drawn
    assert readable.complaints(figure) == []
    assert memory["stored graph"][1] > 3 * memory["reversible"][1]
    assert errors["exact state, each beta"] == [0.0, 0.0]
    assert errors["float64 state, beta 0.9"][1] > 1e-3  # ten to the power of 16 times its rounding
    assert {bits: len(shares) for bits, shares in solved.items()} == dict.fromkeys((16, 32, 64), 2)


def test_an_interruption_during_training_ends_the_demo(small, monkeypatch):
    def interrupted(run):
        signal.raise_signal(signal.SIGINT)
        return step(run)

    step = training_run.Run._step
    monkeypatch.setattr(training_run.Run, "_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo.prefix_sums(0)
