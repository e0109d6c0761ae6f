"""What Slurm tells a task about where the tasks are, written out.

    SLURM_STEP_NODELIST        n[1-2,05]    n1, n2, n05
    SLURM_STEP_TASKS_PER_NODE  2(x2),1      2 tasks on n1, 2 on n2, 1 on n05

Source: srun(1), "Output environment variables".
"""

import os
import re
from collections.abc import Mapping

__all__ = ["expand_counts", "expand_hosts", "slurm_hosts"]


def slurm_hosts(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Tell on which host Slurm put each rank of this step.

    Args:
        environ: environment variables, as srun sets them.

    Returns:
        A host for each rank; empty where Slurm does not say, or not clearly.
    """
    hosts = expand_hosts(environ.get("SLURM_STEP_NODELIST", ""))
    counts = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if len(hosts) != len(counts):
        return []
    layout = [h for h, n in zip(hosts, counts, strict=True) for _ in range(n)]
    # tasks may have been dealt to the nodes in turn instead: we know where we are
    rank, node = environ.get("SLURM_PROCID", ""), environ.get("SLURM_NODEID", "")
    in_blocks = environ.get("SLURM_DISTRIBUTION", "block").startswith("block")
    if not (in_blocks and rank.isdigit() and node.isdigit()):
        return []
    fits = int(rank) < len(layout) and layout[int(rank)] == hosts[int(node)]
    return layout if fits else []


def expand_hosts(names: str) -> list[str]:
    """Write out Slurm's short form: ``n[1-2,05],x`` as n1, n2, n05, x.

    ``scontrol show hostnames`` does the same where Slurm is installed, which need not
    be so inside a container.
    """
    hosts = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", names):
        before, bracket, rest = item.partition("[")
        if not bracket:
            hosts.append(item)
            continue
        inside, _, after = rest.partition("]")
        for part in inside.split(","):
            first, _, last = part.partition("-")
            for number in range(int(first), int(last or first) + 1):
                hosts += expand_hosts(f"{before}{number:0{len(first)}d}{after}")
    return hosts


def expand_counts(counts: str) -> list[int]:
    """Write out Slurm's tasks per node: ``2(x3),1`` as 2, 2, 2, 1."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(n) for n, times in found for _ in range(int(times or 1))]
