"""`python -m revdeq.examples` lists the examples: the first line of each docstring, and how long it takes."""

import ast
from pathlib import Path

from . import PACKAGES, __path__

FOLDER = Path(__path__[0])

print("Complete programs to copy from. Run one with python -m revdeq.examples.NAME\n")
for path in sorted(FOLDER.glob("[!_]*.py")):
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    print(f"  {path.stem:20} {text.splitlines()[0]} ({text.rpartition('# ')[2]})")
print(f"\nSome need {' or '.join(PACKAGES.values())}. Times are those of two cores of a CPU. Source: {FOLDER}")
