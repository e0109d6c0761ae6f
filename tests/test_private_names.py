"""Names of torch's and Python's that nobody has promised to us, in one list.

A newer version may drop one of them. The test of that name then fails, and says in
words what no longer works, and where.
"""

import ast
import importlib
import warnings
from pathlib import Path

import pytest
import torch

import ddp_lab

PACKAGE = Path(ddp_lab.__file__).parent

# name: where it is found, in which file of ours, and what breaks without it
NAMES = {
    "_execution_engine": (
        "torch.autograd.Variable",
        "by_hand/ddp.py",
        "DDP by hand cannot wait for the end of backward",
    ),
    "_BatchNorm": (
        "torch.nn.modules.batchnorm",
        "by_hand/sync_batch_norm.py",
        "layers of BatchNorm of any dimension are not found",
    ),
    "_DropoutNd": (
        "torch.nn.modules.dropout",
        "proofs/world_sizes.py",
        "dropout is not named as a reason for different curves",
    ),
    "_exit": ("os", "ranks/_main.py", "a rank cannot leave at once"),
    "_new_shared_fd_cpu": (
        "torch.UntypedStorage",
        "ranks/_main.py",
        "shared() does not arrive",
    ),
    "_share_fd_cpu_": (
        "torch.UntypedStorage",
        "ranks/_pickling.py",
        "shared() cannot be sent",
    ),
    "_untyped_storage": (
        "torch.FloatStorage",
        "ranks/_pickling.py",
        "storages of old kind cannot be sent",
    ),
    "_shutdown": (
        "threading",
        "ranks/_main.py",
        "threads that a rank's function has left are cut off",
    ),
    "_run_exitfuncs": (
        "atexit",
        "ranks/_main.py",
        "exit hooks of a rank's function do not run",
    ),
    "_validate_loaded_sparse_tensors": (
        "torch._utils",
        "ranks/_pickling.py",
        "torch.load warns of sparse tensors that a launch has brought",
    ),
    "_utils": ("torch", "ranks/_pickling.py", "the same"),
    "_engine_run_backward": (
        "torch.autograd.graph",
        "ranks/_watch.py",
        "a deadlock in DDP's backward is not found",
    ),
    "_distributed_c10d": (
        "torch._C",
        "ranks/_watch.py",
        "the table of stuck ranks does not name the last collective",
    ),
    "_dump_fr_trace_json": (
        "torch._C._distributed_c10d",
        "ranks/_watch.py",
        "the table of stuck ranks does not name gloo's last collective",
    ),
    "_dump_nccl_trace_json": (
        "torch._C._distributed_c10d",
        "ranks/_watch.py",
        "the table of stuck ranks does not name nccl's last collective",
    ),
    "_current_frames": ("sys", "ranks/_watch.py", "nobody sees where a rank stands"),
    "_current_exceptions": (
        "sys",
        "ranks/_watch.py",
        "an exception whose finally waits is not told",
    ),
    "_getframe": ("sys", "ranks/magics.py", "%%ranks does not find the cell's names"),
    "_get_sequence_number_for_group": (
        "torch.distributed.ProcessGroup",
        "ranks/workers.py",
        "after an exception Workers open a new group though the old one is in step",
    ),
}
# nothing of these stands in a CPU build's place; they are asked for by name
ABSENT_IS_FINE = {"_dump_nccl_trace_json"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_of(tree: ast.AST) -> set[str]:
    """Private names that a module uses: attributes, imports, and texts to look up."""
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            last = node.value.rpartition(".")[2]
            used |= {last} if last.isidentifier() else set()
    return {name for name in used if is_private(name)}


def defined_in(tree: ast.AST) -> set[str]:
    """Names that a module defines, as functions, classes, variables or attributes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
    return found


def test_the_list_is_whole():
    files = list(PACKAGE.rglob("*.py"))
    trees = [ast.parse(path.read_text()) for path in files]
    ours = set().union(*map(defined_in, trees)) | {path.stem for path in files}
    assert set().union(*map(names_of, trees)) - ours == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_there(name):
    place, file, what_breaks = NAMES[name]
    assert name in names_of(ast.parse((PACKAGE / file).read_text()))
    if name in ABSENT_IS_FINE:
        return
    home, _, last = place.rpartition(".")
    try:
        owner = importlib.import_module(place)
    except ImportError:
        owner = getattr(importlib.import_module(home), last)
    if name not in dir(owner) and owner is torch.FloatStorage:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            owner = owner(1)  # its instances have it
    assert hasattr(owner, name), f"{place}.{name} is gone, so {what_breaks} ({file})"
