"""One run on two hosts, by torchrun and by hand, with a cable that may be cut."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ddp_lab
from ddp_lab.runs.record import Run
from multihost.hosts import missing_for_hosts, two_hosts, wait_for
from small_commands import ENVIRON, hold, num_held, train_uninterrupted

PACKAGE = Path(ddp_lab.__file__).parent
ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts"

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing_for_hosts()), reason=missing_for_hosts() or "-"),
]

TRAIN = ["-m", "ddp_lab.train", "--limit-train=48", "--limit-test=16", "--epochs=4",
         "--global-batch-size=8", "--norm=group", "--lr=0.001",
         "--image-size=16", "--precision=float64", "--device=cpu",
         "--out=run"]  # fmt: skip
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1",
            "--rdzv-backend=c10d", "--rdzv-endpoint=host1:29500"]  # fmt: skip


def curve(folder):
    """What a run's history says about learning, by step."""
    history = Run.open(folder / "run").history
    return [
        {k: line.get(k) for k in ("kind", "epoch", "step", "loss", "accuracy", "lr")}
        for line in history.lines
    ]


def num_lines(folder):
    history = Run(folder / "run").history_file
    return len(history.read_text().splitlines()) if history.exists() else 0


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The curve of the same settings on one machine, with two spawned ranks."""
    folder = tmp_path_factory.mktemp("reference")
    train_uninterrupted(TRAIN[2:], folder / "run")
    found = curve(folder)
    assert [x["step"] for x in found if x["kind"] == "step"] == [*range(1, 25)]
    return found


@pytest.fixture
def hosts(tmp_path):
    """Two hosts, each with a working folder of its own: there is no shared disk."""
    with two_hosts(tmp_path) as pair:
        for host in pair:
            host.folder = tmp_path / host.name
            host.log = tmp_path / f"{host.name}.log"
            host.folder.mkdir()
        yield pair


def start(host, *command, **environ):
    return host.start(command, log=host.log, cwd=host.folder, **(ENVIRON | environ))


def hold_all(hosts, place):
    for host in hosts:
        hold(host.folder, place)


def wait_until_held(hosts, place, among):
    def there():
        return all(num_held(host.folder, place) == 1 for host in hosts)

    wait_for(there, f"the ranks wait at {place}", among=among)


def lines_with(host, text):
    log = host.log.read_text(errors="replace") if host.log.exists() else ""
    return [line for line in log.splitlines() if text in line]


def test_torchrun_on_two_hosts_though_the_cable_is_out_for_a_while(hosts, reference):
    """Shorter than timeout_s: nobody notices, and not a bit is different."""
    first, second = hosts
    hold_all(hosts, "step 4")
    agents = [start(h, *TORCHRUN, "--nnodes=2", *TRAIN) for h in hosts]
    wait_until_held(hosts, "step 4", agents)
    second.cut()
    hold_all(hosts, "nowhere")
    # what is sent is lost, and sent again, after a longer wait each time
    wait_for(lambda: "backoff:" in first.sockets(), "a packet is lost", among=agents)
    assert num_lines(first.folder) == 3
    second.mend()
    assert [agent.wait(300) for agent in agents] == [0, 0]
    assert curve(first.folder) == reference
    assert lines_with(first, "digits: 2 ranks on cpu (gloo), 4 images a rank")
    assert lines_with(first, "test accuracy")
    assert curve(second.folder) == reference  # each host has the run on its own disk
    assert lines_with(first, "the run's files are on host1, host2, each by itself")


def test_rank_0_s_host_is_lost_for_good(hosts, reference):
    """The other one has the run too, and goes on with two ranks of its own."""
    first, second = hosts
    command = [*TORCHRUN, "--nnodes=2", *TRAIN, "--checkpoint-every=1"]
    hold_all(hosts, "step 9")
    agents = [start(host, *command) for host in hosts]
    wait_until_held(hosts, "step 9", agents)
    first.cut()
    first.kill_all()
    second.kill_all()
    hold(second.folder, "nowhere")
    alone = [sys.executable, *TRAIN, "--auto-resume", "--num-ranks=2"]
    assert start(second, *alone, "--num-threads=1").wait(300) == 0
    assert lines_with(second, "going on after step 8, in epoch 2")
    assert curve(second.folder) == reference


def test_a_host_is_lost_and_comes_back(hosts, reference):
    """Longer than timeout_s: host1 goes on alone, then with host2 again."""
    first, second = hosts
    options = ["--nnodes=1:2", "--max-restarts=10", "--rdzv-id=job"]
    patience = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
    command = [*TORCHRUN, *options, f"--rdzv-conf={patience}", *TRAIN]
    command += ["--timeout-s=8", "--checkpoint-every=1"]
    # A new agent waits in vain for the address of a store that the old ones have agreed
    # on before (torch 2.14): each round must make a store of its own.
    environ = {"LOGLEVEL": "INFO", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    story = []
    began = time.monotonic()

    def note(what):
        at = f"{time.monotonic() - began:6.1f} s  step {num_lines(first.folder):3}  "
        story.append(at + what)

    try:
        hold_all(hosts, "step 3")
        agents = [start(host, *command, **environ) for host in hosts]
        wait_until_held(hosts, "step 3", agents)
        second.cut()
        note("host2's cable is out")
        hold(first.folder, "step 6")  # else the run is over before host2 is back
        agent = agents[0]
        wait_for(
            lambda: lines_with(first, "digits: 1 rank on cpu"),
            "host1 has given host2 up and starts alone",
            among=[agent],
        )
        note("host1 starts alone")
        wait_until_held([first], "step 6", [agent])
        note("host1 has gone on alone")
        second.kill_all()
        second.mend()
        hold(second.folder, "nowhere")
        agents[1] = start(second, *command, **environ)
        wait_for(lambda: lines_with(first, "Detected 1 new nodes"), "host2 is back",
                 among=agents)  # fmt: skip
        hold(first.folder, "nowhere")
        note("host2 is back")
        assert [agent.wait(300) for agent in agents] == [0, 0]
        note("the run has ended")
    finally:
        keep(story, hosts)
    found = curve(first.folder)
    assert [(x["kind"], x["step"]) for x in found] == [
        (x["kind"], x["step"]) for x in reference
    ]
    for line, expected in zip(found, reference, strict=True):
        # another number of ranks adds up in another order: float64 keeps 16 digits
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-12), line
        assert line["accuracy"] == expected["accuracy"]
    worlds = [x.split()[3] for x in lines_with(first, " on digits: ")]
    assert worlds[0] == "2"
    assert "1" in worlds
    assert worlds[-1] == "2"


def keep(story, hosts):
    """artifacts/multihost.log, for people to look at; also of a test that fails."""
    ARTIFACTS.mkdir(exist_ok=True)
    parts = ["\n".join(story)]
    for host in hosts:
        log = host.log.read_text(errors="replace") if host.log.exists() else ""
        kept = [x for x in log.splitlines() if "frame #" not in x and x.strip()]
        parts.append(f"\n== {host.name} ({host.address})\n" + "\n".join(kept))
    (ARTIFACTS / "multihost.log").write_text("\n".join(parts) + "\n")


# ---------------------------------------------------- ranks that are started by hand

MEET = """
import json, os, sys, time
from pathlib import Path
from ddp_lab.errors import LabError
from ddp_lab.world import check_same, gather_json, join_world

# importing takes how long it takes: the time to arrive begins when both have done it
Path("..", "has-imported-" + os.environ["RANK"]).touch()
while len(list(Path("..").glob("has-imported-*"))) < 2:
    time.sleep(0.01)
try:
    with join_world(device="cpu", arrive_timeout_s=float(sys.argv[1])) as world:
        print(json.dumps(gather_json(world.rank)), flush=True)
        check_same({"training data:": sys.argv[2]})
except LabError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
"""


def by_hand(host, rank, *arguments, world_size=2, **environ):
    """A rank under no launcher, as srun starts them: RANK, WORLD_SIZE, MASTER_ADDR."""
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "host1",
        "MASTER_PORT": "29500",
    }
    return start(host, sys.executable, *arguments, **(variables | environ))


def meet(host, rank, *, timeout_s=60, data="digits", **options):
    return by_hand(host, rank, "-c", MEET, str(timeout_s), data, **options)


def said(host):
    noise = ("[W", "[E", "frame #", "Exception raised", "<omitting")
    log = host.log.read_text().splitlines()
    return [line for line in log if line and not line.startswith(noise)]


def test_hosts_with_different_data_are_named(hosts):
    first, second = hosts
    ranks = [meet(first, 0, data="aaaa"), meet(second, 1, data="bbbb")]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    message = (
        "RanksDisagree: the ranks disagree: rank 0 on host1 has training data: aaaa, "
        "rank 1 on host2 has training data: bbbb; give all ranks the same code, data "
        "and settings"
    )
    assert said(first) == said(second) == ["[0, 1]", message]


def test_hosts_with_different_code_are_named(hosts):
    """Though it is only a line's difference; and nobody has begun a run."""
    _, second = hosts
    shutil.copytree(PACKAGE, second.folder / "ddp_lab")  # found before any other
    with (second.folder / "ddp_lab" / "step.py").open("a") as file:
        file.write("# another version\n")
    ranks = [by_hand(host, rank, *TRAIN) for rank, host in enumerate(hosts)]
    assert [rank.wait(120) for rank in ranks] == [2, 2]
    for host in hosts:
        [message] = said(host)
        assert message.startswith(
            "ddp_lab.train: the ranks disagree: rank 0 on host1 has ddp_lab of sha256: "
        )
        assert ", rank 1 on host2 has ddp_lab of sha256: " in message
        assert not (host.folder / "run").exists()


def test_a_name_that_leads_to_the_loopback(hosts):
    """Debian writes 127.0.1.1 beside a machine's own name."""
    first, second = hosts
    names = second.hosts_file.read_text()
    second.hosts_file.write_text(names.replace("10.77.0.2 host2", "127.0.1.1 host2"))
    ranks = [meet(first, 0), meet(second, 1)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    assert said(first) == said(second)
    assert said(first)[0].startswith(
        "BadInput: rank 1: on host2 the machine's own name leads to 127.0.1.1, so gloo"
    )

    # and the cure that it names
    for host in hosts:
        host.log.unlink()
    cure = {"GLOO_SOCKET_IFNAME": second.interface}
    ranks = [meet(first, 0), meet(second, 1, **cure)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    assert said(first) == said(second) == ["[0, 1]"]


def test_the_missing_rank_is_named_and_where_it_should_be(hosts):
    """One of three does not come; Slurm's variables say where it was to run."""
    first, second = hosts
    slurm = {
        "SLURM_STEP_NODELIST": "host[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "1,2",
        "SLURM_JOB_ID": "7",
    }
    places = [{"SLURM_PROCID": str(r), "SLURM_NODEID": str(r)} for r in (0, 1)]
    ranks = [
        meet(host, r, world_size=3, timeout_s=4, **slurm, **places[r])
        for r, host in enumerate(hosts)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    message = (
        "LabError: 2 of 3 ranks arrived within 4 s, missing: 2 (Slurm put 2 on "
        "host2). Did it fail before it came here, or was it never started (is the "
        "world size right)? Arrived: 0 on host1, 1 on host2."
    )
    assert message in (said(first) + said(second))
    lost = "lost the store before all ranks had arrived"
    assert all(said(h) == [message] or lost in said(h)[0] for h in hosts)


def test_a_host_that_cannot_be_reached(hosts):
    first, second = hosts
    second.cut()
    ranks = [meet(host, r, timeout_s=2) for r, host in enumerate(hosts)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    assert said(first)[0].startswith(
        "LabError: 1 of 2 ranks arrived within 2 s, missing: 1. Did it fail before"
    )
    assert said(second)[0].startswith(
        "LabError: rank 1 on host2 found no store at host1:29500 within 2 s ("
    )
    assert "does the firewall let the port through?" in said(second)[0]


def test_nothing_of_the_hosts_is_left(tmp_path):
    """Not even after a failure, with processes that ignore signals."""
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    with (
        contextlib.suppress(ZeroDivisionError),
        two_hosts(tmp_path) as (first, second),
    ):
        names = {first.namespace, second.namespace}
        process = first.start(
            [sys.executable, "-c", deaf], log=tmp_path / "log", cwd=tmp_path
        )
        wait_for(lambda: first.pids() == [process.pid], "it runs on host1")
        assert names <= set(os.listdir("/run/netns"))
        raise ZeroDivisionError
    assert process.returncode == -signal.SIGKILL
    assert not names & set(os.listdir("/run/netns"))
    links = json.loads(subprocess.check_output(["ip", "-json", "link"]))
    assert first.interface not in {link["ifname"] for link in links}
