"""Files of a data set: found in a folder, read from there or from an archive, and downloaded."""

import gzip
import hashlib
import lzma
import sys
import tarfile
import urllib.request
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from ..._atomic import replacing

DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile)


class DataError(Exception):
    """Data is missing or invalid. The message names the file, and what was expected."""


class Source(NamedTuple):
    """A file to download: its path in the data folder, its address, and its published checksum."""

    place: str
    url: str
    algorithm: str
    checksum: str


def find(folder: Path, places: Iterable[str], name: str, sources: Iterable[Source]) -> Path:
    """The first of these places in a folder that is an archive, or a folder with the file `name`."""
    for place in (folder / place for place in places):
        if place.is_file() or stored(place, name):
            return place
    lines = (f"\n  {folder / source.place}  from  {source.url}" for source in sources)
    raise DataError(
        f"{folder} has no {name}: put these files there, packed or unpacked, or pass --download{''.join(lines)}"
    )


def stored(place: Path, name: str) -> Path | None:
    """The file that contains `name`: the archive `place`, or a file in that folder, which may be compressed by xz."""
    candidates = (place, place / name, place / f"{name}.xz")
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def read(place: Path, names: Sequence[str]) -> list[bytes]:
    """The contents of files in a folder or in an archive."""
    try:
        if not place.is_file():
            contents = {name: _unpacked(file) for name in names if (file := stored(place, name))}
        elif place.suffix == ".zip":
            with zipfile.ZipFile(place) as archive:
                members = {Path(member).name: member for member in archive.namelist()}
                contents = {name: archive.read(members[name]) for name in names if name in members}
        else:
            with tarfile.open(place) as tar:  # in one pass: to go back is to decompress it again
                contents = {
                    Path(member.name).name: packed.read()
                    for member in tar
                    if Path(member.name).name in names and (packed := tar.extractfile(member))
                }
    except DAMAGE as error:
        raise DataError(f"{place} is damaged, or of another kind: download it again") from error
    if missing := [name for name in names if name not in contents]:
        raise DataError(f"{place} has no {', '.join(missing)}, which belongs to the data set")
    return [contents[name] for name in names]


def _unpacked(file: Path) -> bytes:
    return lzma.decompress(file.read_bytes()) if file.suffix == ".xz" else file.read_bytes()


def download(sources: Iterable[Source], folder: Path) -> None:
    """Download the files that are not in the folder yet."""
    for source in sources:
        target = folder / source.place
        try:
            if not target.exists():
                _download(source, target)
        except (OSError, DataError) as error:
            raise DataError(f"{source.url} could not be downloaded: {error}. Put it into {target} yourself") from error


def _download(source: Source, target: Path) -> None:
    request = urllib.request.Request(source.url, headers={"User-Agent": "revdeq"})  # some servers refuse Python
    target.parent.mkdir(parents=True, exist_ok=True)
    with urllib.request.urlopen(request, timeout=30) as answer, replacing(target) as file:
        size, quiet = int(answer.headers.get("Content-Length") or 0), not sys.stderr.isatty()
        digest = hashlib.new(source.algorithm)
        with tqdm(total=size, unit="B", unit_scale=True, desc=target.name, disable=quiet) as bar:
            while block := answer.read(1 << 20):
                file.write(block)
                digest.update(block)
                bar.update(len(block))
        if digest.hexdigest() != source.checksum:
            raise DataError(f"its {source.algorithm} is {digest.hexdigest()} instead of {source.checksum}")
