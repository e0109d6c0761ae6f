"""%ranks, %%ranks, %push and %pull in a real kernel."""

import ast
import re
import subprocess
import sys
import time
from pathlib import Path

import nbclient
import nbformat
import psutil
import pytest

from ddp_lab.ranks._cells import end_of_cell_is_hidden, run_cell
from ddp_lab.ranks.magics import PerRank
from kernel import kernel_in, wait_gone

pytestmark = pytest.mark.timeout(300)

SANITIZER = Path(__file__).resolve().parents[2] / "notebooks" / "sanitize.cfg"


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    with kernel_in(str(tmp_path_factory.mktemp("magics"))) as kernel:
        assert kernel.run("%load_ext ddp_lab").ename == ""
        yield kernel


@pytest.fixture(scope="module")
def kernel(bare):
    """With two ranks; each test leaves two."""
    cell = bare.run("%ranks 2")
    assert cell.traceback == ""
    assert cell.stdout == (
        "2 ranks are ready on cpu, joined by gloo, "
        "with rank, world_size, device, dist, torch\n"
    )
    return bare


def refused(kernel, code, kind="BadInput"):
    """The one line that a notebook shows for a command that cannot work."""
    cell = kernel.run(code)
    assert cell.ename == kind
    assert cell.traceback == f"{kind}: {cell.evalue}"
    assert "\n" not in cell.evalue
    assert cell.stdout == cell.stderr == ""
    return cell.evalue


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("%ranks", "no ranks are running: start some with %ranks 2"),
        ("%ranks off", "no ranks are running: start some with %ranks 2"),
        ("%%ranks\nrank", "no ranks are running: start some with %ranks 2"),
        ("%ranks 0", "num_ranks must be a whole number from 1 on, not 0"),
        ("%ranks -2", "num_ranks must be a whole number from 1 on, not -2"),
        ("%ranks two", "%ranks two: say how many, as in %ranks 2, or off"),
        ("%ranks 2 --gpus 1", "%ranks: unrecognized arguments: --gpus 1 "),
        ("%ranks 2 --device tpu", "device 'tpu' is unknown"),
    ],
)
def test_without_ranks(bare, code, message):
    assert refused(bare, code).startswith(message)
    assert bare.children() == []


def test_a_cell_on_all_ranks(kernel):
    cell = kernel.run(
        "%%ranks\nx = torch.full((2, 2), float(rank), device=device)\n"
        "dist.all_reduce(x)\nprint('rank', rank, 'of', world_size)\nx"
    )
    assert cell.stdout == "rank 0 of 2\n[rank 1] rank 1 of 2\n"
    assert cell.result == (
        "rank 0: tensor([[1., 1.],\n                [1., 1.]])\n"
        "rank 1: tensor([[1., 1.],\n                [1., 1.]])"
    )


def test_names_persist_and_some_ranks(kernel):
    kernel.run("%%ranks\nmine = 10 * rank\nclass Net(torch.nn.Linear): pass")
    assert kernel.run("%%ranks\nmine + 1").result == "rank 0: 1\nrank 1: 11"
    assert kernel.run("%%ranks 1\nmine").result == "rank 1: 10"
    assert kernel.run("%%ranks 0:1\nmine").result == "rank 0: 0"
    assert kernel.run("%%ranks 1,0\nmine").result == "rank 0: 0\nrank 1: 10"
    assert kernel.run("%%ranks\nmine;").result == ""
    assert kernel.run("%%ranks\nNone if rank else 'only me'").result == (
        "rank 0: 'only me'"
    )
    cell = kernel.run("%%ranks\ntorch.save(Net(1, 1), f'net{rank}.pt')")
    assert cell.traceback == ""


def test_push_and_pull(kernel):
    kernel.run("import torch\nw = torch.ones(2)\ndef who():\n    return rank, w.sum()")
    assert kernel.run("%push w who").traceback == ""
    cell = kernel.run("%%ranks\nw += rank\nwho()")
    assert cell.result == "rank 0: (0, tensor(2.))\nrank 1: (1, tensor(4.))"
    assert kernel.run("%pull w\nw").result == "[tensor([1., 1.]), tensor([2., 2.])]"
    assert kernel.run("%pull w 1\nw").result == "tensor([2., 2.])"
    assert refused(kernel, "%push w missing") == (
        "`missing` is not defined in the notebook"
    )
    kernel.run("%%ranks 0\nhere = 1")
    assert refused(kernel, "%pull here") == "`here` is not defined on rank 1"
    assert kernel.run("%pull here 0\nhere").result == "1"
    assert refused(kernel, "%push").startswith("%push needs names")
    assert refused(kernel, "%pull").startswith("%pull needs one name")
    kernel.run("lines = (line for line in 'ab')")
    text = refused(kernel, "%push lines", "NotSendable")
    assert text.startswith("`lines` is a generator")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%%ranks 5", "there is no rank 5: the ranks are 0 to 1"),
        ("%%ranks 2:4", "'2:4' names none of the 2 ranks"),
        ("%%ranks first", "'first' names no ranks: write 0,2 or 0:2, or nothing"),
        ("%%ranks --slow", "%%ranks: unrecognized arguments: --slow "),
        ("%%ranks --stuck-after 0", "stuck_after_s must be above 0, not 0.0"),
        ("%%ranks '", "%%ranks: no closing quotation "),
    ],
)
def test_a_line_that_cannot_work(kernel, line, message):
    assert refused(kernel, f"{line}\nran = True").startswith(message)
    assert kernel.run("%%ranks\n'ran' in globals()").result.count("False") == 2


def test_nothing_is_sent_of_a_cell_that_cannot_run(kernel):
    cell = kernel.run("%%ranks\nran = True\nx = (")
    assert cell.traceback.splitlines() == [
        f"  {cell.evalue.partition(': ')[0]}",
        "    x = (",
        "        ^",
        "SyntaxError: '(' was never closed",
    ]
    assert re.match(r"Cell In\[\d+\], line 3: SyntaxError: '\(' was", cell.evalue)
    for code, words in [
        ("%time x", "line 3: %time is a notebook command, and the ranks run plain"),
        ("x = !ls", "line 3: !ls is a notebook command"),
        ("await x", "line 3: top-level await needs the notebook's event loop"),
    ]:
        assert words in refused(kernel, f"%%ranks\nran = True\n{code}")
    assert kernel.run("%%ranks\n'ran' in globals()").result.count("False") == 2


def test_an_error_fails_the_cell_and_costs_nothing(kernel):
    kernel.run(
        "%%ranks\nmodel = torch.nn.parallel.DistributedDataParallel("
        "torch.nn.Linear(1, 1))\ndef half(x):\n    return x / (1 - rank)"
    )
    cell = kernel.run("%%ranks\n\nhalf(8)")
    assert cell.ename == "RankFailed"
    assert cell.evalue == "rank 1 of 2 failed: ZeroDivisionError: division by zero"
    lines = [line.strip() for line in cell.traceback.splitlines()]
    assert lines[2:4] == ["On rank 1:", "Traceback (most recent call last):"]
    assert re.fullmatch(r"Cell In\[\d+\], line 3, in <module>", lines[4])
    assert lines[5] == "half(8)"
    at = lines.index("return x / (1 - rank)")
    assert re.fullmatch(r"Cell In\[\d+\], line 4, in half", lines[at - 1])
    assert lines[-1] == "rank 0: finished, returned"
    assert "ddp_lab" not in cell.traceback
    # the same ranks, variables and group go on
    cell = kernel.run("%%ranks\nmodel(torch.ones(1, 1)).sum().backward()\n1")
    assert (cell.stdout, cell.result) == ("", "rank 0: 1\nrank 1: 1")


def test_a_group_that_is_there_already(kernel):
    cell = kernel.run("%%ranks\ndist.init_process_group('gloo')")
    assert cell.ename == "RankFailed"
    assert "This rank has joined one already: %ranks and init=True do that" in (
        cell.evalue
    )


def test_the_table(kernel):
    cell = kernel.run("%ranks")
    assert re.fullmatch(
        r"rank 0  alive    cpu  memory ~ \d+ MB  pid \d+\n"
        r"rank 1  alive    cpu  memory ~ \d+ MB  pid \d+\n",
        cell.stdout,
    )


def test_a_deadlock(kernel):
    cell = kernel.run("%%ranks 0 --stuck-after 1\ny = 1\ndist.barrier()")
    assert cell.ename == "RanksStuck"
    title, _, first, second, hint = cell.evalue.splitlines()
    assert title == "rank 0 of 2 is stuck: no progress for 1 s"
    assert re.search(r"waiting +barrier #\d+ +Cell In\[\d+\], line 3: dist.b", first)
    assert re.fullmatch(r"1 +left out +- +not part of this call", second)
    assert hint.startswith("rank 1 did not run this")
    cell = kernel.run("%%ranks\n'y' in globals()")
    assert cell.stdout == (
        "%ranks: 2 new ranks, because the last call did not come to an end; "
        "what the old held is gone\n"
    )
    assert cell.result == "rank 0: False\nrank 1: False"


def test_a_rank_that_dies(kernel):
    cell = kernel.run("%%ranks 1\nimport os\nos._exit(3)")
    assert cell.evalue.startswith("rank 1 of 2 failed: exit: the process ended with")
    lines = kernel.run("%ranks").stdout.splitlines()
    assert lines[1:] == [
        "rank 1  dead (exit code 3)  cpu",
        "the next %%ranks cell starts new ranks",
    ]
    cell = kernel.run("%%ranks\nrank")
    assert cell.stdout.startswith("%ranks: 2 new ranks, because rank 1 ended with exit")


def test_stop(kernel):
    cell = kernel.run(
        "%%ranks\nimport os\nif rank == 0:\n    os.kill(os.getppid(), 2)\n"
        "dist.recv(torch.ones(1), 1 - rank)"
    )
    assert cell.traceback == "KeyboardInterrupt"
    assert "Interrupted: 2 running rank(s) of 2 stopped in" in cell.stderr
    assert kernel.children() == []
    cell = kernel.run("%%ranks\nrank")
    assert "because the last call was interrupted" in cell.stdout


def test_help(kernel):
    """What `%ranks?` shows."""
    code = "print(get_ipython().find_cell_magic('ranks').__doc__)"
    text = kernel.run(code).stdout
    for words in ("%ranks 4 ", "%%ranks 0,2", "%ranks off", "persist", "semicolon"):
        assert words in text


def test_off_and_other_number(kernel):
    before = kernel.children()
    assert kernel.run("%ranks 1").stdout.startswith("1 rank is ready on cpu, ")
    assert wait_gone(before) == []
    assert kernel.run("%%ranks\nworld_size").result == "rank 0: 1"
    assert refused(kernel, "%%ranks 1\n1") == "there is no rank 1: the only rank is 0"
    cell = kernel.run("%ranks off")
    assert (cell.stdout, cell.traceback) == ("1 rank ended\n", "")
    assert kernel.children() == []


def test_stop_while_ranks_start(bare):
    bare.client.execute("%ranks 2")
    until = time.monotonic() + 60
    while len(bare.children()) < 2:
        assert time.monotonic() < until
        time.sleep(0.02)
    bare.manager.interrupt_kernel()
    assert bare.finish(60).traceback == "KeyboardInterrupt"
    assert bare.children() == []
    assert refused(bare, "%ranks").startswith("no ranks are running")


def test_ranks_end_with_the_kernel(bare):
    """The last test with this kernel."""
    bare.run("%ranks 2")
    ranks = bare.children()
    assert len(ranks) == 2
    psutil.Process(bare.pid).kill()
    assert wait_gone(ranks) == []


def test_the_same_text_under_nbval(tmp_path):
    """Executed once, and compared strictly with the sanitizer of the notebooks."""
    book = nbformat.v4.new_notebook()
    cells = [
        "%load_ext ddp_lab",
        "%ranks 2",
        "%%ranks\nx = torch.ones(1) * rank\ndist.all_reduce(x)\nprint(rank)\nx",
        "%ranks",
        "%%ranks\nassert rank == 0, 'not me'",
        "%pull x 0\nx",
        "%%ranks 0 --stuck-after 1\ndist.barrier()",
        "%ranks off",
        "import os\nfrom ddp_lab import launch\n"
        "launch(lambda: print('hello from', os.environ['RANK']))",
    ]
    book.cells = [nbformat.v4.new_code_cell(text) for text in cells]
    for failing in (4, 6):
        book.cells[failing].metadata["tags"] = ["raises-exception"]
    nbclient.NotebookClient(book, kernel_name="python3").execute()
    streams = [o["text"] for o in book.cells[-1].outputs if o.get("name") == "stdout"]
    assert "".join(streams) == "hello from 0\n[rank 1] hello from 1\n"
    path = tmp_path / "book.ipynb"
    nbformat.write(book, path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--nbval", "--nbval-cell-timeout=120",
         f"--nbval-sanitize-with={SANITIZER}", "-p", "no:cacheprovider",
         "-c", "/dev/null", str(path)],
        capture_output=True, text=True, cwd=tmp_path, timeout=200,
    )  # fmt: skip
    assert f"{len(cells)} passed" in done.stdout, done.stdout


def test_the_package_needs_no_ipython():
    code = (
        "import sys, ddp_lab; print('IPython' in sys.modules, 'torch' in sys.modules)"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert said == "False False\n"


def test_text_of_values():
    texts = PerRank({0: "[1,\n 2]", 10: "3"})
    assert repr(texts) == "rank 0:  [1,\n          2]\nrank 10: 3"
    assert run_cell("'ü'; {'b': 1, 'a': 2}", "<cell>") == "{'b': 1, 'a': 2}"
    assert run_cell("'ü' ; # hidden", "<cell>") is None
    assert run_cell("", "<cell>") is None
    assert run_cell("'words ' * 40", "<cell>") == repr("words " * 40)
    assert run_cell("[1] * 60", "<cell>").count("\n") == 2
    for source, hidden in [("'é'  ;", True), ("(1,\n2) # ;", False), ("1", False)]:
        last = ast.parse(source).body[-1]
        assert end_of_cell_is_hidden(source, last) is hidden
