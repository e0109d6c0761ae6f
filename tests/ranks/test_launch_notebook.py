"""launch from a real kernel: cells, their classes, their errors, their output."""

import re

import pytest

from kernel import kernel_in

pytestmark = pytest.mark.timeout(300)

SETUP = """
import enum, os, sys, time, threading, torch, torch.distributed as dist
from dataclasses import dataclass
from torch.utils.data import DataLoader, Dataset
from ddp_lab.ranks.launch import launch, send_record, shared

class Mode(enum.Enum):
    FAST = 1
    SLOW = 2

@dataclass
class Result:
    total: float
    mode: Mode

class Numbers(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor([float(index)])

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def forward(self, x):
        return self.layer(x)

def double(x):
    return factor * x

factor = 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def kernel(folder):
    with kernel_in(str(folder)) as kernel:
        assert kernel.run(SETUP).ename == ""
        yield kernel
        assert kernel.children() == []


def test_what_is_defined_in_cells_works(kernel):
    """Classes, a loader with workers, torch.save, and the same classes on return."""
    cell = kernel.run(
        """
def work(net):
    rank = os.environ["RANK"]
    loader = DataLoader(Numbers(), batch_size=4, num_workers=2)
    total = sum(float(batch.sum()) for batch in loader)
    torch.save(net, f"net{rank}.pt")
    assert type(torch.load(f"net{rank}.pt", weights_only=False)) is Net
    return Result(double(total), Mode.SLOW), net
found = launch(work, Net())
[(type(r) is Result, r.total, r.mode is Mode.SLOW, type(n) is Net) for r, n in found]
"""
    )
    assert cell.traceback == ""
    assert cell.result == "[(True, 56.0, True, True), (True, 56.0, True, True)]"
    cell = kernel.run("type(torch.load('net1.pt', weights_only=False)) is Net")
    assert cell.result == "True"


def test_a_redefined_name_is_seen(kernel):
    assert (
        kernel.run("factor = 3\nlaunch(lambda: double(2), num_ranks=1)").result == "[6]"
    )


def test_a_module_edited_beside_the_notebook(kernel, folder):
    (folder / "my_model.py").write_text("def answer():\n    return 1\n")
    code = "import my_model\nlaunch(my_model.answer, num_ranks=1)"
    assert kernel.run(code).result == "[1]"
    (folder / "my_model.py").write_text("def answer():\n    return 22\n")
    assert kernel.run(code).result == "[22]"


def test_a_namespace_with_a_file(kernel, folder):
    """VS Code's interactive window sets __file__; the cell's function must run."""
    (folder / "other.py").write_text("def which():\n    return 'the file'\n")
    kernel.run("__file__ = 'other.py'\ndef which():\n    return 'the cell'")
    assert kernel.run("launch(which, num_ranks=1)").result == "['the cell']"
    kernel.run("del __file__")


def test_an_error_shows_the_cells_line(kernel):
    cell = kernel.run(
        "def bad(x):\n"
        "    y = 2 * x\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise ValueError(f'bad {y}')\n"
        "launch(bad, 4)"
    )
    assert cell.ename == "RankFailed"
    assert cell.evalue == "rank 1 of 2 failed: ValueError: bad 8"
    lines = cell.traceback.splitlines()
    at = next(i for i, line in enumerate(lines) if ", line 4, in bad" in line)
    assert lines[at].strip().startswith("Cell In[")
    assert lines[at + 1].strip() == "raise ValueError(f'bad {y}')"
    assert lines[-1] == "rank 0: finished, returned"
    assert "ddp_lab" not in cell.traceback  # no frame of ours


def test_bad_input_is_short(kernel):
    cell = kernel.run("rows = [1, (i for i in range(3))]\nlaunch(lambda: rows)")
    assert cell.ename == "NotSendable"
    assert cell.evalue.startswith("`rows[1]` is a generator")
    assert "launch(lambda: rows)" in cell.traceback
    assert "_pickling.py" not in cell.traceback


def test_a_deadlock_shows_the_cells_lines(kernel):
    cell = kernel.run(
        "def deadlock():\n"
        "    dist.init_process_group('gloo')\n"
        "    if dist.get_rank() == 0:\n"
        "        dist.barrier()\n"
        "    else:\n"
        "        dist.all_reduce(torch.ones(1))\n"
        "launch(deadlock, stuck_after_s=1)"
    )
    assert cell.ename == "RanksStuck"
    title, head, first, second, hint = cell.evalue.splitlines()
    assert title == "ranks 0, 1 of 2 are stuck: no progress for 1 s"
    assert head.split() == ["rank", "state", "last", "collective", "where"]
    assert first.split()[:4] == ["0", "waiting", "barrier", "#1"]
    assert first.endswith("line 4: dist.barrier()")
    assert second.split()[:4] == ["1", "waiting", "all_reduce", "#1"]
    assert second.endswith("line 6: dist.all_reduce(torch.ones(1))")
    assert "different collectives" in hint


def test_a_notebook_is_no_rank_of_several(kernel):
    """RANK and WORLD_SIZE copied from a script: no wait for ranks that never come."""
    kernel.run(
        "from ddp_lab import TrainConfig, train\n"
        "from ddp_lab.train import main\n"
        "by_hand = {'RANK': '0', 'WORLD_SIZE': '2', 'MASTER_ADDR': 'localhost',"
        " 'MASTER_PORT': '29500'}\n"
        "os.environ.update(by_hand)"
    )
    cell = kernel.run("train(TrainConfig(device='cpu'))")
    assert cell.ename == "BadInput"
    assert re.match(
        "this notebook's environment makes it rank 0 of 2, .*launch\\(\\).*!torchrun",
        cell.evalue,
    )
    command = kernel.run("main(['--device', 'cpu'])")
    assert command.result == "2"
    assert command.stderr == f"ddp_lab.train: {cell.evalue}\n"
    # launch needs no such variables, and does not mind them
    ranks = "launch(lambda: (os.environ['RANK'], os.environ['WORLD_SIZE']))"
    assert kernel.run(ranks).result == "[('0', '2'), ('1', '2')]"
    kernel.run("for name in by_hand:\n    del os.environ[name]")


def test_rank_0_is_live(kernel, folder):
    """It waits until what it has printed is in the cell, line by line."""

    def look(cell):
        for number in cell.stdout.split():
            (folder / f"seen{number}").touch()

    cell = kernel.run(
        """
def talk():
    for number in range(3):
        print(number)
        while not os.path.exists(f"seen{number}"):
            time.sleep(0.01)
launch(talk, num_ranks=1)
""",
        look=look,
    )
    assert cell.ename == ""
    assert cell.stdout == "0\n1\n2\n"


def test_records_while_it_runs(kernel):
    """on_record runs in the kernel's main thread, where pictures can be drawn."""
    cell = kernel.run(
        """
found = []
def note(rank, fields):
    found.append((rank, fields["step"], threading.current_thread().name))
launch(lambda: send_record(step=1), on_record=note)
sorted(found)
"""
    )
    assert cell.result == "[(0, 1, 'MainThread'), (1, 1, 'MainThread')]"


def test_very_chatty_ranks_do_not_freeze_the_notebook(kernel):
    """100,000 lines of each rank: few messages, a bounded cell, and all is kept."""
    cell = kernel.run(
        """
import tempfile
tempfile.tempdir = os.getcwd()
def chat():
    for line in range(100_000):
        print("line", line, "of rank", os.environ["RANK"])
launch(chat, num_ranks=3)
"""
    )
    assert cell.ename == ""
    assert len(cell.stdout) < 3 * 2**20
    assert len(cell.messages) < 200
    for rank in range(3):
        assert f"line 99999 of rank {rank}\n" in cell.stdout
        path = cell.stdout.partition(f"[rank {rank}: too much")[2].split("is in ")[1]
        path = path.split(" until the kernel ends,")[0]
        with open(path) as file:
            lines = file.read().splitlines()
        assert lines == [f"line {n} of rank {rank}" for n in range(100_000)]
