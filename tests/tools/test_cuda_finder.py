"""The finder, with a stand-in for torch's CUDA initialisation."""

import sys

import pytest
import torch

from ddp_lab.tools import cuda_finder


@pytest.fixture
def cuda(monkeypatch):
    """A machine where initialising CUDA works, and is noted."""
    done = []
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: done.append(1))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(done))
    monkeypatch.setattr(cuda_finder, "_first", None)
    return done


def test_names_the_line(cuda):
    cuda_finder.install()
    assert cuda_finder.first_use() == "nothing has initialised CUDA"
    torch.cuda._lazy_init()  # THE LINE
    torch.cuda._lazy_init()
    assert cuda == [1, 1]
    assert cuda_finder.first_use().endswith(": torch.cuda._lazy_init()  # THE LINE")


def test_names_the_import(cuda, tmp_path, monkeypatch):
    (tmp_path / "outer_lib.py").write_text("import inner_lib\n")
    (tmp_path / "inner_lib.py").write_text("import torch\ntorch.cuda._lazy_init()\n")
    monkeypatch.syspath_prepend(tmp_path)
    cuda_finder.install()
    import outer_lib  # noqa: F401

    for name in ("outer_lib", "inner_lib"):
        del sys.modules[name]
    assert cuda_finder.first_use().startswith(
        "import of outer_lib, at test_cuda_finder"
    )
    assert "import outer_lib" in cuda_finder.first_use()


def test_too_late(cuda):
    torch.cuda._lazy_init()
    cuda_finder.install()
    assert "before install()" in cuda_finder.first_use()


def test_installed_once(cuda):
    cuda_finder.install()
    hook = torch.cuda._lazy_init
    cuda_finder.install()
    assert torch.cuda._lazy_init is hook
