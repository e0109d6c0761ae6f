"""Kernels that nbval starts see the same settings as those of the build script.

An MPLBACKEND from outside would keep figures out of the cells, and a startup file of
the user's own could print into them.
"""

import tempfile
from collections.abc import Generator

import pytest

_ipython_dir = tempfile.TemporaryDirectory()


# A hook and not a fixture: nbval's cells are items of its own kind, without fixtures.
@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    """Start the kernel, as the setup of its notebook's first cell does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MPLBACKEND", raising=False)
        patch.setenv("IPYTHONDIR", _ipython_dir.name)
        return (yield)
