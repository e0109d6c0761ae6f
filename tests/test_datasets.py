import dataclasses
import hashlib
import os
import pickle
import shutil
import tempfile
import time
import unicodedata

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset
from torchvision import datasets as torchvision_datasets

from ddp_lab import datasets
from ddp_lab.config import TrainConfig
from ddp_lab.data import eval_loader, train_loader
from ddp_lab.datasets import load_dataset, load_dataset_together
from ddp_lab.errors import BadInput
from ddp_lab.ranks.launch import launch
from ddp_lab.world import join_world
from image_files import write_fashion_mnist, write_folder
from worlds import cpu_world


def test_digits():
    data = load_dataset(TrainConfig())
    assert (len(data.train), len(data.test)) == (1437, 360)
    assert data.train.images.shape == (1437, 3, 32, 32)
    assert data.train.images.dtype == torch.uint8
    assert data.classes == tuple("0123456789")
    assert set(data.test.labels.tolist()) == set(range(10))
    known = {image.numpy().tobytes() for image in data.train.images}
    assert not known & {image.numpy().tobytes() for image in data.test.images}
    pixels = data.train.images.float() / 255
    assert pixels.mean().item() == pytest.approx(data.mean[0], abs=1e-6)
    assert pixels.std().item() == pytest.approx(data.std[0], abs=1e-5)


def test_digits_are_the_same_on_any_number_of_threads():
    threads = torch.get_num_threads()
    seen = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        data = load_dataset(TrainConfig())
        seen.append((data.mean, data.std, data.train.fingerprint()))
    torch.set_num_threads(threads)
    assert seen[0] == seen[1]


def test_limits_keep_all_classes():
    data = load_dataset(TrainConfig(limit_train=200, limit_test=10**9))
    assert len(data.train) == 200
    assert len(data.test) == 360  # a limit above the size changes nothing
    assert set(data.train.labels.tolist()) == set(range(10))
    again = load_dataset(TrainConfig(limit_train=200))
    assert again.train.fingerprint() == data.train.fingerprint()


def test_fingerprint_sees_one_pixel_and_one_label():
    split = load_dataset(TrainConfig(limit_train=50)).train
    before = split.fingerprint()
    split.images[3, 0, 5, 5] += 1
    changed = split.fingerprint()
    assert changed != before
    split.images[3, 0, 5, 5] -= 1
    assert split.fingerprint() == before
    split.labels[7] = (split.labels[7] + 1) % 10
    assert split.fingerprint() != before


# -------------------------------------------------------------- torchvision's


def test_fashion_mnist(tmp_path):
    raw = write_fashion_mnist(tmp_path)
    data = load_dataset(TrainConfig(dataset="fashion-mnist", data_dir=tmp_path))
    assert data.train.images.shape == (20, 3, 32, 32)
    assert data.train.labels.tolist() == [i % 10 for i in range(20)]
    assert data.classes[0] == "T-shirt/top"
    pixels = np.frombuffer(
        (raw / "train-images-idx3-ubyte").read_bytes()[16:], np.uint8
    )
    middle = data.train.images[:, 1, 2:-2, 2:-2]
    assert (middle.numpy() == pixels.reshape(20, 28, 28)).all()
    assert data.train.images[:, :, :2].sum() == 0  # the two rows added above


@pytest.fixture
def tiny_cifar(tmp_path, monkeypatch):
    """CIFAR-10's pickled batches with 4 images each; torchvision checks their md5."""
    base = tmp_path / "cifar-10-batches-py"
    base.mkdir()
    reader = torchvision_datasets.CIFAR10
    generator = np.random.default_rng(0)
    lists = {"train_list": [], "test_list": []}
    for which, names in lists.items():
        for name, _ in getattr(reader, which):
            pixels = generator.integers(0, 256, (4, 3072), dtype=np.uint8)
            content = pickle.dumps({"data": pixels, "labels": [0, 1, 2, 3]})
            (base / name).write_bytes(content)
            names.append([name, hashlib.md5(content).hexdigest()])
    meta = pickle.dumps({"label_names": [f"class{k}" for k in range(10)]})
    (base / "batches.meta").write_bytes(meta)
    for which, names in lists.items():
        monkeypatch.setattr(reader, which, names)
    md5 = hashlib.md5(meta).hexdigest()
    monkeypatch.setattr(
        reader, "meta", {"filename": "batches.meta", "key": "label_names", "md5": md5}
    )
    return tmp_path


def test_cifar10(tiny_cifar):
    data = load_dataset(TrainConfig(dataset="cifar10", data_dir=tiny_cifar))
    assert data.train.images.shape == (20, 3, 32, 32)
    assert data.train.images.is_contiguous()
    with (tiny_cifar / "cifar-10-batches-py" / "data_batch_1").open("rb") as file:
        pixels = pickle.load(file)["data"].reshape(4, 3, 32, 32)
    assert (data.train.images[:4].numpy() == pixels).all()


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("fashion-mnist", "FashionMNIST/raw"),
        ("cifar10", "cifar-10-batches-py"),
        ("cifar100", "cifar-100-python"),
    ],
)
def test_missing_dataset_says_where_it_looked(tmp_path, name, where):
    with pytest.raises(BadInput) as caught:
        load_dataset(TrainConfig(dataset=name, data_dir=tmp_path))
    assert str(caught.value) == (
        f"dataset {name} is not on disk: looked in {tmp_path / where}; either run once "
        "with --download, or copy the original files there"
    )
    assert not list(tmp_path.iterdir())


def test_truncated_fashion_mnist(tmp_path):
    file = write_fashion_mnist(tmp_path) / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(BadInput, match=r"is incomplete or damaged: looked in .*delete"):
        load_dataset(TrainConfig(dataset="fashion-mnist", data_dir=tmp_path))


def test_corrupt_cifar10(tiny_cifar):
    file = tiny_cifar / "cifar-10-batches-py" / "data_batch_3"
    file.write_bytes(b"x" + file.read_bytes()[1:])
    with pytest.raises(BadInput, match="cifar10 is incomplete or damaged"):
        load_dataset(TrainConfig(dataset="cifar10", data_dir=tiny_cifar))


def test_failed_download(tmp_path, monkeypatch):
    def no_network(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(torchvision_datasets.CIFAR10, "download", no_network)
    config = TrainConfig(dataset="cifar10", data_dir=tmp_path, download=True)
    with pytest.raises(BadInput, match=r"could not be downloaded .*no route to host"):
        load_dataset(config)


# --------------------------------------------------------------------- folder


def folder_config(root, **settings):
    return TrainConfig(dataset="folder", data_dir=root, image_size=16, **settings)


@pytest.mark.parametrize("test", ["test", "val"])
def test_folder(tmp_path, test):
    data = load_dataset(folder_config(write_folder(tmp_path, test=test)))
    assert (len(data.train), len(data.test), data.classes) == (16, 6, ("cat", "dog"))
    image, label, index = data.train[9]
    assert (image.shape, image.dtype) == ((3, 16, 16), torch.uint8)
    assert (label, index) == (1, 9)
    limited = load_dataset(folder_config(tmp_path, limit_train=6))
    assert len(limited.train) == 6
    assert set(limited.train.labels.tolist()) == {0, 1}


def test_folder_fingerprint_does_not_depend_on_the_place(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    here = load_dataset(folder_config(write_folder(tmp_path / "a"))).train
    there = load_dataset(folder_config(write_folder(tmp_path / "b"))).train
    assert here.fingerprint() == there.fingerprint()
    assert here.fingerprint_sizes() == there.fingerprint_sizes()
    first = tmp_path / "b" / "train" / "cat" / "0.png"
    first.write_bytes(first.read_bytes()[:-1])
    assert here.fingerprint_sizes() != there.fingerprint_sizes()
    assert there.fingerprint_sizes(num_files=3).startswith("3 of them, sha256")
    first.unlink()
    fewer = load_dataset(folder_config(tmp_path / "b")).train
    assert fewer.fingerprint() != here.fingerprint()


def test_folder_through_loader_workers_equals_without(tmp_path):
    config = folder_config(write_folder(tmp_path), num_workers=1, crop_padding=2)
    data = load_dataset(config)
    world = cpu_world()
    batches = []
    for num_workers in (0, 1):
        own = dataclasses.replace(config, num_workers=num_workers)
        loader = train_loader(data, own, world, 5)
        for epoch in (0, 1):
            loader.set_epoch(epoch)
            batches.append(list(loader))
            assert len(batches[-1]) == len(loader) == 3
    for k in range(3):
        assert torch.equal(batches[0][k][0], batches[2][k][0])
        assert torch.equal(batches[1][k][1], batches[3][k][1])
    assert not torch.equal(batches[0][0][0], batches[1][0][0])


def test_truncated_image_is_named_through_a_worker(tmp_path):
    bad = write_folder(tmp_path) / "train" / "dog" / "5.png"
    bad.write_bytes(bad.read_bytes()[:500])
    config = folder_config(tmp_path, num_workers=1)
    world = cpu_world()
    loader = train_loader(load_dataset(config), config, world, 4)
    with pytest.raises(BadInput) as caught:
        list(loader)
    assert str(caught.value).startswith(f"image {bad} cannot be read (")
    assert str(caught.value).endswith("replace or delete it")
    assert "\n" not in str(caught.value)


def picture_of(data, name):
    """The pixels (H, W, C) of a training image, by its file's name."""
    names = [os.path.basename(data.train.path(k)) for k in range(len(data.train))]
    return data.train[names.index(name)][0].permute(1, 2, 0).numpy()


def test_names_that_are_no_text(tmp_path):
    """An old zip's file names are bytes of some other code page."""
    write_folder(tmp_path)
    odd = os.fsdecode(b"caf\xe9.png")
    (tmp_path / "train" / "cat" / "0.png").rename(tmp_path / "train" / "cat" / odd)
    data = load_dataset(folder_config(tmp_path))
    assert picture_of(data, odd).shape == (16, 16, 3)
    assert data.train.fingerprint() != data.test.fingerprint()


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I"])
def test_sixteen_bits_become_eight(tmp_path, mode):
    write_folder(tmp_path)
    ramp = np.repeat(np.arange(0, 2**16, 2**12, dtype=np.uint16)[None], 16, axis=0)
    suffix = {"I;16": "png", "I;16B": "tiff", "I": "tiff"}[mode]
    pixels = ramp.astype({"I;16": "<u2", "I;16B": ">u2", "I": "<i4"}[mode])
    Image.frombytes(mode, (16, 16), pixels.tobytes()).save(
        tmp_path / "train" / "cat" / f"deep.{suffix}"
    )
    found = picture_of(load_dataset(folder_config(tmp_path)), f"deep.{suffix}")
    assert (found == (ramp // 256)[..., None]).all()


def test_photos_are_turned_as_viewers_turn_them(tmp_path):
    write_folder(tmp_path)
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[:, :8] = 200  # the left half is bright; turned by 90 degrees, the top
    image = Image.fromarray(pixels)
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "train" / "cat" / "turned.png", exif=exif)
    found = picture_of(load_dataset(folder_config(tmp_path)), "turned.png")
    assert (found[:8] == 200).all()
    assert (found[8:] == 0).all()


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (Image.new("F", (9, 9)), "its pixels are fractions"),
        (Image.new("I", (9, 9), 2**20), "its pixels have 32 bits"),
        (Image.new("1", (14_000, 14_000)), "exceeds limit of"),
    ],
)
def test_pictures_that_cannot_be_used_are_named(tmp_path, image, reason):
    file = write_folder(tmp_path) / "train" / "cat" / "!.tiff"
    image.save(file, compression="tiff_deflate")
    with pytest.raises(BadInput, match=reason) as caught:
        load_dataset(folder_config(tmp_path))
    assert str(caught.value).startswith(f"image {file} cannot be read (")
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGBA", "CMYK", "YCbCr"])
def test_other_kinds_of_pixels(tmp_path, mode):
    write_folder(tmp_path)
    suffix = "jpg" if mode in ("CMYK", "YCbCr") else "png"
    image = Image.new("RGB", (20, 30), (250, 5, 5)).convert(mode)
    name = f"odd.{suffix}"
    if mode == "PA":
        image = image.convert("P")
        image.info["transparency"] = b"\0\1\2"
    image.save(tmp_path / "train" / "cat" / name)
    found = picture_of(load_dataset(folder_config(tmp_path)), name)
    assert found.shape == (16, 16, 3)


def test_what_programs_leave_in_folders_is_no_class_and_no_image(tmp_path):
    write_folder(tmp_path)
    for folder in (".ipynb_checkpoints", "__MACOSX", "cat/.thumbnails"):
        (tmp_path / "train" / folder).mkdir()
        shutil.copy(tmp_path / "train/cat/0.png", tmp_path / "train" / folder / "0.png")
    (tmp_path / "train" / "dog" / "._1.png").write_bytes(b"resource fork")
    (tmp_path / "train" / "dog" / ".DS_Store").write_bytes(b"")
    data = load_dataset(folder_config(tmp_path))
    assert (len(data.train), len(data.test), data.classes) == (16, 6, ("cat", "dog"))
    assert data.notes == ()


def test_files_that_are_not_read_are_told(tmp_path):
    write_folder(tmp_path)
    for name in ("a.HEIC", "b.heic", "notes.txt"):
        (tmp_path / "train" / "dog" / name).write_bytes(b"")
    data = load_dataset(folder_config(tmp_path))
    assert data.notes == ("3 files of kinds that are not read: 2 .heic, 1 .txt",)


def test_a_million_paths_are_two_tensors(tmp_path):
    """As Python objects they would be copied into each loader's process."""
    split = load_dataset(folder_config(write_folder(tmp_path))).train
    objects = [value for value in vars(split).values() if not isinstance(value, int)]
    assert all(isinstance(value, torch.Tensor | str) for value in objects)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(9))


@pytest.mark.parametrize("make", [train_loader, eval_loader])
def test_a_stream_is_refused(make):
    config = TrainConfig()
    data = dataclasses.replace(load_dataset(config), train=Stream(), test=Stream())
    with pytest.raises(BadInput, match=r"Stream is a stream .* itertools.islice"):
        make(data, config, cpu_world(), 4)


def test_a_folder_in_which_workers_would_wait_for_ever(tmp_path, monkeypatch):
    config = folder_config(write_folder(tmp_path), num_workers=1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("deep" * 20)))
    data = load_dataset(config)
    with pytest.raises(BadInput, match="set TMPDIR to one of at most"):
        train_loader(data, config, cpu_world(), 4)
    train_loader(data, dataclasses.replace(config, num_workers=0), cpu_world(), 4)


def unicode_forms(root):
    for split, form in (("train", "NFC"), ("test", "NFD")):
        name = unicodedata.normalize(form, "caf\u00e9")
        (root / split / "cat").rename(root / split / name)


def empty_class(root):
    (root / "train" / "bird").mkdir()


def first_image_broken(root):
    (root / "train" / "cat" / "0.png").write_bytes(b"not an image")


def no_test_split(root):
    (root / "test").rename(root / "elsewhere")


def other_test_classes(root):
    (root / "test" / "dog").rename(root / "test" / "wolf")


@pytest.mark.parametrize(
    ("classes", "damage", "message"),
    [
        (("cat", "dog"), empty_class, "bird.*remove the empty class folder"),
        (("cat", "dog"), first_image_broken, "0.png cannot be read"),
        (("cat", "dog"), no_test_split, "val is missing; images belong in"),
        (("cat", "dog"), other_test_classes, "different classes.*dog, wolf"),
        (("cat", "dog"), unicode_forms, r"letters of two Unicode forms"),
        (("cat",), None, "one class only \\(cat\\)"),
    ],
)
def test_folders_that_cannot_work(tmp_path, classes, damage, message):
    write_folder(tmp_path, classes)
    if damage:
        damage(tmp_path)
    with pytest.raises(BadInput, match=message) as caught:
        load_dataset(folder_config(tmp_path))
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- by all ranks


def load_in_turn(fail):
    """Load with a `load_dataset` that says when it was at work, and for whom."""
    spans = []

    def slow(config):
        began = time.monotonic()
        time.sleep(0.2)
        if fail:
            raise BadInput("no network")
        spans.append((began, time.monotonic(), config.download))
        return load_dataset(TrainConfig(limit_train=20))

    datasets.load_dataset = slow
    try:
        with join_world(device="cpu") as world:
            try:
                load_dataset_together(TrainConfig(download=True), world)
            except BadInput as error:
                return str(error)
    finally:
        datasets.load_dataset = load_dataset
    return spans


def both_ways():
    import os

    ok = load_in_turn(fail=False)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"  # join once more, on the same store
    return ok, load_in_turn(fail=True)


def test_one_rank_downloads_while_the_others_wait():
    (first, failed_0), (second, failed_1) = launch(both_ways, num_ranks=2)
    [(_, rank_0_done, rank_0_downloads)] = first
    [(rank_1_began, _, rank_1_downloads)] = second
    assert rank_0_downloads
    assert not rank_1_downloads
    assert rank_0_done <= rank_1_began
    assert failed_0 == failed_1 == "rank 0: no network"
