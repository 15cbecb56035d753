"""What is built and installed: a wheel, a source distribution and an editable installation, each of which imports."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import revdeq

ROOT = Path(__file__).parents[1]
FOLDERS = ("revdeq", "kernels")


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parent") / "clone"
    unwanted = shutil.ignore_patterns("__pycache__", "*.so", "*.pyd", "*.egg-info")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def built(clone, tmp_path_factory):
    """Builds as pip does. There is no C compiler, so this also shows that none is needed."""
    pytest.importorskip("setuptools", minversion="77", reason="needs setuptools that reads metadata of licenses")
    out = tmp_path_factory.mktemp("built")
    for kind in ("wheel", "sdist", "editable"):
        code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out / kind)!r})"
        (out / kind).mkdir()
        environment = {**os.environ, "CC": "false"}
        done = subprocess.run([sys.executable, "-c", code], cwd=clone, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return {kind: next((out / kind).iterdir()) for kind in ("wheel", "sdist", "editable")}


def sources(clone, pattern):
    return {path.relative_to(clone).as_posix() for name in FOLDERS for path in (clone / name).rglob(pattern)}


def test_a_wheel_has_every_module_and_needs_torch_alone(clone, built):
    with zipfile.ZipFile(built["wheel"]) as wheel:
        names = set(wheel.namelist())
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        needed = re.findall("^Requires-Dist: (.*)", wheel.read(metadata).decode(), re.MULTILINE)
    modules = {re.sub("^kernels/", "revdeq/kernels/", name) for name in sources(clone, "*.py")}
    assert modules | {"revdeq/py.typed"} <= names
    assert {name.split("/")[0] for name in names} == {"revdeq", metadata.split("/")[0]}
    assert [each for each in needed if "extra ==" not in each] == ["torch>=2.10"]


def test_a_source_distribution_has_what_a_build_needs(clone, built):
    with tarfile.open(built["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = sources(clone, "*.py") | sources(clone, "*.c") | sources(clone, "*.h")
    assert needed | {"setup.py", "pyproject.toml", "LICENSE", "revdeq/py.typed"} <= names


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_what_was_built_imports_without_numpy_and_prints_nothing(clone, built, kind, tmp_path):
    with zipfile.ZipFile(built[kind]) as wheel:
        wheel.extractall(tmp_path / "site")
    packages = str(Path(torch.__file__).parents[1])  # with no .pth file of theirs, which would find this clone
    code = f"""
import site, sys
site.addsitedir({str(tmp_path / "site")!r})
sys.path.append({packages!r})
sys.modules["numpy"] = None
import revdeq, torch
print(revdeq.kernels.__file__)
revdeq.solve(torch.tanh, torch.ones(3)).z
"""
    command = [sys.executable, "-S", "-W", "ignore:the C kernel was not built", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    found = tmp_path / "site/revdeq/kernels" if kind == "wheel" else clone / "kernels"
    assert done.stdout.strip() == str(found / "__init__.py")


def test_kernels_under_another_name_say_what_to_import(clone):
    done = subprocess.run([sys.executable, "-c", "import kernels.backends"], cwd=clone, capture_output=True, text=True)
    assert "ImportError" in done.stderr and "import revdeq.kernels" in done.stderr


def test_an_older_torch_is_refused_before_anything_that_it_lacks_is_used(monkeypatch):
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    spec = importlib.util.spec_from_file_location("revdeq_elsewhere", revdeq.__file__)
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu126")
    with pytest.raises(ImportError, match=rf"needs torch {re.escape(oldest)} or later, this is 2\.9\.1"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
