"""Small data sets on disk, in the formats of the large ones."""

import struct

import numpy as np
from PIL import Image


def write_fashion_mnist(root, num_train=20, num_test=10):
    """Files in the format of the original release, with pixels of our own."""
    raw = root / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for prefix, n in (("train", num_train), ("t10k", num_test)):
        pixels = generator.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        header = struct.pack(">IIII", 0x0803, n, 28, 28)
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        labels = (np.arange(n) % 10).astype(np.uint8)
        header = struct.pack(">II", 0x0801, n)
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())
    return raw


def write_folder(root, classes=("cat", "dog"), num_train=8, num_test=3, test="test"):
    generator = np.random.default_rng(0)
    for split, n in (("train", num_train), (test, num_test)):
        for name in classes:
            (root / split / name).mkdir(parents=True)
            for k in range(n):
                pixels = generator.integers(0, 256, (40, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{k}.png")
    return root
