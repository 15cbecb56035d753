"""`python -m revdeq.examples` lists the examples, by the first line of each docstring."""

import ast
import json
from pathlib import Path

from ..cli.output import installing, while_it_is_read
from . import PACKAGES, __path__

FOLDER = Path(__path__[0])


def first_line(path: Path) -> str:
    """The first line of a program's docstring, or the title of a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        title: str = json.loads(text)["cells"][0]["source"][0]
        return f"A notebook: {title.strip('# ').strip()}."
    return (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]


with while_it_is_read():
    print("Complete programs to copy from. Run one with python -m revdeq.examples.NAME\n")
    for path in sorted([*FOLDER.glob("[!_]*.py"), *FOLDER.glob("*.ipynb")]):
        print(f"  {path.name if path.suffix == '.ipynb' else path.stem:19} {first_line(path)}")
    print(f"\nRequirements: {installing(PACKAGES)}")
    print(f"Source: {FOLDER}")
