"""The loaders read the official formats, packed and unpacked, and explain what they cannot read."""

import gzip
import hashlib
import http.server
import lzma
import os
import pickle
import socket
import tarfile
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from sample_data import (
    BATCHES,
    cifar_records,
    python2_pickle,
    sentences,
    write_cifar_binary,
    write_encoding,
    write_wikitext,
)

from revdeq.training import data
from revdeq.training.data import Cifar10, DataError, WikiText, cifar10, download, encoding, wikitext

pytest.importorskip("tiktoken", reason="needs revdeq[train]")
REAL = os.environ.get("REVDEQ_DATA")
real_data = pytest.mark.skipif(not REAL, reason="REVDEQ_DATA is not set")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REVDEQ_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Without a network: the files on the disk must be enough."""
    connect = socket.socket.connect

    def local_only(self, address):
        assert address[0] == "127.0.0.1", f"a connection to {address}"
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)


def write_cifar_python(folder):
    folder = folder / "cifar-10-batches-py"
    folder.mkdir()
    for seed, name in enumerate(BATCHES):
        (folder / name).write_bytes(python2_pickle(*cifar_records(40, seed)))
    return folder


def packed(folder, name):
    archive = folder.parent / name
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, folder.name)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    return archive


def test_every_layout_of_cifar10_gives_the_same_images(tmp_path):
    layouts = [tmp_path / name for name in ("bin", "py", "bin.tar", "py.tar")]
    for layout in layouts:
        layout.mkdir()
    write_cifar_binary(layouts[0])
    write_cifar_python(layouts[1])
    packed(write_cifar_binary(layouts[2]), "cifar-10-binary.tar.gz")
    archive = packed(write_cifar_python(layouts[3]), "cifar-10-python.tar.gz")
    expected_labels, expected_pixels = cifar_records(40, seed=0)
    for place in [*layouts, layouts[0] / "cifar-10-batches-bin", archive]:
        data = Cifar10(place)
        assert data.size == 180 and data.images.dtype == torch.uint8
        valid = np.arange(40) % 10 == 9
        assert np.array_equal(data.labels[:36], expected_labels[~valid])
        assert np.array_equal(data.images[:36].reshape(36, -1), expected_pixels[~valid])
        images, labels = data.evaluated["valid"]
        assert np.array_equal(labels[:4], expected_labels[valid]) and len(labels) == 20
        assert np.array_equal(images[:4].reshape(4, -1), expected_pixels[valid])
        assert np.array_equal(data.evaluated["test"][1], cifar_records(40, seed=5)[0])
        assert "180 training, 20 valid, 40 test images (a subset:" in data.describe()
    whole = Cifar10(layouts[0], held_out=None)
    assert np.array_equal(whole.labels[:40], expected_labels) and whole.splits == ("test",) == (whole.validation,)
    for wrong in (1, 201, 0.1):
        with pytest.raises(DataError, match=f"held_out={wrong}: it must be none, or an integer from 2 to 200"):
            Cifar10(layouts[0], held_out=wrong)


def test_a_pickle_as_python_3_writes_it(tmp_path):
    labels, pixels = cifar_records(3)
    content = pickle.dumps({b"data": pixels, b"labels": labels.tolist()}, protocol=2)
    images, loaded = cifar10.from_pickle(content, "batch")
    assert np.array_equal(loaded, labels) and np.array_equal(images.reshape(3, -1), pixels)


def test_a_pickle_that_calls_something_is_refused(tmp_path):
    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "broken-in"),)

    folder = write_cifar_python(tmp_path)
    (folder / "data_batch_2").write_bytes(pickle.dumps({b"data": Malicious(), b"labels": []}))
    with pytest.raises(DataError, match="data_batch_2 .*mkdir.*malicious"):
        Cifar10(tmp_path)
    assert not (tmp_path / "broken-in").exists()


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "0 bytes, which is not a whole number of CIFAR-10 records of 3,073 bytes"),
        (bytes(3073 + 3072), "6,145 bytes, which is not a whole number"),
        (bytes([11]) + bytes(3072), "label 11: CIFAR-10's are 0 to 9"),
    ],
)
def test_a_wrong_binary_batch_is_named(tmp_path, content, message):
    file = write_cifar_binary(tmp_path) / "data_batch_3.bin"
    file.write_bytes(content)
    with pytest.raises(DataError, match=f"data_batch_3.bin ha.*{message}"):
        Cifar10(tmp_path)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"\x80\x02}(", "is not a batch of CIFAR-10's Python version"),
        (pickle.dumps([1, 2]), "is not a batch of CIFAR-10's Python version"),
        (python2_pickle(*cifar_records(5))[:-700], "is not a batch of CIFAR-10's Python version"),
        (pickle.dumps({b"data": b"", b"labels": [1]}, 4), "expected uint8 of shape"),
        (pickle.dumps({b"data": np.zeros(3), b"labels": [1]}, 2), "array of dtype 'f8': expected u1"),
    ],
)
def test_a_wrong_pickled_batch_is_named(tmp_path, content, message):
    (write_cifar_python(tmp_path) / "test_batch").write_bytes(content)
    with pytest.raises(DataError, match=f"test_batch .*{message}"):
        Cifar10(tmp_path)


def test_a_missing_batch_and_missing_data_are_named(tmp_path):
    with pytest.raises(DataError, match=r"no CIFAR-10 in .*\n.*--download.*\n.*cifar-10-binary.tar.gz  from  https"):
        Cifar10(tmp_path)
    (write_cifar_binary(tmp_path) / "data_batch_4.bin").unlink()
    with pytest.raises(DataError, match="data_batch_1.bin.* but not data_batch_4.bin"):
        Cifar10(tmp_path)


def test_a_truncated_archive_is_named(tmp_path):
    archive = packed(write_cifar_binary(tmp_path), "cifar-10-binary.tar.gz")
    for content in (archive.read_bytes()[:-1000], b"<html>404</html>"):
        archive.write_bytes(content)
        with pytest.raises(DataError, match="cifar-10-binary.tar.gz .*cannot be unpacked"):
            Cifar10(tmp_path)


def test_augmentation_is_a_crop_of_the_padded_image_maybe_flipped():
    images = torch.randint(256, (64, 3, 32, 32), dtype=torch.uint8)
    augmented = cifar10.augment(images, torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(images, [4] * 4)
    seen = set()
    for image, result in zip(padded, augmented, strict=True):
        crops = {
            (dy, dx, flip): (c.flip(-1) if flip else c)
            for dy in range(9)
            for dx in range(9)
            for flip in (False, True)
            for c in [image[:, dy : dy + 32, dx : dx + 32]]
        }
        (match,) = (key for key, crop in crops.items() if torch.equal(crop, result))
        seen.add(match)
    rows, columns, flips = ({key[i] for key in seen} for i in range(3))
    assert rows == columns == set(range(9)) and flips == {False, True}
    again = cifar10.augment(images, torch.Generator().manual_seed(0))
    assert torch.equal(again, augmented)
    assert not torch.equal(cifar10.augment(images, torch.Generator().manual_seed(1)), augmented)


def test_normalisation_is_per_channel():
    image = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    image[:, 1] = 255
    expected = torch.tensor([-0.4914 / 0.2470, (1 - 0.4822) / 0.2435, -0.4465 / 0.2616])
    torch.testing.assert_close(cifar10.normalise(image)[0, :, 3, 5], expected)


def repacked(folder, packing):
    if packing == "zip":
        with zipfile.ZipFile(f"{folder}-v1.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for file in folder.iterdir():
                archive.write(file, f"{folder.name}/{file.name}")
                file.unlink()
        folder.rmdir()
    elif packing != "plain":
        for file in list(folder.iterdir()):
            with {"xz": lzma, "gz": gzip}[packing].open(f"{file}.{packing}", "wb") as target:
                target.write(file.read_bytes())
            file.unlink()


@pytest.mark.parametrize("packing", ["plain", "xz", "gz", "zip"])
@pytest.mark.parametrize("variant", ["tokens", "raw"])
def test_every_layout_of_wikitext_gives_the_same_tokens(tmp_path, packing, variant):
    encoder = encoding.load(write_encoding(tmp_path))
    repacked(
        write_wikitext(tmp_path, "wikitext-2" if variant == "tokens" else "wikitext-2-raw", 1500, variant), packing
    )
    data = WikiText("wikitext-2", tmp_path, length=16)
    assert encoder.decode(data.tokens["train"].tolist()) == sentences(1500, 0)
    assert encoder.decode(data.tokens["test"].tolist()) == sentences(200, 2)
    assert isinstance(data.tokens["train"], np.memmap) and data.tokens["train"].dtype == np.uint16


def test_tokens_are_encoded_once_and_again_when_a_source_changes(tmp_path, monkeypatch, cache):
    encoder, folder = write_encoding(tmp_path), write_wikitext(tmp_path)
    first = WikiText("wikitext-2", tmp_path, 16).tokens
    encode, calls = encoding.encode, []
    monkeypatch.setattr(encoding, "encode", lambda *a: calls.append(1) or encode(*a))
    WikiText("wikitext-2", tmp_path, 16)
    assert not calls
    (folder / "wiki.valid.tokens").write_text(sentences(300, 9))
    changed = WikiText("wikitext-2", tmp_path, 16).tokens
    assert len(calls) == 1 and len(changed["valid"]) != len(first["valid"])
    for file in [*encoder.iterdir()]:
        file.unlink()
    encoder.rmdir()
    write_encoding(tmp_path, merges=[("a", "n")])
    WikiText("wikitext-2", tmp_path, 16)
    assert len(calls) == 4
    for damage in (lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b[:4] + b"xx" + b[6:]):
        for file in cache.iterdir():
            file.write_bytes(damage(file.read_bytes()))
        again = WikiText("wikitext-2", tmp_path, 16).tokens
        assert encoding.load(tmp_path / "gpt2").decode(again["train"].tolist()) == sentences(1500, 0)
    assert not [file for file in cache.iterdir() if file.suffix == ".part"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    write_encoding(tmp_path), write_wikitext(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REVDEQ_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="cannot be cached in .*REVDEQ_CACHE"):
        WikiText("wikitext-2", tmp_path, 16)


def test_sequences_cover_the_text_and_targets_are_one_ahead(tmp_path):
    write_encoding(tmp_path), write_wikitext(tmp_path)
    data = WikiText("wikitext-2", tmp_path, length=16)
    batches = list(data.evaluation("valid", batch=4))
    expected = data.tokens["valid"].astype(np.int64)
    assert np.array_equal(torch.cat([b.inputs.flatten() for b in batches]), expected[:-1])
    assert np.array_equal(torch.cat([b.targets.flatten() for b in batches]), expected[1:])
    for seed in range(20):
        starts = data.order(torch.Generator().manual_seed(seed))
        assert len(starts) == data.size and starts.min() < 16
        inputs, targets, _ = data.batch(starts, torch.Generator())
        assert inputs.shape == targets.shape == (data.size, 16) and torch.equal(inputs[:, 1:], targets[:, :-1])


def test_a_restricted_vocabulary_keeps_a_distribution_over_all_tokens(tmp_path):
    write_encoding(tmp_path), write_wikitext(tmp_path)
    data = WikiText("wikitext-2", tmp_path, 16, vocabulary=5)
    v = data.vocabulary
    counts = np.bincount(data.tokens["train"], minlength=v.encoded)
    assert v.size == 6 and counts[v.kept].min() >= np.sort(counts)[-5]
    others = v.ids == 5
    assert others.sum() == v.encoded - 5 and (v.surcharge[~others] == 0).all()
    np.testing.assert_allclose(np.exp(-v.surcharge[others]).sum(), 1, rtol=1e-12)  # 1e-12: some hundred roundings
    seen = WikiText("wikitext-2", tmp_path, 16, vocabulary="seen")
    assert (
        seen.vocabulary.size == (counts > 0).sum() + 1 and seen.batch(torch.arange(9), torch.Generator()).surcharge == 0
    )
    assert WikiText("wikitext-2", tmp_path, 16).vocabulary.size == 384  # 263 tokens, up to a multiple of 128
    for wrong in ("sene", 0, -3, True, 2.5, None):
        with pytest.raises(DataError, match=f"vocabulary={wrong!r}"):
            WikiText("wikitext-2", tmp_path, 16, vocabulary=wrong)


@pytest.mark.parametrize("size", [1, 7, 50, 10**6])
def test_a_text_in_chunks_encodes_as_the_whole(tmp_path, size):
    encoder = encoding.load(write_encoding(tmp_path))
    for text in (
        sentences(60),
        "a  \n\n  b \x1c c\u2003d\u00a0 e   ",
        "   ",
        "nospaces" * 9,
        " \n the\n\n and the " * 4,
    ):
        pieces = encoding.chunks(text, size)
        assert "".join(pieces) == text
        encoded = [token for piece in encoder.encode_ordinary_batch(pieces) for token in piece]
        assert encoded == encoder.encode_ordinary(text)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"abc \xff\xfe", "is not UTF-8 text at byte 4"),
        (b" \n ", "is empty"),
        (b"<!DOCTYPE html><p>Not found", "is a web page"),
        (b"the fox", "train has .* tokens, too few for sequences of 16"),
    ],
)
def test_a_wrong_text_is_named(tmp_path, content, message):
    write_encoding(tmp_path)
    (write_wikitext(tmp_path) / "wiki.train.tokens").write_bytes(content)
    with pytest.raises(DataError, match=message):
        WikiText("wikitext-2", tmp_path, 16)


@pytest.mark.parametrize("packing", ["xz", "gz", "zip"])
def test_a_truncated_text_is_named(tmp_path, packing):
    write_encoding(tmp_path)
    repacked(write_wikitext(tmp_path), packing)
    file = next(file for file in tmp_path.rglob(f"*.{packing}") if "valid" not in file.name and "test" not in file.name)
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(DataError, match=f"{file.name} .*cannot be unpacked"):
        WikiText("wikitext-2", tmp_path, 16)


def test_missing_text_and_encoding_are_named(tmp_path):
    with pytest.raises(DataError, match=r"no wikitext-103 in .*\n.*\n.*wikitext-103-v1.zip  from  https"):
        WikiText("wikitext-103", tmp_path, 16)
    folder = write_wikitext(tmp_path)
    with pytest.raises(DataError, match=r"no GPT-2 encoding in .*\n.*\n.*encoder.json  from .*\n.*vocab.bpe  from "):
        WikiText("wikitext-2", tmp_path, 16)
    write_encoding(tmp_path)
    (folder / "wiki.valid.tokens").unlink()
    with pytest.raises(DataError, match="has no wiki.valid.tokens"):
        WikiText("wikitext-2", tmp_path, 16)


def test_the_data_folder_must_be_given_and_have_every_split(tmp_path):
    with pytest.raises(DataError, match="cifar10 .*--data DIR"):
        data.load("cifar10", None, {})
    with pytest.raises(DataError, match="wiki.train.tokens"):
        wikitext.text(tmp_path, "wiki.train.tokens")


def test_an_encoding_has_to_fit_into_16_bits(tmp_path, monkeypatch):
    monkeypatch.setattr("tiktoken.load.data_gym_to_mergeable_bpe_ranks", lambda *files: range(1 << 16))
    with pytest.raises(DataError, match="encoder.json .*65,536 tokens.*16 bits"):
        encoding.load(tmp_path)


@pytest.mark.parametrize("name, change", [("vocab.bpe", b"x y\n"), ("encoder.json", b"}"), ("encoder.json", b"\xff")])
def test_a_wrong_encoding_is_named(tmp_path, name, change):
    folder = write_encoding(tmp_path)
    with open(folder / name, "ab") as file:
        file.write(change)
    with pytest.raises(DataError, match=r"vocab.bpe and .*encoder.json are not a byte-pair encoding(.|\n)*sha256"):
        encoding.load(folder)


def test_the_encoding_is_read_afresh_and_leaves_no_copy(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "tiktoken"))
    encoding.load(write_encoding(tmp_path))
    assert not (tmp_path / "tmp").exists() and not (tmp_path / "tiktoken").exists()
    assert os.environ["TIKTOKEN_CACHE_DIR"] == str(tmp_path / "tiktoken")


@pytest.fixture
def server(tmp_path):
    served = tmp_path / "served"
    served.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(served))

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield served, f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


def test_a_download_is_checked_and_falls_back_to_another_address(tmp_path, server):
    served, url = server
    (served / "good.zip").write_bytes(b"content")
    (served / "bad.zip").write_bytes(b"another")
    right = hashlib.md5(b"content").hexdigest()
    target = tmp_path / "data" / "set.zip"

    def fetch(*names):
        source = download.Source("set.zip", tuple(f"{url}/{name}" for name in names), "md5", right)
        download.fetch([source], tmp_path / "data")

    with pytest.raises(DataError, match=rf"set.zip could not be downloaded.*\n.*bad.zip: md5 is .* expected {right}"):
        fetch("bad.zip")
    with pytest.raises(DataError, match=r"put it there:\n.*missing.zip: HTTP Error 404"):
        fetch("missing.zip")
    assert not target.exists() and not list(target.parent.iterdir())
    fetch("missing.zip", "bad.zip", "good.zip")
    assert target.read_bytes() == b"content"
    fetch("missing.zip")  # it exists, so nothing is downloaded


def test_without_a_network_the_message_says_what_to_fetch(tmp_path):
    closed = download.Source("a.zip", ("http://127.0.0.1:9/a.zip",), "md5", "")
    with pytest.raises(DataError, match=r"a.zip could not be downloaded.*\n  http"):
        download.fetch([closed], tmp_path)


@real_data
def test_the_sample_of_cifar10():
    data = Cifar10(Path(REAL))
    assert len(data.labels) % 9 == 0 and len(data.labels.unique()) == 10
    normal = cifar10.normalise(data.images)
    # A sample of some thousand images: the channels' means are within a tenth of a deviation of the published ones.
    assert normal.mean((0, 2, 3)).abs().max() < 0.1 and (normal.std((0, 2, 3)) - 1).abs().max() < 0.1


@real_data
def test_the_sample_of_wikitext_2():
    data = WikiText("wikitext-2", Path(REAL), 64, vocabulary="seen")
    counts = [len(data.tokens[split]) for split in wikitext.SPLITS]
    assert counts == [2_448_382, 258_659, 295_877]
    assert data.vocabulary.encoded == 50_257
    assert (
        encoding.load(data.encoding).decode(data.tokens["train"][:40].tolist()).startswith(" \n = Valkyria Chronicles")
    )


@real_data
def test_the_sample_of_the_encoding_is_the_published_one():
    for source in encoding.SOURCES:
        assert hashlib.sha256((Path(REAL) / source.place).read_bytes()).hexdigest() == source.checksum
