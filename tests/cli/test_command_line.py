"""python -m revdeq, and the package as it is imported from its repository."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from revdeq import __main__
from revdeq.cli.output import while_it_is_read

ROOT = Path(__file__).parents[2]


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["revdeq", *arguments])
    return __main__.main()


@pytest.mark.parametrize("out", ["plot.xyz", "/nonexistent/plot.png", ".", ""])
def test_a_plot_that_cannot_be_written_is_an_error_before_the_training(monkeypatch, capsys, out):
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, "demo", "--out", out)
    assert end.value.code == 2
    assert "it must end in .png, in a folder that exists" in capsys.readouterr().err


def test_missing_packages_are_named_before_the_training(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run(monkeypatch, "demo") == 1
    assert (
        "The demo needs matplotlib, sklearn, tqdm: pip install matplotlib scikit-learn tqdm" in capsys.readouterr().err
    )


def test_an_unknown_command(monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, "dmeo")
    assert end.value.code == 2
    assert "invalid choice: 'dmeo'" in capsys.readouterr().err


def test_an_interruption_ends_quietly(monkeypatch, capsys):
    def interrupted(out):
        raise KeyboardInterrupt

    monkeypatch.setattr("revdeq.cli.demo.run", interrupted)
    assert run(monkeypatch, "demo") == 130
    assert "Interrupted" in capsys.readouterr().err


@pytest.mark.skipif(not (ROOT / "kernels").exists(), reason="not in a repository")
@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
@pytest.mark.parametrize("arguments", [["revdeq.examples"], ["revdeq", "doctor"]])
def test_a_closed_pipe_ends_the_command_quietly(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", *arguments], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.stderr == ""


def test_a_pipe_that_breaks_elsewhere_is_an_error():
    with pytest.raises(BrokenPipeError), while_it_is_read():
        raise BrokenPipeError


def test_the_repository_can_be_imported_as_it_is():
    """Without the installation's finders: -S leaves out site-packages, -c puts the current folder first."""
    paths = [p for p in sys.path if "site-packages" in p]
    code = f"import sys; sys.path += {paths!r}; import revdeq.kernels; print(revdeq.kernels.__file__)"
    result = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert Path(result.stdout.strip()) == ROOT / "kernels" / "__init__.py"
