"""Where the data sets come from, and how to fetch them."""

import hashlib
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

from ..._atomic import replacing
from .files import DataError


class Source(NamedTuple):
    """A file by its place below the data folder, its addresses, and the checksum that its publisher states."""

    place: str
    urls: tuple[str, ...]
    algorithm: str
    checksum: str


GPT2 = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
ENCODING = (
    Source(
        "gpt2/encoder.json",
        (f"{GPT2}/encoder.json",),
        "sha256",
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    ),
    Source(
        "gpt2/vocab.bpe",
        (f"{GPT2}/vocab.bpe",),
        "sha256",
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    ),
)


def wikitext(file: str, md5: str) -> Source:
    urls = (
        f"https://wikitext.smerity.com/{file}",
        f"https://s3.amazonaws.com/research.metamind.io/wikitext/{file}",
    )
    return Source(file, urls, "md5", md5)


SOURCES = {
    "cifar10": (
        Source(
            "cifar-10-binary.tar.gz",
            ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
            "md5",
            "c32a1d4ab5d03f1284b67883e8d87530",
        ),
    ),
    "wikitext-2": (wikitext("wikitext-2-v1.zip", "542ccefacc6c27f945fb54453812b3cd"),),
    "wikitext-103": (wikitext("wikitext-103-v1.zip", "9ddaacaf6af0710eda8c456decff7832"),),
    "gpt2": ENCODING,
}


def instructions(name: str, folder: Path) -> str:
    lines = [f"  {folder / source.place}  from  {source.urls[0]}" for source in SOURCES[name]]
    return "\n".join(["Put it there, packed or unpacked, or let `train --download` fetch it:", *lines])


def fetch(name: str, folder: Path) -> None:
    """Every file of the data set `name` that is not below `folder` yet, or a DataError that says what to do."""
    for source in SOURCES[name]:
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
    raise DataError("\n".join([f"{target} could not be fetched. Fetch it by other means and put it there:", *reasons]))


def _fetch_from(url: str, source: Source, target: Path) -> None:
    from tqdm import tqdm

    request = urllib.request.Request(url, headers={"User-Agent": "revdeq"})  # some mirrors refuse Python's own name
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
                        f"{source.algorithm} is {digest.hexdigest()}, expected {source.checksum}: what was sent is "
                        f"damaged or another file"
                    )
