"""`python -m revdeq.examples`: what there is, from the first line of each docstring. Nothing else of them is read."""

import ast
import pkgutil
from pathlib import Path

from . import EXTRAS, __path__

print("Programs to copy from. To run one: python -m revdeq.examples.NAME\n")
for module in pkgutil.iter_modules(__path__):
    text = Path(__path__[0], f"{module.name}.py").read_text(encoding="utf-8")
    if module.name != "__main__":
        print(f"  {module.name:15} {(ast.get_docstring(ast.parse(text)) or '').splitlines()[0]}")
print(f"\nWhat they need: pip install 'revdeq[{','.join(sorted(EXTRAS.values()))}]'")
print(f"Where they are: {__path__[0]}")
