"""Learn PyTorch DistributedDataParallel by running it; then train with the same code.

The three steps, in three files:

1. ``world.py``  who am I, and how do the processes meet?
2. ``model.py``  how do N copies of a model stay one model?
3. ``data.py``   which rank sees which sample?

Importing the package is cheap on purpose: every spawned rank does it, so matplotlib,
torchvision and scikit-learn are imported only by the functions that need them.
"""

from typing import Any

__version__ = "0.1.0"


def load_ipython_extension(shell: Any) -> None:
    """Make the magics known: ``%load_ext ddp_lab``."""
    from ddp_lab import magics  # IPython is there only in a notebook

    magics.load_ipython_extension(shell)
