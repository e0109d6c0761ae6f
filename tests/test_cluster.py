"""The files in cluster/ are well-formed, ask for what a run needs, and keep it."""

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

import ddp_lab
from ddp_lab.runs.stop import STOP_SIGNALS
from ddp_lab.train import parse_arguments
from test_project import ROOT

CLUSTER = ROOT / "cluster"
FILES = sorted(path.name for path in CLUSTER.iterdir() if path.name != "README.md")
JOB_SCRIPTS = [name for name in FILES if name.endswith(".sbatch")]
IMAGE = f"registry.example.org/ddp_lab:{ddp_lab.__version__}"
TORCHRUNS_OWN_LIMIT_S = 30
FIRST_EPHEMERAL_PORT = 32768  # Linux's, unless somebody changes ip_local_port_range
each_job_script = pytest.mark.parametrize("name", JOB_SCRIPTS)


def text_of(name):
    return (CLUSTER / name).read_text()


def read(name):
    return yaml.safe_load(text_of(name))


def comments_of(name):
    """What a file says about itself, without the breaks of lines."""
    lines = re.findall(r"(?m)^# ?(.*)$", text_of(name))
    return " ".join(" ".join(lines).split())


def pods():
    """The pod of each kind of Kubernetes job, its container, and its arguments."""
    job = read("pytorchjob.yaml")["spec"]["pytorchReplicaSpecs"]["Worker"]
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    yield pod, container, container["command"] + container["args"]
    [job] = read("trainingruntime.yaml")["spec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    trainer = read("trainjob.yaml")["spec"]["trainer"]
    container = {**container, "resources": trainer["resourcesPerNode"]}
    yield pod, container, trainer["command"] + trainer["args"]


def words(script):
    """A shell's command as words; what it puts in is not looked at."""
    text = re.sub(r"\\\n", " ", script)
    text = re.sub(r"\$\(.*?\)", "host", text)
    return shlex.split(re.sub(r"\$(\w+|\{.*?\})", "0", text))


def read_command(program, *arguments):
    """What torchrun's parser and ours make of a command."""
    assert program == "torchrun"
    parsed = get_args_parser().parse_args(arguments)
    assert parsed.training_script == "ddp_lab.train"
    assert parsed.module
    return parsed, parse_arguments(parsed.training_script_args)


def env_of(container):
    return {pair["name"]: pair["value"] for pair in container.get("env", ())}


@pytest.mark.parametrize("name", FILES)
def test_a_file_says_what_was_run(name):
    said = comments_of(name)
    assert "Not run" in said
    assert ("Run by tests/multihost/test_real_slurm.py" in said) == (
        name in JOB_SCRIPTS
    )
    assert name in text_of("README.md")


# Kubernetes and SkyPilot


def test_pods_go_on_with_what_is_on_a_volume_that_all_of_them_share():
    claim = read("runs_claim.yaml")
    assert claim["kind"] == "PersistentVolumeClaim"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for pod, container, command in pods():
        _, config = read_command(*command)
        assert config.auto_resume
        mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        [mount] = [m for m in mounts if Path(m) in config.out.parents]
        claimed = volumes[mounts[mount]]["persistentVolumeClaim"]["claimName"]
        assert claimed == claim["metadata"]["name"]
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"


def test_pods_may_take_their_time_to_save():
    for pod, container, _ in pods():
        ranks_s = int(env_of(container)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
        pod_s = pod["terminationGracePeriodSeconds"]
        assert TORCHRUNS_OWN_LIMIT_S < ranks_s < pod_s


def test_pods_have_a_gpu_a_rank_and_our_image():
    ranks = [
        int(read("pytorchjob.yaml")["spec"]["nprocPerNode"]),
        read("trainjob.yaml")["spec"]["trainer"]["numProcPerNode"],
    ]
    for (_, container, _), num_ranks in zip(pods(), ranks, strict=True):
        assert container["resources"]["limits"]["nvidia.com/gpu"] == num_ranks
        assert container["image"] == IMAGE


def test_what_can_join_and_what_starts_anew():
    """c10d lets a new pod join; under Trainer's static rendezvous all start anew."""
    policy = read("pytorchjob.yaml")["spec"]["elasticPolicy"]
    assert policy["rdzvBackend"] == "c10d"
    (_, elastic, _), (pod, static, command) = pods()
    assert env_of(elastic)["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"

    parsed, _ = read_command(*command)
    assert parsed.rdzv_backend == "static"
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in env_of(static)
    jobs = read("trainingruntime.yaml")["spec"]["template"]["spec"]
    assert jobs["failurePolicy"]["maxRestarts"] > 0
    [job] = jobs["replicatedJobs"]
    assert job["template"]["spec"]["backoffLimit"] == 0
    assert pod["restartPolicy"] == "Never"


def test_trainjob_names_our_runtime():
    reference = read("trainjob.yaml")["spec"]["runtimeRef"]
    runtime = read("trainingruntime.yaml")
    assert reference == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}


def test_skypilot_keeps_the_run_in_a_bucket():
    task = read("skypilot.yaml")
    assert task["resources"]["image_id"] == f"docker:{IMAGE}"
    assert task["resources"]["accelerators"].endswith(":1")
    parsed, config = read_command(*words(task["run"]))
    assert parsed.rdzv_backend == "static"
    assert config.auto_resume
    [(folder, mount)] = task["file_mounts"].items()
    assert Path(folder) in config.out.parents
    assert mount["source"].startswith("s3://")
    assert mount["mode"] == "MOUNT_CACHED"  # MOUNT cannot append, COPY keeps nothing
    assert re.search(r"--out /runs/ddp-lab/\$SKYPILOT_NODE_RANK$", task["run"].strip())


# The image


def test_image_is_made_of_all_that_pip_needs():
    text = text_of("Dockerfile")
    assert f"--tag {IMAGE} ." in text
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    copied = {
        source
        for line in re.findall(r"(?m)^COPY (.*)", text)
        for source in line.split()[:-1]
    }
    package = ddp_lab.__name__
    assert copied == {
        "pyproject.toml",
        project["readme"],
        *project["license-files"],
        package,
    }
    assert all((ROOT / source).exists() for source in copied)
    assert re.search(rf"(?m)^COPY {package} {package}$", text), "a folder's content"
    [python] = re.findall(r"(?m)^FROM python:(\d+\.\d+)", text)
    assert project["requires-python"] == f">={python}"


# Slurm


def directives(name):
    """What #SBATCH lines ask for; a value is empty where there is none."""
    lines = re.findall(r"(?m)^#SBATCH (.*)", text_of(name))
    options = [shlex.split(line, comments=True) for line in lines]
    return dict(word.partition("=")[::2] for option in options for word in option)


@each_job_script
def test_job_script_is_a_script(name):
    subprocess.run(["bash", "-n", CLUSTER / name], check=True)


@each_job_script
def test_job_asks_for_what_a_run_needs(name):
    asked = directives(name)
    assert int(asked["--nodes"]) > 1
    assert asked["--gpus-per-node"] == asked["--ntasks-per-node"] == "1"
    assert int(asked["--cpus-per-task"]) > 1
    assert {"--requeue", "--time"} <= set(asked)
    assert asked["--open-mode"] == "append"
    assert "# #SBATCH --account=ACCOUNT --partition=PARTITION" in text_of(name)


@each_job_script
def test_tasks_get_their_python_and_their_cpus(name):
    before, _, _ = text_of(name).partition("\nsrun ")
    assert '\nsource "${VENV:-.venv}/bin/activate" || exit\n' in before
    assert "\nexport SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK" in before


@each_job_script
@pytest.mark.parametrize("job", [1, 9_999, 10_000, 12_345, 67_108_863])
def test_ranks_meet_at_a_port_that_no_connection_is_given(name, job):
    [line] = re.findall(r"(?m)^MASTER_PORT=.*", text_of(name))
    script = f"SLURM_JOB_ID={job}; {line}; echo $MASTER_PORT"
    port = int(subprocess.check_output(["bash", "-c", script]))
    assert 1024 <= port < FIRST_EPHEMERAL_PORT


@each_job_script
def test_job_is_requeued_once_its_signal_has_stopped_the_ranks(name):
    sent, _, left_s = directives(name)["--signal"].partition("@")
    assert f"SIG{sent}" in {number.name for number in STOP_SIGNALS}
    assert int(left_s) > TORCHRUNS_OWN_LIMIT_S
    assert re.search(r'(?m)"\$status" -eq 75 .*\n +scontrol requeue', text_of(name))


def test_data_of_every_command_that_is_shown_are_there():
    """The digits ship with scikit-learn; a cluster's nodes may not download others."""
    texts = [text_of(name) for name in ["README.md", *JOB_SCRIPTS]]
    texts.append((ROOT / "README.md").read_text())
    found = [
        (script, shlex.split(arguments.partition("  ")[0]))
        for text in texts
        for script, arguments in re.findall(
            r"sbatch (?:-\S+ )*cluster/(\S+\.sbatch)\b([^`\n]*)", text
        )
    ]
    assert {script for script, _ in found} == set(JOB_SCRIPTS)
    for script, arguments in found:
        config = parse_arguments(arguments)
        assert not config.download
        if config.dataset != "digits":
            assert config.dataset == "cifar10"
            fetch = """CIFAR10 as D; D("data", download=True)'"""
            assert fetch in text_of(script)


def test_ranks_are_tasks_of_srun_also_in_containers():
    text = text_of("slurm.sbatch")
    command = 'python -m ddp_lab.train "$@"'
    assert f"\nsrun --kill-on-bad-exit=0 {command}\n" in text
    assert (
        f"# srun --kill-on-bad-exit=0 apptainer exec --nv ddp_lab.sif {command}" in text
    )
    assert f"docker://{IMAGE}" in text
    assert f"--container-image={IMAGE.replace('/', '#')} " in text


def on_each_node():
    """The shell function that slurm_torchrun.sbatch has each node run."""
    [function] = re.findall(
        r"(?ms)^on_each_node\(\) \{.*?^\}$", text_of("slurm_torchrun.sbatch")
    )
    return function


def test_torchrun_outlives_the_signal_and_waits_for_the_ranks():
    text = text_of("slurm_torchrun.sbatch")
    sent, _, left_s = directives("slurm_torchrun.sbatch")["--signal"].partition("@")
    [ignored, command] = re.findall(
        r"(?s) \(\n +trap '' (\w+)\n +exec (torchrun .*?)\n +\) &\n", on_each_node()
    )[0]
    assert ignored == sent
    parsed, _ = read_command(*words(command.removesuffix('"$@"')))
    assert parsed.rdzv_backend == "static"
    [ranks_s] = re.findall(r"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", text)
    assert TORCHRUNS_OWN_LIMIT_S < int(ranks_s) < int(left_s)


@pytest.mark.parametrize(
    ("torchrun", "status"),
    [
        ("exit 0", 0),
        ("exit 1", 1),  # a rank failed: another attempt would fail too
        ("trap 'exit 1' TERM; kill -USR1 $PPID; wait_for_ever", 75),
        ("trap 'exit 1' TERM; kill -TERM $PPID; wait_for_ever", 75),
        ("trap 'exit 1' TERM; kill -USR1 $$ $PPID; wait_for_ever", 75),  # to both
        ("trap 'exit 0' TERM; kill -USR1 $PPID; wait_for_ever", 0),  # it was done
    ],
)
def test_task_ends_with_75_once_it_was_asked_to_stop(tmp_path, torchrun, status):
    """Here torchrun has its shell asked, as Slurm may do."""
    program = tmp_path / "torchrun"
    wait = "wait_for_ever() { while :; do sleep 0.01; done; }"
    program.write_text(f"#!/bin/bash\n{wait}\n{torchrun}\n")
    program.chmod(0o755)
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }
    task = ["bash", "-uc", f"{on_each_node()}\non_each_node"]
    assert subprocess.run(task, env=environ, timeout=60).returncode == status
