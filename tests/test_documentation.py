"""Everything public is documented, in one form, and the documentation is correct."""

import doctest
import importlib
import inspect
import re
from pathlib import Path

import make_api
import pytest
import torch
from make_api import Entry, documentation, is_error, is_protocol, members, parsed, public
from sample_data import write_cifar_binary, write_encoding, write_wikitext
from spectrum import best_coefficients, rate
from torch import nn

import revdeq
from revdeq.training.data import DataSet

pytest.importorskip("torchdeq", reason="torchdeq is not installed")

ROOT = Path(__file__).parent.parent
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ENTRIES = {
    f"{module}.{entry.name}": entry
    for module in make_api.MODULES
    for of_module in public(importlib.import_module(module))
    for entry in (of_module, *(members(of_module.thing) if isinstance(of_module.thing, type) else ()))
}
EVERY = pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)


def prelude():
    """The names that examples may use."""

    class Block(nn.Module):
        def __init__(self, channels=8):
            super().__init__()
            self.linear = nn.Linear(channels, channels)

        def forward(self, z, x):
            return torch.tanh(self.linear(z) + x)

    torch.manual_seed(0)
    tensors = {"x": torch.randn(4, 8), "z0": torch.zeros(4, 8)}
    return {"torch": torch, "nn": nn, "Path": Path, "revdeq": revdeq, "Block": Block, "f": Block(), **tensors}


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Small data sets in the official formats."""
    folder = tmp_path_factory.mktemp("data")
    write_cifar_binary(folder)
    write_wikitext(folder, words=4000)
    write_encoding(folder)
    return folder


@pytest.fixture
def workplace(data, tmp_path, monkeypatch):
    """The folder that an example runs in, with the data sets in `data`."""
    (tmp_path / "data").symlink_to(data)
    monkeypatch.chdir(tmp_path)


def is_function(thing):
    return not isinstance(thing, (type, property)) and callable(thing)


# the form


@EVERY
def test_each_public_name_says_what_it_is_and_takes(entry: Entry):
    blocks = {block.title: block for block in parsed(documentation(entry))}
    assert blocks[""].text, "there is no docstring"
    if not callable(entry.thing) or is_error(entry.thing) or is_protocol(entry.thing):
        return
    described = {**blocks.get("Args", make_api.Block("", "", {})).entries}
    if isinstance(entry.thing, type):
        described |= blocks.get("Attributes", make_api.Block("", "", {})).entries
    taken = [p.name for p in make_api.parameters(entry.thing)]
    assert [name for name in taken if not described.get(name)] == [], "an argument has no description"
    if is_function(entry.thing):
        assert [name for name in described if name not in taken] == [], "there is no such argument"


@EVERY
def test_each_public_function_says_what_it_returns_and_has_an_example(entry: Entry):
    titles = [block.title for block in parsed(documentation(entry))]
    if is_function(entry.thing) and inspect.signature(entry.thing).return_annotation is not None:
        assert "Returns" in titles
    if (
        inspect.ismodule(entry.owner)
        and callable(entry.thing)
        and not (is_error(entry.thing) or is_protocol(entry.thing))
    ):
        assert "Example" in titles


@pytest.mark.parametrize("entry", [e for e in ENTRIES.values() if isinstance(e.thing, type)], ids=lambda e: e.name)
def test_methods_are_documented_here_or_by_what_they_implement(entry: Entry):
    inherited = {member.name.split(".")[1] for base in entry.thing.__mro__ for member in members(base)}
    documented = {"forward", "extra_repr", *vars(DataSet), *inherited}
    methods = [
        k for k, v in vars(entry.thing).items() if inspect.isroutine(v) or isinstance(v, (property, classmethod))
    ]
    assert [name for name in methods if not name.startswith("_") and name not in documented] == []


def test_options_are_documented_where_they_are_taken():
    everywhere, of_a_gradient = "beta", "backward_steps"
    for thing in (revdeq.solve, revdeq.RevDEQ, revdeq.verify, revdeq.tune):
        (arguments,) = [b.entries for b in parsed(thing.__doc__) if b.title == "Args"]
        assert arguments[everywhere]
        assert (of_a_gradient in arguments) == (thing in (revdeq.solve, revdeq.RevDEQ))


# the page


def test_the_page_is_what_the_docstrings_say():
    assert make_api.PAGE.read_text(encoding="utf-8") == make_api.page(), "run make docs"


# examples


@EVERY
def test_examples_in_docstrings_run(entry: Entry, workplace):
    text = "\n".join(block.text for block in parsed(documentation(entry)) if block.title == "Example")
    test = doctest.DocTestParser().get_doctest(text, prelude(), entry.name, None, None)
    if "Example:" in documentation(entry):
        assert test.examples, "an example has lines that begin with >>>"
    said = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert result.failed == 0, "".join(said)


BLOCKS = [
    pytest.param(code, id=f"{path.name}-{i}")
    for path in TEXTS
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL))
    if path.name != "api.md"  # its examples are those of the docstrings
]


@pytest.mark.parametrize("code", BLOCKS)
def test_examples_in_texts_run(code, workplace):
    exec(compile(code, "example", "exec"), prelude())


# numbers


def test_the_table_of_the_theory_is_what_the_formulas_give():
    rows = re.findall(
        r"^\|[^|]*\| ([-\d., ]+) \| (.*) \|$", (ROOT / "docs/theory.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    tested = 0
    for spectrum, cells in rows:
        if spectrum.count(",") != 2:
            continue
        p, q, c = map(float, spectrum.split(","))
        pair, *rates = cells.split(" | ")
        beta, gamma, best = best_coefficients(p, q, c)
        angle = torch.linspace(0, 2 * torch.pi, 721, dtype=torch.float64)
        edge = torch.complex(c + p * angle.cos(), q * angle.sin())
        expected = [best, rate(edge, 0.5), rate(edge, 0.8), edge.abs().max().item()]
        assert [float(x) for x in pair.split(",")] == pytest.approx([beta, gamma], abs=5e-4)  # three digits
        for shown, value in zip(rates, expected, strict=True):
            assert value > 1 if shown == "diverges" else float(shown) == pytest.approx(value, abs=5.1e-4)
        tested += 1
    assert tested == 5


# links and names of files


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


def test_the_contents_of_the_page_lead_to_its_headings():
    text = make_api.PAGE.read_text(encoding="utf-8")
    headings = [make_api.anchor(line.lstrip("# ")) for line in text.splitlines() if line.startswith("##")]
    links = re.findall(r"\]\(#([^)]*)\)", text)
    assert len(links) > 50 and set(links) <= set(headings)
    assert len(set(headings)) == len(headings)


FOLDERS = ("revdeq", "kernels", "tests", "bench", "docs")


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_the_files_that_a_text_names_exist(path):
    """In `code`, a path that begins with a folder of the repository. One with NAME in it is still to be written."""
    named = re.findall(rf"(?:`|\s)((?:{'|'.join(FOLDERS)})/[\w./]+\.\w+)", path.read_text(encoding="utf-8"))
    places = [ROOT / name if "NAME" not in name else (ROOT / name).parent for name in named]
    assert [place for place in places if not place.exists()] == []


MOST = {"option": 2, "backend": 6, "state": 6, "data set": 2, "model": 3, "preset": 1, "kernel": 5}
"""Files that a contributor has to write in to add one."""


@pytest.mark.parametrize("thing", MOST)
def test_few_files_must_change_to_add_something(thing):
    sections = re.split(r"^##+ ", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    (section,) = [text for text in sections if re.match(rf"An? {thing}\b", text)]
    files = re.findall(r"^\d\. `([\w./]+)`:|^\d\. The file", section, re.MULTILINE)
    assert 0 < len(files) <= MOST[thing]
