"""Pictures are drawn without a screen, and none stays open."""

from collections.abc import Iterator

import matplotlib
import pytest
from matplotlib import pyplot


@pytest.fixture(autouse=True)
def no_screen() -> Iterator[None]:
    matplotlib.use("Agg")
    yield
    pyplot.close("all")
