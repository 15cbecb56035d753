"""Writes docs/api.md from the docstrings: `make docs`.

A docstring has a summary, and sections as Google's style has them: `Args:`, `Attributes:`, `Returns:`, `Raises:` and
`Example:`. tests/test_documentation.py checks that each public name has one, that its examples run, and that the page
is the one that this script makes.
"""

import ast
import doctest
import functools
import importlib
import inspect
import itertools
import pkgutil
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

PAGE = Path(__file__).parent / "api.md"
MODULES = (
    "revdeq",
    "revdeq.models",
    "revdeq.baselines",
    "revdeq.torchdeq",
    "revdeq.training",
    "revdeq.training.generate",
    "revdeq.training.classify",
    "revdeq.training.data",
    "revdeq.kernels",
)
"""Those whose `__all__` is documented, in the order of the page."""

LISTS = ("Args", "Attributes", "Raises")
SECTIONS = (*LISTS, "Returns", "Example")
HEADER = """\
# The public interface

*Made by `make docs` from the docstrings: change those.* How to use all this is in the [guide](guide.md).
"""


class Block(NamedTuple):
    """Of a docstring. title: of a section, or "" where it is plain text. entries: of a list, by name."""

    title: str
    text: str
    entries: dict[str, str]


class Entry(NamedTuple):
    """A public name. owner: the module or class that has it."""

    name: str
    thing: Any
    owner: Any


def parsed(docstring: str) -> list[Block]:
    """A docstring by its sections."""
    lines = inspect.cleandoc(docstring).splitlines()
    blocks: list[tuple[str, list[str]]] = [("", [])]
    for line in lines:
        title = line.removesuffix(":")
        if line.endswith(":") and title in SECTIONS:
            blocks.append((title, []))
        elif line and not line.startswith(" ") and blocks[-1][0]:
            blocks.append(("", [line]))
        else:
            blocks[-1][1].append(line)
    return [_block(title, textwrap.dedent("\n".join(body)).strip("\n")) for title, body in blocks]


def _block(title: str, text: str) -> Block:
    entries: dict[str, str] = {}
    if title in LISTS:
        for part in re.split(r"\n(?=\S)", text):
            names, _, described = part.partition(": ")
            entries |= dict.fromkeys(names.split(", "), " ".join(described.split()))
    return Block(title, text, entries)


def public(module: ModuleType) -> list[Entry]:
    """What a module's `__all__` names: functions, classes, constants, errors. Modules have a place of their own."""
    found = [Entry(name, getattr(module, name), module) for name in module.__all__]
    return sorted((entry for entry in found if not isinstance(entry.thing, ModuleType)), key=_rank)


def _rank(entry: Entry) -> int:
    if is_error(entry.thing):
        return 3
    return 2 if not callable(entry.thing) else 1 if isinstance(entry.thing, type) else 0


def members(cls: type) -> Iterator[Entry]:
    """The methods and properties that a class defines and documents itself."""
    for name, thing in vars(cls).items():
        function = getattr(thing, "__func__", thing)
        if not name.startswith("_") and (inspect.isfunction(function) or isinstance(thing, property)) and thing.__doc__:
            yield Entry(f"{cls.__name__}.{name}", function, cls)


def documentation(entry: Entry) -> str:
    """The docstring of a function or class, or the string that follows a constant."""
    if callable(entry.thing) or isinstance(entry.thing, property):
        return entry.thing.__doc__ or ""
    statements = ast.parse(inspect.getsource(_home(entry))).body
    for before, after in itertools.pairwise(statements):
        targets = before.targets if isinstance(before, ast.Assign) else [getattr(before, "target", None)]
        if any(isinstance(t, ast.Name) and t.id == entry.name for t in targets) and isinstance(after, ast.Expr):
            return ast.literal_eval(after.value)
    return ""


def _home(entry: Entry) -> ModuleType:
    """The module of the package that defines a constant, the innermost that has it."""
    package = entry.owner.__name__
    modules = [m for name, m in sys.modules.items() if name == package or name.startswith(f"{package}.")]
    return max((m for m in modules if vars(m).get(entry.name) is entry.thing), key=lambda m: m.__name__.count("."))


def signature(entry: Entry) -> str:
    """As one would type it: names and defaults, without types."""
    made_by_users = "Args:" in (entry.thing.__doc__ or "")
    if isinstance(entry.thing, type) and not made_by_users:
        return ""
    plain = [p.replace(annotation=p.empty) for p in parameters(entry.thing)]
    return str(inspect.Signature(plain))


def is_error(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, BaseException)


def is_protocol(thing: Any) -> bool:
    return getattr(thing, "_is_protocol", False)


def parameters(thing: Any) -> list[inspect.Parameter]:
    found = inspect.signature(thing).parameters.values()
    return [p for p in found if p.name not in ("self", "cls")]


def page() -> str:
    parts = [HEADER, _contents()]
    for name in MODULES:
        module = importlib.import_module(name)
        parts.append(f"## {name}\n")
        parts.append(_text(inspect.getdoc(module) or "") + "\n")
        for entry in public(module):
            parts += _rendered(entry, f"{name}.{entry.name}", "###")
            if isinstance(entry.thing, type):
                for member in members(entry.thing):
                    parts += _rendered(member, f"{name}.{member.name}", "####")
    parts.append(_examples())
    return "\n".join(parts)


def _contents() -> str:
    lines = []
    for name in MODULES:
        links = [
            f"[{entry.name}](#{anchor(f'{name}.{entry.name}')})" for entry in public(importlib.import_module(name))
        ]
        lines.append(f"- [{name}](#{anchor(name)}): {', '.join(links)}")
    return "\n".join([*lines, f"- [Examples](#{anchor('Examples')})", ""])


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _rendered(entry: Entry, heading: str, level: str) -> list[str]:
    parts = [f"{level} {heading}\n"]
    if callable(entry.thing) and (text := signature(entry)):
        parts.append(f"```python\n{_wrapped(heading, text)}\n```\n")
    for block in parsed(documentation(entry)):
        if block.title == "Example":
            parts.append(f"```python\n{_code(block.text)}\n```\n")
        elif block.title == "Returns":
            parts.append(f"**Returns**: {' '.join(block.text.split())}\n")
        elif block.title:
            rows = [f"- **{name}**: {text}" for name, text in _joined(_said_once(entry, block.entries))]
            parts.append(f"**{block.title}**\n\n" + "\n".join(rows) + "\n")
        elif block.text:
            parts.append(_text(block.text) + "\n")
    return parts


def _said_once(entry: Entry, entries: dict[str, str]) -> dict[str, str]:
    """The options are described at `revdeq.solve` and at the layer, and referred to elsewhere."""
    options = _options()
    if entry.name in ("solve", "RevDEQ"):
        return entries
    return {name: "As for `revdeq.solve`." if options.get(name) == text else text for name, text in entries.items()}


@functools.cache
def _options() -> dict[str, str]:
    blocks = parsed(importlib.import_module("revdeq").solve.__doc__)
    return next(block.entries for block in blocks if block.title == "Args")


def _joined(entries: dict[str, str]) -> list[tuple[str, str]]:
    """Neighbours that are described together."""
    rows: list[tuple[str, str]] = []
    for name, text in entries.items():
        if rows and rows[-1][1] == text:
            rows[-1] = (f"{rows[-1][0]}, {name}", text)
        else:
            rows.append((name, text))
    return rows


def _text(text: str) -> str:
    """Paragraphs on one line each, so that a browser breaks them; tables, lists and what is indented as they are."""
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(p if re.match(r"\s|\||- ", p) else " ".join(p.split()) for p in paragraphs)


def _code(text: str) -> str:
    """An example without its prompts, with what it prints as a comment."""
    lines = []
    for example in doctest.DocTestParser().get_examples(text):
        lines.append(example.source.rstrip("\n"))
        lines += [f"# {line}" for line in example.want.splitlines()]
    return "\n".join(lines)


def _wrapped(name: str, arguments: str) -> str:
    line = name + arguments
    if len(line) <= 100:
        return line
    inner = arguments[1:-1]
    return f"{name}(\n" + textwrap.fill(inner, 96, initial_indent="    ", subsequent_indent="    ") + "\n)"


def _examples() -> str:
    """The programs of revdeq.examples, by the first line of their docstrings."""
    package = importlib.import_module("revdeq.examples")
    rows = []
    for module in pkgutil.iter_modules(package.__path__):
        if module.name != "__main__":
            text = Path(package.__path__[0], f"{module.name}.py").read_text(encoding="utf-8")
            first = (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]
            rows.append(f"- [`revdeq.examples.{module.name}`](../revdeq/examples/{module.name}.py): {first}")
    return "## Examples\n\n" + "\n".join([_text(inspect.getdoc(package) or ""), "", *rows]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
