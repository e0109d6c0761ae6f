"""A command as a test's subject: with a small model, and it waits where it is told to.

Python imports this file at the start of each process that has this folder on its
PYTHONPATH: of a command, its ranks and what a launcher starts. There

* three layers stand in for torchvision's models, random images for scikit-learn's
  digits, and an empty file for the loss curve: their imports take four seconds;
* a file ``hold`` in the working folder names a place, and who comes there says so in
  ``held-RANK``, and waits until the file names another place or a signal asks to stop.

Places, by optimiser step or epoch: ``step 3`` before it is recorded, ``saving 3`` with
the file half done, ``evaluating 1``, and ``ending``. See small_commands.py.
"""

import contextlib
import importlib.abc
import importlib.machinery
import os
import sys
import time
from pathlib import Path

HOLD = Path("hold")


def wait_at(place, asked_to_stop=lambda: False):
    """Wait here if the file says so."""
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "")
    while HOLD.exists() and HOLD.read_text() == place and not asked_to_stop():
        Path(f"held-{rank}").write_text(place)
        time.sleep(0.005)


def change_model(module):
    def build_model(config, num_classes):
        import torch
        from torch import nn

        group = config.norm == "group"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            return nn.Sequential(
                nn.Conv2d(3, 8, 3, stride=2),
                nn.GroupNorm(2, 8) if group else nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(2),
                nn.Flatten(),
                nn.Linear(32, 1024),  # so that checkpoints are larger than pictures
                nn.ReLU(),
                nn.Linear(1024, num_classes),
            )

    module.build_model = build_model


def change_datasets(module):
    def load_random(image_size):
        import torch

        generator = torch.Generator().manual_seed(0)

        def split(num):
            shape = (num, 3, image_size, image_size)
            images = torch.randint(
                0, 256, shape, dtype=torch.uint8, generator=generator
            )
            labels = torch.randint(0, 10, (num,), generator=generator)
            return module.ImagesInMemory(images, labels)

        return module.ImageSet(
            name="digits",
            classes=tuple("0123456789"),
            mean=(0.5, 0.5, 0.5),
            std=(0.25, 0.25, 0.25),
            train=split(200),
            test=split(50),
        )

    module._load_digits = load_random


def replace_figures(module):
    module.plot_loss = lambda history: None
    module.save_picture = lambda figure, path: path.touch()


def change_session(module):
    class Session(module.Session):
        def after_step(self, tally):
            wait_at(
                f"step {self.state.step}",
                lambda: self._request is not None and self._request.signal_number,
            )
            super().after_step(tally)

        def __exit__(self, *error):
            if error[0] is None:
                wait_at("ending")
            super().__exit__(*error)

    module.Session = Session


def change_checkpoint(module):
    atomic_file = module.atomic_file

    @contextlib.contextmanager
    def waiting(path):
        with atomic_file(path) as file:
            yield file
            wait_at(f"saving {int(path.stem.partition('-')[2])}")

    module.atomic_file = waiting


def change_step(module):
    evaluate, epochs = module.evaluate, []

    def waiting(*arguments):
        epochs.append(1)
        wait_at(f"evaluating {len(epochs)}")  # since this process has started
        return evaluate(*arguments)

    module.evaluate = waiting


CHANGES = {
    "ddp_lab.model": change_model,
    "ddp_lab.datasets": change_datasets,
    "ddp_lab.runs.session": change_session,
    "ddp_lab.runs.checkpoint": change_checkpoint,
    "ddp_lab.step": change_step,
}


class Finder(importlib.abc.MetaPathFinder):
    """Finds these modules as always, and changes them once they are loaded."""

    def find_spec(self, name, path, target=None):
        if name not in CHANGES and name != "ddp_lab.figures":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def load_and_change(module):
            if name == "ddp_lab.figures":
                replace_figures(module)
                return
            load(module)
            CHANGES[name](module)

        spec.loader.exec_module = load_and_change
        return spec


sys.meta_path.insert(0, Finder())
