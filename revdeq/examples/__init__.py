"""Programs to copy from: `python -m revdeq.examples` lists them."""

import importlib.util

EXTRAS = {"sklearn": "demo", "torchdeq": "torchdeq"}
"""Packages that examples need, and the extra of revdeq that has each."""


def needs(*packages: str) -> None:
    """Ends the program, and says what to install, if one of these packages is missing."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        extras = ",".join(EXTRAS[name] for name in missing)
        raise SystemExit(f"This example needs {', '.join(missing)}: pip install 'revdeq[{extras}]'")
