"""Programs to copy from: `python -m revdeq.examples` lists them."""

import importlib.util

EXTRAS = {"sklearn": "demo", "torchdeq": "torchdeq"}
"""Packages that examples need, and the extra of revdeq that installs each."""


def needs(*packages: str) -> None:
    """Exit with a message if one of these packages is not installed."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        extras = ",".join(EXTRAS[name] for name in missing)
        raise SystemExit(f"This example needs {', '.join(missing)}: pip install 'revdeq[{extras}]'")
