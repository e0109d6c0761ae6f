# %% [markdown]
# # Many machines: one command on each host
#
# > Two ranks train on my machine. Now I have two machines.
#
# The program stays as it is. What changes is who starts it: a launcher runs on every
# machine, and the launchers have to find each other over a network. Most of what fails
# then fails before the first step, in silence. This notebook shows what it looks like.
#
# At the end of this notebook you will be able to
#
# - start one training on several hosts, and say which rank is where,
# - recognise a meeting that fails, and hosts that hold different data,
# - read what Slurm and Kubernetes tell a rank, and say what a network costs in advance.
#
# It takes about 30 minutes. No second machine is needed: two launchers on this one act
# as two *hosts*. You know ranks and `torchrun` from notebook 02.

# %% [markdown]
# ## What changes in the command
#
# On one host, and on each of two hosts, with the same arguments for the program:
#
# ```
# torchrun --standalone --nproc-per-node 4 -m ddp_lab.train --epochs 3
#
# torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-id first \
#     --rdzv-endpoint alpha:29500 -m ddp_lab.train --epochs 3
# ```
#
# `--nnodes` is the number of hosts, `--nproc-per-node` that of the ranks on each. The
# *endpoint* is a port of one of them, here of the host `alpha`: its torchrun opens a
# store there, and the others come. `--rdzv-id` is the name of the job. The line is the
# same on both hosts.

# %% [markdown]
# This is our second host: one more torchrun, with nothing but the loopback interface
# for a cable.

# %%
import os
import socket
import subprocess
import sys
import tempfile

scratch = tempfile.TemporaryDirectory()  # goes with the kernel
cable = "lo0" if sys.platform == "darwin" else "lo"


def start(*arguments, **variables):
    """Start torchrun, as on a host of its own."""
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": cable, **variables}
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        command, env={**os.environ, **own}, cwd=scratch.name, **pipes
    )


# %% [markdown]
# We also have to collect what they write, and each job gets a port of its own.


# %%
def outputs(hosts):
    """Wait for all, and return what each wrote; no one is left behind."""
    try:
        return [host.communicate(timeout=150) for host in hosts]
    finally:
        for host in hosts:
            host.terminate()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def meet():
    endpoint = f"127.0.0.1:{free_port()}"
    options = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "lesson"]
    return [*options, "--rdzv-endpoint", endpoint]


# %% [markdown]
# ## Which rank is where?
#
# The first program only says what its ranks find in their environment. `--local-addr`
# is the name under which a host wants to be known, here its address.
#
# **Predict:** two hosts start two ranks each. What are rank and local rank of the last
# one? And is `MASTER_PORT` the port of the endpoint?

# %%
from pathlib import Path

script = Path(scratch.name, "where.py")
num_written = script.write_text("""
import os
import sys

names = ["GROUP_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
line = " ".join(f"{name}={os.environ[name]}" for name in names)
sys.stdout.write(line + "\\n")  # at once: ranks of a host share its output
""")

options = [*meet(), "--nproc-per-node", "2", "--local-addr"]
hosts = [start(*options, f"127.0.0.{k}", script) for k in (1, 2)]
written = outputs(hosts)
for said, _ in written:
    print(*sorted(said.splitlines()), sep="\n", end="\n\n")
assert [host.returncode for host in hosts] == [0, 0], written

# %% [markdown]
# Ranks count through all hosts, local ranks start again on each. `GROUP_RANK` is the
# number of the host, or *node rank*. As a picture:

# %%
import matplotlib.pyplot as plt

from ddp_lab import plot_hosts

plot_hosts(num_hosts=2, ranks_per_host=2)
plt.show()

# %% [markdown]
# Three kinds of connections, and three surprises:
#
# - Once they have met, the host of rank 0 opens a second store for the ranks, at
#   `MASTER_ADDR` and `MASTER_PORT`. That port is *any free one*, and the ranks open
#   more, for the ring. A firewall that lets only the endpoint's port through stops the
#   job: open all ports between the hosts of a job.
# - Nobody numbered the hosts. With `c10d` they are sorted by their *names*, as text: by
#   what `socket.getfqdn()` says on each, or by `--local-addr`. So `gpu10` comes before
#   `gpu9`, and `--node-rank` is ignored. The host of the endpoint need not have rank 0,
#   which writes the files.
# - Of a ring of 4, 2 links cross the network; of a ring of 16 on two hosts, still 2.

# %% [markdown]
# ## The training, on two hosts
#
# **Predict:** one rank on each. Which host will print the progress of the run? How far
# will the losses be from those of two ranks started by one command?

# %% tags=["nbval-ignore-output"]
settings = "--epochs 1 --limit-train 256 --limit-test 64 --image-size 16"
settings = [*settings.split(), "--device", "cpu", "--num-threads", "1"]
program = ["-m", "ddp_lab.train", *settings, "--out", "two-hosts"]

options = [*meet(), "--nproc-per-node", "1", "--local-addr"]
hosts = [start(*options, f"127.0.0.{k}", *program) for k in (1, 2)]
written = outputs(hosts)
for number, (said, _) in enumerate(written):
    print(f"host {number}:", said.replace("; ", "\n") or "not a word")
assert [host.returncode for host in hosts] == [0, 0], written

# %% [markdown]
# One rank speaks for the run, wherever it is; a silent host is not a broken one. Now
# the same on one host, where `train` starts two ranks itself.

# %%
from ddp_lab import Run, parse_arguments, train

folder = Path(scratch.name, "one-host")
config = parse_arguments([*settings, "--num-ranks", "2", "--out", str(folder)])
result = train(config, progress="none")

histories = [Run.open(folder).history, Run.open(folder.parent / "two-hosts").history]
one, two = [[line["loss"] for line in history.steps] for history in histories]
for a, b in zip(one, two, strict=True):
    print(f"one host ~ {a:.4f}   two hosts ~ {b:.4f}")
print("equal to the last bit:", one == two)
assert one == two

# %% [markdown]
# What a rank computes depends on its rank and the world size, not on where it is.
#
# ## A meeting that fails
#
# How does a torchrun know that *it* is to open the endpoint? It compares the endpoint's
# name and address with its own. Where a machine's name leads to another address than
# the one in the endpoint, none of them recognises itself, and all wait for a host that
# does not come. `is_host` says it for them; here it tells our only host that it is not
# the one. Its patience, usually 60 seconds, is set to one.
#
# **Predict:** will the last line name the host or the port that did not answer?

# %%
conditions = "is_host=0,read_timeout=1"
lonely = start(*meet(), "--rdzv-conf", conditions, script)
((_, complaints),) = outputs([lonely])
print("exit status", lonely.returncode)
print(complaints.strip().splitlines()[-1].rpartition("rendezvous.api.")[2])
assert "RendezvousConnectionError" in complaints

# %% [markdown]
# It names neither. Remember the sentence. The cure is `--rdzv-conf is_host=1` on the
# host of the endpoint and `is_host=0` on the others. If it stays, the address is wrong
# or a firewall is in between. Who waits how long:
#
# | who waits for what | default | set by |
# |---|---|---|
# | torchrun, for the endpoint | 60 s | `--rdzv-conf read_timeout=` |
# | torchrun, for all hosts | 600 s | `--rdzv-conf join_timeout=` |
# | a rank, in a collective | NCCL 10, gloo 30 min | `init_process_group(timeout=)` |
#
# ## Hosts that differ
#
# Every host has its own disk. Say that copying the data to the second one was
# interrupted, and a single file is missing.

# %%
import shutil

from PIL import Image
from sklearn.datasets import load_digits

digits = load_digits(n_class=2)
complete = Path(scratch.name, "data-1")
for k in range(120):
    split = "train" if k < 96 else "test"
    place = complete / split / f"a {digits.target[k]}"
    place.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray((15 * digits.images[k]).astype("uint8"))
    picture.save(place / f"{k}.png")

shutil.copytree(complete, Path(scratch.name, "data-2"))
Path(scratch.name, "data-2", "train", "a 0", "0.png").unlink()

# %% [markdown]
# A sampler that counts 96 files on one host and 95 on the other deals out shards that
# overlap, and DDP would train on them without a word.
#
# **Predict:** what does the lab's program do, and after how many steps?

# %%
program = ["-m", "ddp_lab.train", *settings, "--dataset", "folder", "--data-dir"]
options = [*meet(), "--nproc-per-node", "1", "--local-addr"]
hosts = [start(*options, f"127.0.0.{k}", *program, f"data-{k}") for k in (1, 2)]
for number, (_, complaints) in enumerate(outputs(hosts)):
    assert "the ranks disagree" in complaints, complaints
    [line] = [s for s in complaints.splitlines() if "the ranks disagree" in s]
    print(f"host {number}:", line.replace(", rank", ",\n  rank").replace("; ", ";\n  "))
assert all(host.returncode != 0 for host in hosts)

# %% [markdown]
# Both stop before the first step, with the difference by name. Each rank makes a
# fingerprint of its settings, its list of files, and its model's shapes, and
# `check_same` from `ddp_lab.world` compares them: one small all-gather at the start.
# Where the hosts have different names, these are told too. Do the same in your own
# programs, and add the versions of your code and libraries.

# %% [markdown]
# ## What Slurm sets
#
# On a cluster nobody logs in on each host. Slurm's `srun` starts all ranks itself, so
# no torchrun is needed:
#
# ```
# #SBATCH --nodes 4 --ntasks-per-node 2
# export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
# srun python -m ddp_lab.train --epochs 3
# ```
#
# Its names are different, and the meeting place is left to you.
#
# | torchrun | Slurm |
# |---|---|
# | `RANK` | `SLURM_PROCID` |
# | `LOCAL_RANK` | `SLURM_LOCALID` |
# | `GROUP_RANK` | `SLURM_NODEID` |
# | `WORLD_SIZE` | `SLURM_STEP_NUM_TASKS` |
# | `LOCAL_WORLD_SIZE` | in `SLURM_STEP_TASKS_PER_NODE` |
#
# **Predict:** `2(x3),1` means two tasks on each of three hosts, and one on the fourth.
# Where is rank 5?

# %%
from ddp_lab import read_ranks

task = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}
read_ranks(task)

# %% [markdown]
# It is the second one on host 2. `torchrun` under `srun` works too, with *one* task on
# each host; with more, every task starts all ranks once again.

# %% [markdown]
# ## What Kubernetes sets
#
# A TrainJob of Kubeflow starts `torchrun` in each pod and passes its options in the
# environment: torchrun reads `PET_NNODES` for `--nnodes`, and so on. (The older
# PyTorchJob sets `RANK` and `WORLD_SIZE` as well, but its `RANK` counts *pods*.) Let
# two torchruns act as pods.
#
# **Predict:** there is no `--rdzv-backend` now. Who numbers the hosts?

# %%
job = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "127.0.0.1"}
job["PET_MASTER_PORT"] = str(free_port())

pods = [start(script, **job, PET_NODE_RANK=str(number)) for number in range(2)]
written = outputs(pods)
for said, _ in written:
    print(*sorted(said.splitlines()), sep="\n", end="\n\n")
assert [pod.returncode for pod in pods] == [0, 0], written

# %% [markdown]
# Kubernetes does, by `PET_NODE_RANK`. Without `c10d` torchrun uses its *static*
# rendezvous: host 0 must be at `MASTER_ADDR`, and the ranks use the same port.

# %% [markdown]
# ## What the network costs
#
# In each step the gradients are added up. A ring all-reduce of $S$ bytes on $n$ ranks
# makes $2(n-1)$ hops, one after the other. On each, a rank sends $S/n$ bytes to its
# neighbour, and they arrive after the link's latency $\alpha$. With $B$ bytes a second:
#
# $$t = 2(n-1)\,\alpha + \frac{2(n-1)}{n} \cdot \frac{S}{B}$$
#
# For large messages NCCL itself reckons with about 14 µs a hop over a network and 3.4
# µs over NVLink
# ([tuning.cc](https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc), protocol
# Simple). We count one rank a host on networks; NVLink joins 8 GPUs in a box.
#
# **Predict:** the gradients of ResNet-18 take 44.7 MB. How long does that take for two
# hosts with 1 Gbit/s between them? Where does the latency count?

# %%
from torchvision.models import resnet18

parameters = list(resnet18(num_classes=10).parameters())
num_bytes = sum(p.nbytes for p in parameters)
links = {  # bits a second, latency of a hop in seconds, how many ranks at most
    "1 Gbit/s": (1e9, 14e-6, 256),
    "10 Gbit/s": (10e9, 14e-6, 256),
    "100 Gbit/s": (100e9, 14e-6, 256),
    "400 Gbit/s": (400e9, 14e-6, 256),
    "NVLink, 450 GB/s": (3600e9, 3.4e-6, 8),
}


def all_reduce_ms(num_bytes, n, bits_per_s, latency_s):
    return 1000 * 2 * (n - 1) * (latency_s + 8 * num_bytes / n / bits_per_s)


for name, (*link, most) in links.items():
    times = {n: all_reduce_ms(num_bytes, n, *link) for n in (2, 8, 256) if n <= most}
    print(f"{name:16}", *(f"{n:3} ranks {t:7.2f} ms" for n, t in times.items()))

# %% [markdown]
# 0.36 seconds, in *each* step. Is it true? Here is gloo, between two network namespaces
# of Linux, on a virtual cable:
#
# | cable | formula | measured | ratio |
# |---|---|---|---|
# | 0.2 Gbit/s | 1.789 s | 1.87 s | 1.05 |
# | 1 Gbit/s | 0.358 s | 0.374 s | 1.05 |
# | 2.5 Gbit/s | 0.143 s | 0.152 s | 1.06 |
#
# Most of the difference are headers: of a packet's 1514 bytes, 66 are not ours.
#
# Must a step wait for it? DDP sends a bucket as soon as the *backward pass* has filled
# it. So only this pass can hide the network, and never for the last bucket, which is
# full when it ends. Say that it takes 65 ms.
#
# **Predict:** with which of these links does a step wait for more than the last bucket?

# %%
from ddp_lab import assign_buckets, plot_network_cost

buckets = [[parameters[k].nbytes for k in row] for row in assign_buckets(parameters)]
print("buckets of", ", ".join(f"{sum(row) / 1e6:.1f}" for row in buckets), "MB")
for name, (*link, most) in links.items():
    whole = all_reduce_ms(num_bytes, min(8, most), *link)
    last = all_reduce_ms(sum(buckets[-1]), min(8, most), *link)
    waits = max(last, whole - 65)
    print(f"{name:16} 8 ranks wait at least {waits:7.2f} ms (last bucket: {last:.2f})")

plot_network_cost(num_bytes, links, backward_s=0.065, measured={2: 0.374})
plt.show()

# %% [markdown]
# Where a line is flat, more ranks cost nearly nothing: all links work at once.
# Where it comes near to the dashed one, the latency counts. (Each bucket pays it anew,
# and NCCL may then take a tree for a ring.) What lies above the green band, a step has
# to wait for: with 1 Gbit/s a second host makes this training slower.
#
# ## Measure your own
#
# No formula knows your switches. The lab's benchmark times all-reduces of some sizes,
# and fits latency and bandwidth. *Bus bandwidth* is
# $\frac{2(n-1)}{n} \cdot \frac{S}{t}$, what a link has carried, as
# [nccl-tests](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md)
# counts it. On our two hosts, the cable is the loopback interface.
#
# **Predict:** where will the curve of the bandwidth bend?

# %% tags=["nbval-ignore-output"]
from IPython.display import Image

program = "-m ddp_lab.tools.bandwidth --device cpu --repeats 40 --out network.png"
sizes = ["--sizes", "4K", "64K", "256K", "1M", "4M", "16M"]
options = [*meet(), "--nproc-per-node", "1", "--local-addr"]
hosts = [start(*options, f"127.0.0.{k}", *program.split(), *sizes) for k in (1, 2)]
written = outputs(hosts)
print(*(said for said, _ in written), sep="")
assert [host.returncode for host in hosts] == [0, 0], written
Image(Path(scratch.name, "network.png").read_bytes())

# %% [markdown]
# Small messages take about the same time whatever their size: the latency. Above the
# size in the title the bytes count. (Here both hosts share two cores, which copy them.)
# On your hosts leave out `--device cpu`: between GPUs it measures NCCL (not run here).
# gloo says little of it: each goes its own way, over its own interface.
#
# ## A checklist, before the first run
#
# 1. **Names.** On each host, `getent hosts alpha` gives one address, and not one with
#    127. Other hosts that are told `127.0.1.1` connect to themselves.
# 2. **Ports.** `nc -vz alpha 29500` while alpha waits; all ports open between hosts.
#    Use a private network only: a rendezvous trusts whoever can reach it.
# 3. **Interface.** `ip -brief address` lists them. Name the right one, not `docker0` or
#    a VPN, in `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME`.
# 4. **What NCCL took.** Set `NCCL_DEBUG=INFO` and look for `NET/IB` (InfiniBand) or
#    `NET/Socket` (TCP), and for the interface behind it.
# 5. **The same everywhere**: data, code, and versions of PyTorch and NCCL.
# 6. **Clocks.** torchruns compare time stamps, and take a host for dead after 15 s.
# 7. **Limits.** `ulimit -l` must be unlimited for InfiniBand, `ulimit -n` large; a
#    container's `/dev/shm` has 64 MB only: `docker run --shm-size 8g`.
#
# ## When a host is lost
#
# `--nnodes 1:2 --max-restarts 3` goes on from the checkpoint with the hosts that are
# left, if the endpoint's is one of them: see [lesson 09](09_survive_failures.ipynb).
# Choose a global batch size that divides by every world size.

# %% [markdown]
# ## Summary
#
# - One torchrun on each host, with the same line. The program does not change, nor does
#   what it computes: losses are equal to the last bit.
# - The rank counts through all hosts, the local rank starts again on each. `c10d`
#   numbers hosts by itself, `static` by `--node-rank`.
# - If nobody answers: names, ports, interface. If all answer: is everything the same?
# - Slurm and Kubernetes say the same things under other names.
# - An all-reduce takes $2(n-1)/n$ times the bytes over the bandwidth, and $2(n-1)$
#   latencies. Only the backward pass hides it, and never the last bucket.
#
# ## Exercises
#
# **1.** Write torchrun's options for a list of host names: c10d, a port of one of the
# hosts, and a name for the job. They are the same on every host, so nothing in them may
# hold for one host only. The script, a file, comes behind them.

# %%
from ddp_lab import check


def torchrun_options(hosts, ranks_per_host, port):
    # BEGIN SOLUTION
    options = ["--nnodes", str(len(hosts)), "--nproc-per-node", str(ranks_per_host)]
    options += ["--rdzv-backend", "c10d", "--rdzv-id", "first"]
    return [*options, "--rdzv-endpoint", f"{hosts[0]}:{port}"]
    # STUB
    # raise NotImplementedError("a list of texts, the same for all hosts")
    # END SOLUTION


check(torchrun_options, "torchrun_options")

# %% [markdown] tags=["solution"]
# Everything is text, as in a shell. Any of the hosts may have the endpoint, if all name
# the same one; `localhost` would let every host wait for itself. `is_host` and
# `--local-addr` are for one host: the same on all, they would all be the same one.

# %% [markdown]
# **2.** Where is each rank? Take Slurm's short form apart: `2(x3),1` gives seven pairs
# (host, local rank).

# %%
import re


def places_from_slurm(tasks_per_node):
    # BEGIN SOLUTION
    places, host = [], 0
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node):
        for _ in range(int(times or 1)):
            places += [(host, local_rank) for local_rank in range(int(number))]
            host += 1
    return places
    # STUB
    # raise NotImplementedError("one pair for each rank, in order")
    # END SOLUTION


check(places_from_slurm, "places_from_slurm")

# %% [markdown]
# **3.** Turn the formula round: how many bits a second must a link carry, so that a
# ring all-reduce takes no longer than that? Leave the latency out.


# %%
def bandwidth_needed(num_bytes, num_ranks, seconds):
    # BEGIN SOLUTION
    sent_bytes = 2 * (num_ranks - 1) / num_ranks * num_bytes
    return 8 * sent_bytes / seconds
    # STUB
    # raise NotImplementedError("bits, not bytes")
    # END SOLUTION


check(bandwidth_needed, "bandwidth_needed")

# %% [markdown] tags=["solution"]
# One rank sends nothing, and the formula knows it: the factor is 0.

# %% [markdown]
# ## Next
#
# If you have two machines: start the benchmark on both, with this command and this
# checklist, on the devices that you will train on. What DDP cannot do, however many
# machines there are, is to train a model that does not fit on one GPU.
