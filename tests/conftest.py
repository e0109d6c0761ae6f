"""For all tests: nothing that they start outlives them."""

import psutil
import pytest

# Python's own helpers, which live as long as the process that uses them.
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


@pytest.fixture(autouse=True, scope="module")
def no_process_is_left():
    yield
    children = psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs(children, timeout=5)
    left = []
    for child in alive:
        try:
            command = " ".join(child.cmdline())
        except psutil.Error:  # gone in this moment
            continue
        if not any(helper in command for helper in _HELPERS):
            left.append(command)
    assert not left, f"processes outlive their tests: {left}"
