"""Frames in the user's words: which are left out, by the names of their files."""

from pathlib import Path

import torch

from ddp_lab.ranks import _main
from ddp_lab.ranks.stacks import PACKAGE, PLUMBING, user_line


def test_user_line_is_not_a_librarys():
    lines = [
        ("/home/me/train.py", 3, "train"),
        (torch.__file__, 10, "f"),
        ("<frozen runpy>", 1, "g"),
    ]
    assert user_line(lines) == "train.py, line 3"
    born = [("<string>", 1, "<module>"), (_main.__file__, 5, "rank_main")]
    assert user_line([*born, *lines]) == "train.py, line 3"
    assert user_line(born) == "before the function started"


def test_the_plumbing_is_where_it_is_said_to_be():
    """A file that was renamed would show up in every traceback."""
    assert all(Path(file).is_file() for file in PLUMBING)
    assert all(file.startswith(PACKAGE) for file in PLUMBING)
    assert _main.rank_main.__code__.co_filename == _main.__file__
    assert _main.__file__ in PLUMBING
