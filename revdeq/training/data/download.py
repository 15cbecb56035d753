"""Downloads the files of a data set."""

import hashlib
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ..._atomic import replacing
from .files import DataError


class Source(NamedTuple):
    """A file: its path in the data folder, its URLs, and its published checksum."""

    place: str
    urls: tuple[str, ...]
    algorithm: str
    checksum: str


def instructions(sources: Iterable[Source], folder: Path) -> str:
    lines = [f"  {folder / source.place}  from  {source.urls[0]}" for source in sources]
    return "\n".join(["Put it there, packed or unpacked, or use --download with train or evaluate:", *lines])


def fetch(sources: Iterable[Source], folder: Path) -> None:
    """Download the files that are not in `folder` yet. A DataError says what to do if that fails."""
    for source in sources:
        if not (folder / source.place).exists():
            _fetch(source, folder / source.place)


def _fetch(source: Source, target: Path) -> None:
    reasons = []
    for url in source.urls:
        try:
            _fetch_from(url, source, target)
            return
        except (urllib.error.URLError, OSError, DataError) as error:
            reasons.append(f"  {url}: {error}")
    raise DataError("\n".join([f"{target} could not be downloaded. Download it yourself and put it there:", *reasons]))


def _fetch_from(url: str, source: Source, target: Path) -> None:
    from tqdm import tqdm

    request = urllib.request.Request(url, headers={"User-Agent": "revdeq"})  # some mirrors refuse Python's default
    with urllib.request.urlopen(request, timeout=30) as answer:
        target.parent.mkdir(parents=True, exist_ok=True)
        digest, size = hashlib.new(source.algorithm), int(answer.headers.get("Content-Length") or 0)
        with tqdm(
            total=size or None, unit="B", unit_scale=True, desc=target.name, disable=not sys.stderr.isatty()
        ) as bar:
            with replacing(target) as file:
                while block := answer.read(1 << 20):
                    file.write(block)
                    digest.update(block)
                    bar.update(len(block))
                if digest.hexdigest() != source.checksum:
                    raise DataError(
                        f"{source.algorithm} is {digest.hexdigest()}, expected {source.checksum}: the download is "
                        f"damaged or a different file"
                    )
