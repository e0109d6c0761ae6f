"""What a training step and an evaluation leave to torch's own switches.

That both compute what they should is shown by tests/test_equivalence.py.
"""

import torch

from ddp_lab.step import deterministic_algorithms


def switches():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.matmul.allow_tf32,
    )


def test_deterministic_algorithms_for_a_while(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # the user's stays
    before = switches()
    with deterministic_algorithms(True):
        assert switches() == (True, False, False, False)
    assert switches() == before


def test_nothing_is_switched_unasked():
    before = switches()
    with deterministic_algorithms(False):
        assert switches() == before
