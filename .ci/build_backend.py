"""Builds with setuptools, except for editable installations, which use our own finder.

With the clone on the path, which is one of setuptools' ways, `kernels` would hide Hugging Face's package of that name.
The finder that is another one of them comes after the current folder: in the one that holds the clone, `import revdeq`
would find the clone itself, as an empty namespace.
"""

import base64
import hashlib
import zipfile
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

FINDER = f'''"""Finds revdeq in the clone that `pip install -e` was given."""

import os
import sys
from importlib.machinery import PathFinder

HERE = os.path.dirname(__file__)


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        """As if the clone came after what is on the path before this folder, with nothing but this package in it."""
        if name != "revdeq":
            return None
        end = sys.path.index(HERE) if HERE in sys.path else len(sys.path)
        return PathFinder.find_spec(name, [*sys.path[:end], {str(Path(__file__).parent.parent.resolve())!r}], target)


sys.meta_path.insert(0, Finder)
'''
OURS = {
    "__editable___revdeq_finder.py": FINDER.encode(),
    "__editable__.revdeq.pth": b"import __editable___revdeq_finder\n",
}


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """setuptools compiles, and describes the package; what it would find it by is replaced."""
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    wheel = Path(wheel_directory, name)
    with zipfile.ZipFile(wheel) as made:
        about = {member: made.read(member) for member in made.namelist() if ".dist-info/" in member}
    (record,) = (member for member in about if member.endswith("/RECORD"))
    del about[record]
    files = OURS | about
    rows = [f"{member},sha256={_digest(content)},{len(content)}" for member, content in files.items()]
    files[record] = "\n".join([*rows, f"{record},,", ""]).encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as ours:
        for member, content in files.items():
            ours.writestr(member, content)
    return name


def _digest(content):
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
