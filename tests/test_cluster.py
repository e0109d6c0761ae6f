"""The files in cluster/ are well-formed, and the commands in them are ours."""

import re
import shlex
import subprocess

import pytest
import yaml
from torch.distributed.run import get_args_parser

from ddp_lab.train import parse_arguments
from test_project import ROOT

CLUSTER = ROOT / "cluster"


def commands(name):
    """The command line of each place in a file where one stands."""
    document = yaml.safe_load((CLUSTER / name).read_text())
    if name == "pytorchjob.yaml":
        for replica in document["spec"]["pytorchReplicaSpecs"].values():
            for container in replica["template"]["spec"]["containers"]:
                yield container["command"] + container["args"]
    elif name == "trainjob.yaml":
        trainer = document["spec"]["trainer"]
        yield trainer["command"] + trainer["args"]
    else:
        text = re.sub(r"\$\(.*?\)", "host", document["run"])
        yield shlex.split(re.sub(r"\$\w+", "0", text))


@pytest.mark.parametrize("name", sorted(p.name for p in CLUSTER.glob("*.yaml")))
def test_the_command_is_ours(name):
    found = list(commands(name))
    assert found
    for program, *arguments in found:
        assert program.endswith("torchrun")
        parsed = get_args_parser().parse_args(arguments)
        assert parsed.training_script == "ddp_lab.train"
        config = parse_arguments(parsed.training_script_args)
        assert config.auto_resume
        assert config.out is not None


def test_job_script_is_a_script():
    script = CLUSTER / "slurm.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    assert '-m ddp_lab.train "$@"' in text
    directives = re.findall(r"^#SBATCH (--[a-z-]+)", text, re.MULTILINE)
    assert {"--signal", "--requeue", "--ntasks-per-node"} <= set(directives)


def test_every_file_is_described():
    readme = (CLUSTER / "README.md").read_text()
    for path in CLUSTER.iterdir():
        assert path.name == "README.md" or path.name in readme, path.name
