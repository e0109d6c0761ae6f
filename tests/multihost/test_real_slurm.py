"""The job scripts in cluster/ on a real Slurm of two nodes, made for these tests.

Each node is a host of hosts.py with a slurmd; the first has the slurmctld too. Slurm
takes /dev/null for the GPU of each. All files of this Slurm are in a temporary folder.
Needs root, iproute2, slurm-wlm, munge.
"""

import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from ddp_lab.runs.record import Run
from multihost.hosts import missing_for_hosts, two_hosts, wait_for
from small_commands import ENVIRON, forget_held, hold, let_go, num_held

CLUSTER = Path(__file__).resolve().parents[2] / "cluster"
_TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")


def missing_for_slurm():
    if reason := missing_for_hosts():
        return reason
    absent = [tool for tool in _TOOLS if not shutil.which(tool)]
    return f"needs {', '.join(absent)}: apt install slurm-wlm munge" if absent else ""


pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing_for_slurm()), reason=missing_for_slurm() or "-"),
]

# A requeued job waits until its first attempt's credentials have expired (two minutes,
# if nothing else is said): before that a node takes it for the one that was killed.
CONF = """
ClusterName=lab
SlurmctldHost=host1(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=sched_interval=1,batch_sched_delay=0
MinJobAge=3600
ReturnToService=2
KillWait=5
GresTypes=gpu
NodeName=host1 NodeAddr=10.77.0.1 CPUs=2 Gres=gpu:1 State=UNKNOWN
NodeName=host2 NodeAddr=10.77.0.2 CPUs=2 Gres=gpu:1 State=UNKNOWN
PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
SMALL = ["--limit-train=64", "--limit-test=16", "--global-batch-size=8", "--device=cpu",
         "--norm=group", "--lr=0.001", "--image-size=16"]  # fmt: skip


class Slurm:
    """What a user of the cluster can do, on host1."""

    def __init__(self, hosts, folder):
        self.hosts, self.folder = hosts, folder
        self.host = hosts[0]
        self.number = 0

    def do(self, *command):
        self.number += 1
        log = self.folder / f"command{self.number}"
        environ = {
            **ENVIRON,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
        }
        process = self.host.start(command, log=log, cwd=self.folder, **environ)
        assert process.wait(60) == 0, f"{command}: {log.read_text()}"
        return log.read_text()

    def submit(self, script, *arguments):
        """The job has both CPUs of each node, and is to use one."""
        options = ["--parsable", "--exclusive", "--cpus-per-task=1"]
        return self.do("sbatch", *options, str(CLUSTER / script), *arguments).strip()

    def state(self, job):
        fields = self.do("scontrol", "--oneliner", "show", "job", job).split()
        return dict(field.partition("=")[::2] for field in fields)

    def is_up(self):
        """Whether both nodes wait for work."""
        log = self.folder / "sinfo"
        log.unlink(missing_ok=True)
        environ = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        ask = ["sinfo", "--noheader", "--format=%T %D"]
        self.host.start(ask, log=log, cwd=self.folder, **environ).wait(60)
        return log.read_text().split() == ["idle", "2"]

    def wait_for_state(self, job, *states):
        def there():
            return self.state(job)["JobState"] in states

        wait_for(there, f"job {job} is {' or '.join(states)}", limit_s=300)

    def output(self, job):
        path = self.folder / f"slurm-{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def logs(self, job=None):
        """The job's output and what the daemons said, to find out what went wrong."""
        parts = [f"job {job}: {self.state(job)}\n{self.output(job)}"] if job else []
        for name in ("ctld", "slurmd-host1", "slurmd-host2", "munge.out"):
            log = self.folder / name
            parts.append(
                f"== {name}\n{log.read_text()[-3000:] if log.exists() else ''}"
            )
        return "\n".join(parts)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool-host1", "spool-host2"):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(CONF.format(folder=folder))
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
    activate = folder / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f"PATH={Path(sys.executable).parent}:$PATH\n")
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    environ = {"SLURM_CONF": str(folder / "slurm.conf")}
    with two_hosts(folder) as hosts:
        first, _ = hosts
        munge = ["munged", "--foreground", "--force", f"--key-file={key}",
                 f"--socket={folder}/munge.socket", f"--pid-file={folder}/munge.pid",
                 f"--log-file={folder}/munge.log",
                 f"--seed-file={folder}/munge.seed"]  # fmt: skip
        daemons = [first.start(munge, log=folder / "munge.out", cwd=folder)]
        wait_for((folder / "munge.socket").exists, "munge is up", among=daemons)
        daemons.append(
            first.start(["slurmctld", "-D"], log=folder / "ctld", cwd=folder, **environ)
        )
        for host in hosts:
            log = folder / f"slurmd-{host.name}"
            daemons.append(host.start(["slurmd", "-D"], log=log, cwd=folder, **environ))
        cluster = Slurm(hosts, folder)
        try:
            wait_for(lambda: cluster.is_up(), "slurmctld answers", among=daemons)
            yield cluster
        except AssertionError:
            print(cluster.logs())
            raise


def test_a_job_on_two_nodes(slurm):
    job = slurm.submit("slurm.sbatch", *SMALL, "--epochs=2")
    slurm.wait_for_state(job, "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL")
    assert slurm.state(job)["JobState"] == "COMPLETED", slurm.logs(job)
    assert slurm.state(job)["NodeList"] == "host[1-2]"
    folder = f"runs/digits-resnet18-slurm-{job}-0"
    said = slurm.output(job)
    assert "on digits: 2 ranks on cpu (gloo), 4 images a rank" in said
    assert f"loss curve: {folder}/loss.png" in said
    run = Run.open(slurm.folder / folder)
    assert run.environment["world_size"] == 2
    assert [line["step"] for line in run.history.steps] == [*range(1, 17)]
    assert [line["epoch"] for line in run.history.evals] == [1, 2]


def signal_first_processes(slurm):
    """As a Slurm does that signals the first process of each task only."""
    for host in slurm.hosts:
        words = {p: Path(f"/proc/{p}/cmdline").read_bytes() for p in host.pids()}
        start = re.compile(rb"[^\0]*bash\0-c\0on_each_node ")
        [task] = [pid for pid, command in words.items() if start.match(command)]
        os.kill(task, signal.SIGUSR1)


@pytest.mark.parametrize(
    ("script", "signalled"),
    [
        ("slurm.sbatch", "all processes"),
        ("slurm_torchrun.sbatch", "all processes"),
        ("slurm_torchrun.sbatch", "first processes"),
    ],
)
def test_a_job_whose_time_is_over_goes_on(slurm, script, signalled):
    """The signal that Slurm sends before the time limit; here scancel sends it.

    It comes while rank 0 saves, and nobody may kill that.
    """
    epochs = 3
    forget_held(slurm.folder)
    hold(slurm.folder, "saving 4")
    job = slurm.submit(script, *SMALL, f"--epochs={epochs}", "--checkpoint-every=4")
    run = Run(slurm.folder / f"runs/digits-resnet18-slurm-{job}-0")

    wait_for(lambda: num_held(slurm.folder, "saving 4"), "it has begun", limit_s=300)
    assert slurm.state(job)["TresPerNode"] == "gres:gpu:1"
    step = slurm.do("scontrol", "show", "step", f"{job}.0")
    assert "CPUs=2 Tasks=2 " in step
    if signalled == "all processes":
        slurm.do("scancel", "--signal=USR1", job)
    else:
        signal_first_processes(slurm)
    if script == "slurm_torchrun.sbatch":
        wait_for(
            lambda: slurm.output(job).count("death signal, shutting down workers") == 2,
            "both torchruns have been told",
        )
    let_go(slurm.folder)
    wait_for(lambda: slurm.state(job)["Restarts"] == "1", "it is requeued", limit_s=300)
    slurm.wait_for_state(job, "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL")
    assert slurm.state(job)["JobState"] == "COMPLETED", slurm.logs(job)
    said = slurm.output(job)
    stops = re.findall(r"ddp_lab\.train: stopped by SIG\w+ after step (\d+),", said)
    assert len(stops) == 1, said
    assert re.findall(r"going on after step (\d+),", said) == stops, said
    assert f"after {epochs} epochs" in said
    steps = Run.open(run.folder).history.steps
    assert [line["step"] for line in steps] == [*range(1, 8 * epochs + 1)]
