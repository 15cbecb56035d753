"""Files of a data set, in a folder or in an archive, plain or compressed."""

import gzip
import hashlib
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

COMPRESSED: dict[str, Callable[..., IO[Any]]] = {".gz": gzip.open, ".xz": lzma.open}
ARCHIVES = (".tar.gz", ".tgz", ".tar.xz", ".tar", ".zip")
DAMAGE = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, tarfile.TarError, zipfile.BadZipFile)


class DataError(Exception):
    """Data is missing or invalid; the message names the file and what was expected."""


def is_archive(path: Path) -> bool:
    return path.name.endswith(ARCHIVES) and path.is_file()


def stored(path: Path, name: str) -> Path | None:
    """The file on disk that contains `name`: an archive, the file itself, or a compressed version of it."""
    if is_archive(path):
        return path
    candidates = [path / name, *(path / (name + suffix) for suffix in COMPRESSED)]
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def read(path: Path, names: Sequence[str]) -> dict[str, bytes]:
    """The contents of those of the files `names` that exist in the folder or archive `path`."""
    try:
        if not is_archive(path):
            return {name: _unpacked(file) for name in names if (file := stored(path, name))}
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                found = {Path(member).name: member for member in archive.namelist()}
                return {name: archive.read(found[name]) for name in names if name in found}
        with tarfile.open(path) as tar:  # one pass: seeking back in a compressed archive decompresses it again
            contents = {}
            for member in tar:
                if member.isfile() and Path(member.name).name in names:
                    packed = tar.extractfile(member)
                    assert packed is not None
                    contents[Path(member.name).name] = packed.read()
            return contents
    except DAMAGE as error:
        raise damaged(path, error) from error


def _unpacked(file: Path) -> bytes:
    opener = COMPRESSED.get(file.suffix)
    if opener is None:
        return file.read_bytes()
    try:
        with opener(file, "rb") as unpacked:
            return unpacked.read()
    except DAMAGE as error:
        raise damaged(file, error) from error


def damaged(file: Path, error: Exception) -> DataError:
    return DataError(
        f"{file} ({file.stat().st_size:,} bytes) cannot be unpacked: {error}. It is truncated, damaged or of "
        f"another type: download it again"
    )


def checksum(file: Path) -> bytes:
    digest = hashlib.sha256()
    with open(file, "rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.digest()
