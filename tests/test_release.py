"""What is built, installed and published."""

import base64
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import revdeq

ROOT = Path(__file__).parents[1]
WORKFLOWS = ROOT / ".github" / "workflows"
pytestmark = pytest.mark.skipif(not (ROOT / "kernels").exists(), reason="not in a repository")


def test_the_newest_entry_of_the_changelog_is_of_this_version():
    version, date = re.search(r"^## (\S+)(?: \((.+)\))?$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M).groups()
    assert version == revdeq.__version__.removesuffix(".dev0")
    assert (date == "unreleased") == revdeq.__version__.endswith(".dev0")
    assert date == "unreleased" or re.fullmatch(r"\d{4}-\d\d-\d\d", date)


def test_every_supported_python_is_tested():
    if not WORKFLOWS.exists():
        pytest.skip("a source distribution has no workflows")
    workflow = (WORKFLOWS / "tests.yml").read_text(encoding="utf-8")
    tested = re.findall(r'"(3\.\d+)"', re.search(r"python: \[(.+)\]", workflow).group(1))
    minors = re.search(r"range\((\d+), (\d+)\)", (ROOT / "setup.py").read_text(encoding="utf-8")).groups()
    assert tested == [f"3.{minor}" for minor in range(*map(int, minors))]
    assert "os: [ubuntu-latest, macos-latest, windows-latest]" in workflow


def test_the_oldest_torch_is_the_same_everywhere():
    oldest = re.search(r'"torch>=([\d.]+)"', (ROOT / "setup.py").read_text(encoding="utf-8")).group(1)
    assert f"torch {oldest} or later" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"needs torch {oldest} or later" in (ROOT / "revdeq" / "__init__.py").read_text(encoding="utf-8")
    assert f"\n| {oldest}.0 |" in (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    if WORKFLOWS.exists():
        assert f'"torch=={oldest}.0"' in (WORKFLOWS / "tests.yml").read_text(encoding="utf-8")


def test_an_older_torch_is_refused_at_import(monkeypatch):
    """Before anything that it lacks is used. A copy under another name could not import the rest."""
    spec = importlib.util.spec_from_file_location("revdeq_elsewhere", revdeq.__file__)
    for version in ("1.13.1", "2.6.0", "2.9.1+cu126"):
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.raises(ImportError, match=rf"needs torch 2\.10 or later, this is {re.escape(version)}: pip"):
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
    for version in ("2.10.0a0+5228986c39.nv25.6", "2.15.0", "3.0.0"):
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.raises(ImportError, match="relative import|No module named 'revdeq_elsewhere'"):
            spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_third_party_actions_are_pinned():
    for workflow in WORKFLOWS.glob("*.yml"):
        for action in re.findall(r"uses: (\S+)", workflow.read_text(encoding="utf-8")):
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}|\$/\S+", action), action  # $ is this repository


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the repository in a folder with its name, which contains the library of an earlier build."""
    folder = tmp_path_factory.mktemp("parent") / "revdeq"
    folder.mkdir()
    (folder / ".ci").mkdir()
    for name in (".ci/build_backend.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert setup.count('"-O2"') == 1
    (folder / "setup.py").write_text(setup.replace('"-O2"', '"-O0"'), encoding="utf-8")  # takes a fifth of the time
    shutil.copytree(ROOT / "revdeq", folder / "revdeq", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "kernels", folder / "kernels", ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.pyd"))
    for stale in ("_cpu.cpython-39-x86_64-linux-gnu.so", "_cpu.pyd"):
        (folder / "kernels" / stale).write_bytes(b"of another build")
    return folder


@pytest.fixture(scope="module")
def editable(clone, tmp_path_factory):
    """The wheel that `pip install -e` installs."""
    pytest.importorskip("setuptools", minversion="70.1", reason="needs setuptools that makes wheels by itself")
    out = tmp_path_factory.mktemp("wheel")
    code = f"import sys; sys.path.insert(0, '.ci'); import build_backend; build_backend.build_editable({str(out)!r})"
    result = subprocess.run([sys.executable, "-c", code], cwd=clone, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


def test_the_editable_wheel_has_our_finder_only_and_its_record_is_right(editable):
    with zipfile.ZipFile(editable) as wheel:
        content = {name: wheel.read(name) for name in wheel.namelist()}
    (record,) = (name for name in content if name.endswith(".dist-info/RECORD"))
    rows = dict(row.split(",", 1) for row in content[record].decode().splitlines())
    assert rows.pop(record) == ","
    del content[record]
    assert rows == {
        name: f"sha256={base64.urlsafe_b64encode(hashlib.sha256(x).digest()).decode().rstrip('=')},{len(x)}"
        for name, x in content.items()
    }
    assert [name for name in content if ".dist-info/" not in name] == [
        "__editable___revdeq_finder.py",
        "__editable__.revdeq.pth",
    ]


def test_the_c_library_is_for_all_pythons_without_debug_information_and_replaces_older_ones(clone, editable):
    libraries = list((clone / "kernels").glob("_cpu.*"))
    if not libraries:
        pytest.skip("there is no C compiler")
    (library,) = libraries
    assert library.name == ("_cpu.pyd" if sys.platform == "win32" else "_cpu.abi3.so")
    binary = library.read_bytes()
    assert b"revdeq_relax" in binary
    for unwanted in (b".debug_info", b"PyInit", str(clone).encode()):
        assert unwanted not in binary


@pytest.fixture(scope="module")
def site(editable, tmp_path_factory):
    """A site with the editable wheel, and with another package that has the name of a folder of the clone."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(editable) as wheel:
        wheel.extractall(folder)
    (folder / "kernels").mkdir()
    (folder / "kernels" / "__init__.py").write_text("from . import hub")
    (folder / "kernels" / "hub.py").touch()
    return folder


def answer(code, folder, site, *path):
    """The output of Python in a folder, with a site and more folders on its path, and no other packages."""
    code = f"import site; site.addsitedir({str(site)!r}); {code}"
    command = [sys.executable, "-S", "-c", code]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


FOUND = "import importlib.util; print(importlib.util.find_spec('revdeq').origin)"


def test_an_editable_installation_is_found_everywhere(clone, site, tmp_path):
    """In the parent folder of the clone, the clone looks like an empty package, which Python prefers to what a finder
    at the end of the list finds."""
    for folder in (tmp_path, clone.parent, clone, clone / "kernels"):
        assert Path(answer(FOUND, folder, site)) == clone / "revdeq" / "__init__.py"


def test_another_clone_on_the_path_goes_before_an_editable_installation(clone, site, tmp_path):
    other, later = tmp_path / "other", tmp_path / "later"
    for folder in (other, later):
        (folder / "revdeq").mkdir(parents=True)
        (folder / "revdeq" / "__init__.py").touch()
    assert Path(answer(FOUND, tmp_path, site, other)) == other / "revdeq" / "__init__.py"
    assert Path(answer(FOUND, other, site)) == other / "revdeq" / "__init__.py"
    code = f"site.addsitedir({str(later)!r}); {FOUND}"  # like system packages that a .venv can see
    assert Path(answer(code, tmp_path, site)) == clone / "revdeq" / "__init__.py"


def test_a_package_of_others_named_kernels_is_not_hidden(clone, site, tmp_path):
    """transformers imports Hugging Face's `kernels`."""
    code = "import kernels, kernels.hub; print(kernels.__file__); assert kernels.hub is kernels.__dict__['hub']"
    for folder in (tmp_path, clone.parent, clone):
        assert Path(answer(code, folder, site)) == site / "kernels" / "__init__.py"
    code = "import importlib.util; print(importlib.util.find_spec('kernels'))"
    assert answer(code, clone.parent, tmp_path) == "None"


def test_without_that_package_a_checkout_has_none_either(clone, tmp_path):
    """transformers checks whether it exists, and its version."""
    code = """
import importlib, kernels
print(getattr(kernels, "__version__", "none"))
for name in ("kernels.backends", "kernels.cpu"):
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    raise SystemExit(f"there is {name}")
"""
    assert answer(code, clone, tmp_path) == "none"


def test_without_docstrings_and_assertions():
    program = """
import revdeq, torch
f, z0, x = lambda z, x: 0.5 * z + x, torch.zeros(3, 4), torch.ones(3, 4, requires_grad=True)
deq = revdeq.RevDEQ(f, max_steps=2)
deq(x).sum().backward()
print(deq.tune(x).beta != 0.5, revdeq.verify(f, z0, x).exact, revdeq.solve(f, z0, x).steps)
"""
    done = subprocess.run([sys.executable, "-OO", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True True 8"
