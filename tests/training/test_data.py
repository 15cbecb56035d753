"""The loaders read the official files, packed and unpacked, download them, and say what is wrong with a file."""

import hashlib
import lzma
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from sample_data import cifar_records, sentences, write_cifar, write_encoding, write_wikitext

from revdeq.training import data
from revdeq.training.data import Cifar10, DataError, WikiText, cifar10, encoding, files


def packed(folder, name):
    """An archive in place of a folder."""
    archive = folder.parent / name
    if name.endswith(".zip"):
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
            for path in folder.iterdir():
                file.write(path, f"{folder.name}/{path.name}")
    else:
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(folder, folder.name)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    return archive


@pytest.mark.parametrize("layout", ["folder", "its parent", "packed", "archive"])
def test_every_layout_of_cifar10_gives_the_same_images(tmp_path, layout):
    place = write_cifar(tmp_path)
    if layout in ("packed", "archive"):
        place = packed(place, "cifar-10-binary.tar.gz")
    dataset = Cifar10(place if layout in ("folder", "archive") else tmp_path)
    labels, pixels = cifar_records(40, seed=0)
    held = np.arange(40) % 10 == 9
    images, found = dataset.parts["train"]
    assert dataset.size == 180 and images.dtype == torch.uint8 and dataset.splits == ("valid", "test")
    assert np.array_equal(found[:36], labels[~held]) and np.array_equal(images[:36].reshape(36, -1), pixels[~held])
    images, found = dataset.parts["valid"]
    assert len(found) == 20 and np.array_equal(images[:4].reshape(4, -1), pixels[held])
    assert np.array_equal(dataset.parts["test"][1], cifar_records(40, seed=5)[0])
    whole = Cifar10(dataset.source, held_out=None)
    assert whole.size == 200 and whole.splits == ("test",)
    with pytest.raises(DataError, match="held_out=201: it must be none, or an integer from 2 to 200"):
        Cifar10(dataset.source, held_out=201)


def test_a_wrong_batch_a_missing_one_and_a_damaged_archive_are_named(tmp_path):
    folder = write_cifar(tmp_path)
    good = (folder / "data_batch_3.bin").read_bytes()
    for content, message in ((b"", "has 0 bytes"), (bytes([11]) + bytes(3072), "has the label 11")):
        (folder / "data_batch_3.bin").write_bytes(content)
        with pytest.raises(DataError, match=f"data_batch_3.bin {message}"):
            Cifar10(tmp_path)
    (folder / "data_batch_3.bin").write_bytes(good)
    (folder / "data_batch_4.bin").rename(tmp_path / "moved")
    with pytest.raises(DataError, match=r"cifar-10-batches-bin has no data_batch_4.bin, which belongs"):
        Cifar10(tmp_path)
    (tmp_path / "moved").rename(folder / "data_batch_4.bin")
    archive = packed(folder, "cifar-10-binary.tar.gz")
    for content in (archive.read_bytes()[:-1000], b"<html>404</html>"):
        archive.write_bytes(content)
        with pytest.raises(
            DataError, match=r"cifar-10-binary.tar.gz is damaged, or of another kind: download it again"
        ):
            Cifar10(tmp_path)


def test_augmentation_is_a_crop_of_the_padded_image_maybe_flipped():
    images = torch.randint(256, (64, 3, 32, 32), dtype=torch.uint8)
    augmented = cifar10.augment(images, torch.Generator().manual_seed(0))
    seen = set()
    for image, result in zip(torch.nn.functional.pad(images, [4] * 4), augmented, strict=True):
        crops = {(dy, dx): image[:, dy : dy + 32, dx : dx + 32] for dy in range(9) for dx in range(9)}
        both = {(*key, flip): crop.flip(-1) if flip else crop for key, crop in crops.items() for flip in (False, True)}
        (match,) = (key for key, crop in both.items() if torch.equal(crop, result))
        seen.add(match)
    rows, columns, flips = ({key[i] for key in seen} for i in range(3))
    assert rows == columns == set(range(9)) and flips == {False, True}
    assert torch.equal(cifar10.augment(images, torch.Generator().manual_seed(0)), augmented)


@pytest.mark.parametrize("packing", ["plain", "xz", "wikitext-2-v1.zip"])
def test_every_layout_of_wikitext_gives_the_same_tokens(tmp_path, packing):
    write_encoding(tmp_path)
    folder = write_wikitext(tmp_path)
    if packing == "xz":
        for file in list(folder.iterdir()):
            Path(f"{file}.xz").write_bytes(lzma.compress(file.read_bytes()))
            file.unlink()
    elif packing != "plain":
        packed(folder, packing)
    dataset = WikiText("wikitext-2", tmp_path, length=16)
    for seed, (split, words) in enumerate({"train": 1500, "valid": 200, "test": 200}.items()):
        assert dataset.encoding.decode(dataset.tokens[split].tolist()) == sentences(words, seed)
    assert isinstance(dataset.tokens["train"], np.memmap) and dataset.tokens["train"].dtype == np.uint16


def test_tokens_are_encoded_once_and_again_when_a_file_changes(tmp_path, monkeypatch):
    merges, folder = write_encoding(tmp_path), write_wikitext(tmp_path)
    encode, calls = encoding.encode, []
    monkeypatch.setattr(encoding, "encode", lambda *a: calls.append(1) or encode(*a))
    for change, expected in (
        (lambda: None, 3),
        (lambda: None, 0),
        (lambda: (folder / "wiki.valid.tokens").write_text(sentences(300, 9)), 1),
        (lambda: write_encoding(tmp_path, merges=["a n"]), 3),
    ):
        change()
        calls.clear()
        tokens = WikiText("wikitext-2", tmp_path, 16).tokens
        assert len(calls) == expected
    assert encoding.load(merges)[1].decode(tokens["valid"].tolist()) == sentences(300, 9)


def test_sequences_cover_the_text_and_targets_are_one_ahead(folder):
    dataset = WikiText("wikitext-2", folder, length=16)
    batches = list(dataset.evaluation("valid", batch=4))
    expected = dataset.tokens["valid"].astype(np.int64)
    assert np.array_equal(torch.cat([b.inputs.flatten() for b in batches]), expected[:-1])
    assert np.array_equal(torch.cat([b.targets.flatten() for b in batches]), expected[1:])
    for seed in range(20):
        starts = dataset.order(torch.Generator().manual_seed(seed))
        assert len(starts) == dataset.size and starts.min() < 16
        inputs, targets, _ = dataset.batch(starts, torch.Generator())
        assert inputs.shape == targets.shape == (dataset.size, 16) and torch.equal(inputs[:, 1:], targets[:, :-1])


def test_a_restricted_vocabulary_keeps_a_distribution_over_all_tokens(folder):
    dataset = WikiText("wikitext-2", folder, 16, vocabulary=5)
    v, encoded = dataset.vocabulary, dataset.encoding.n_vocab
    counts = np.bincount(dataset.tokens["train"], minlength=encoded)
    assert v.size == 6 and counts[v.kept].min() >= np.sort(counts)[-5]
    others = v.ids == 5
    assert others.sum() == encoded - 5 and (v.surcharge[~others] == 0).all()
    np.testing.assert_allclose(np.exp(-v.surcharge[others]).sum(), 1, rtol=1e-12)  # 1e-12: some hundred roundings
    assert WikiText("wikitext-2", folder, 16).vocabulary.size == 384  # 263 tokens, up to a multiple of 128
    for wrong in ("seen", 0, True, None):
        with pytest.raises(DataError, match=f"vocabulary={wrong!r}: it must be full, or the number of"):
            WikiText("wikitext-2", folder, 16, vocabulary=wrong)


def test_a_wrong_text_is_named(tmp_path):
    write_encoding(tmp_path)
    file = write_wikitext(tmp_path) / "wiki.train.tokens"
    file.write_bytes(b"abc \xff\xfe")
    with pytest.raises(DataError, match="wiki.train.tokens is damaged: it is not UTF-8 at byte 4"):
        WikiText("wikitext-2", tmp_path, 16)
    file.write_bytes(b"the fox")
    with pytest.raises(DataError, match="length=16: .* has too few tokens in train; set a smaller length"):
        WikiText("wikitext-2", tmp_path, 16)
    with pytest.raises(DataError, match="length=0: it must be an integer of at least 1"):
        WikiText("wikitext-2", tmp_path, 0)
    file.with_name(f"{file.name}.xz").write_bytes(lzma.compress(b"the fox")[:-9])
    file.unlink()
    with pytest.raises(DataError, match="wikitext-2 is damaged, or of another kind: download it again"):
        WikiText("wikitext-2", tmp_path, 16)


def test_missing_text_and_encoding_are_named(tmp_path):
    with pytest.raises(DataError, match=r"has no wiki.train.tokens.*--download\n.*wikitext-103-v1.zip  from  https"):
        WikiText("wikitext-103", tmp_path, 16)
    folder = write_wikitext(tmp_path)
    with pytest.raises(DataError, match=r"has no vocab.bpe.*--download\n.*gpt2/vocab.bpe  from  https"):
        WikiText("wikitext-2", tmp_path, 16)
    write_encoding(tmp_path)
    (folder / "wiki.valid.tokens").unlink()
    with pytest.raises(DataError, match="has no wiki.valid.tokens"):
        WikiText("wikitext-2", tmp_path, 16)
    (tmp_path / "gpt2/vocab.bpe").write_text("#version: 0.2\nthree parts here\n")
    with pytest.raises(DataError, match=r"vocab.bpe is not GPT-2's, whose sha256 is 1ce16.*: download it again"):
        encoding.load(tmp_path)


def test_a_download_is_checked(tmp_path):
    (tmp_path / "good.zip").write_bytes(b"content")
    (tmp_path / "bad.zip").write_bytes(b"another")
    right, target = hashlib.md5(b"content").hexdigest(), tmp_path / "data/set.zip"

    def fetch(address):
        data.download([files.Source("set.zip", address, "md5", right)], tmp_path / "data")

    for address, reason in (
        ((tmp_path / "bad.zip").as_uri(), f"its md5 is .* instead of {right}"),
        ((tmp_path / "missing.zip").as_uri(), "No such file"),
        ("http://127.0.0.1:9/set.zip", "refused"),
    ):
        with pytest.raises(DataError, match=f"{address} could not be downloaded: .*{reason}.* Put it into {target}"):
            fetch(address)
        assert not target.exists() and not list(target.parent.iterdir())
    fetch((tmp_path / "good.zip").as_uri())
    assert target.read_bytes() == b"content"
    fetch((tmp_path / "missing.zip").as_uri())  # it exists, so nothing is downloaded
