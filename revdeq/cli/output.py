"""What commands print: output that may be closed early, as by `| head -1`, and how to install what is missing."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def while_it_is_read() -> Iterator[None]:
    """Context manager around a program: it ends without a traceback when its output is closed."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _is_closed():  # another pipe
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's own flush at exit
        sys.exit(1)


def _is_closed() -> bool:
    try:
        print(flush=True)
    except BrokenPipeError:
        return True
    return False


def installing(modules: Sequence[str]) -> str:
    """How to install these modules. Packages are named, because another project on PyPI is also called revdeq."""
    return "pip install " + " ".join({"sklearn": "scikit-learn", "PIL": "pillow"}.get(name, name) for name in modules)
