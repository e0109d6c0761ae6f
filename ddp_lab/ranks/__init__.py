"""Run a function on ranks, from a notebook cell or a script.

    launch.py      `launch`: start ranks, run one function on all, bring back everything
    workers.py     `Workers`: ranks that stay for the next call
    magics.py      `%%ranks`: ranks that run notebook cells
    stacks.py      frames of a stack in the user's words: a cell's line, no plumbing

The rest (names with an underscore) is the machinery under these. ``_rank_set.py`` has
the drawing of who talks to whom, and the one call of `torch.multiprocessing.spawn`.
"""
