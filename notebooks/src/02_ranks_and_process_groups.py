# %% [markdown]
# # Ranks and process groups
#
# > Step 1: who am I, and how do the processes meet?
#
# Distributed training is one program that is started several times. Everything else
# follows from two questions: how does each process learn which one it is, and how do
# they exchange tensors?
#
# At the end of this notebook you will be able to
#
# - start ranks with `torchrun` and without it, and say what it sets,
# - use the collectives, and say who holds what before and after,
# - read the report of a deadlock, and find the line that made it.
#
# It takes about 25 minutes.

# %% [markdown]
# ## One program, started twice
#
# Here is a whole distributed program. Nothing in it says how many processes there are.
# All of them have one terminal, where lines would mix, so rank 0 prints for all.

# %%
import tempfile
from pathlib import Path

scratch = tempfile.TemporaryDirectory()  # goes with the kernel
script = Path(scratch.name) / "hello.py"
num_written = script.write_text("""
import os
import torch.distributed as dist

names = ["RANK", "LOCAL_RANK", "WORLD_SIZE"]
place = " ".join(f"{name}={os.environ[name]}" for name in names)

dist.init_process_group("gloo")    # wait here until everybody has come
everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, place)    # what all of them have read
if dist.get_rank() == 0:
    for line in everyone:
        print(line)
dist.destroy_process_group()
""")

# %% [markdown]
# `torchrun` comes with PyTorch. It starts the program several times and gives each
# process some environment variables. In a terminal the next cell would be
#
# ```
# torchrun --standalone --nproc-per-node 2 hello.py
# ```
#
# **Predict:** which of the three variables will differ between the two processes?

# %%
import subprocess
import sys

torchrun = [sys.executable, "-m", "torch.distributed.run"]
options = ["--standalone", "--nproc-per-node", "2"]
done = subprocess.run([*torchrun, *options, script], capture_output=True, text=True)
print(done.stdout, end="")
assert done.returncode == 0, done.stderr

# %% [markdown]
# `RANK` is the number of the process in the whole run, and `LOCAL_RANK` its number on
# this machine. On one machine they are the same, which is why so many scripts mix them
# up. On two machines they are not.
#
# **Predict:** two machines have three GPUs each, one process a GPU. What are the rank
# and the local rank of the last process on the second machine?

# %%
import matplotlib.pyplot as plt

from ddp_lab.drawing import draw_cell, rank_colour
from ddp_lab.plots import plot_collective, style

with plt.rc_context({**style(), "figure.figsize": (6.4, 1.9), "axes.grid": False}):
    figure, axes = plt.subplots()
    for rank in range(6):
        machine, local_rank = divmod(rank, 3)
        text = f"rank {rank}\nlocal rank {local_rank}"
        draw_cell(axes, local_rank, machine, [rank_colour(rank)], text)
    axes.set(xlim=(-0.5, 2.5), ylim=(1.5, -0.5), xticks=[])
    axes.set_yticks([0, 1], ["machine 0", "machine 1"])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("World size 6: ranks count through, local ranks start again")
    plt.show()

# %% [markdown]
# Rank 5, local rank 2. The local rank picks the GPU, `cuda:2`. The rank picks the data,
# and rank 0 is the one that prints and writes files. These are the variables to know:
#
# | variable | meaning |
# |---|---|
# | `RANK` | number of this process, 0 to `WORLD_SIZE` - 1 |
# | `WORLD_SIZE` | number of processes on all machines |
# | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | the same, on this machine |
# | `MASTER_ADDR`, `MASTER_PORT` | where they meet: a host and a port |
#
# `torchrun` sets these, some for restarts (`TORCHELASTIC_...`), and `OMP_NUM_THREADS=1`
# if it is not set, so that the processes do not fight for the cores.
#
# ## The same without torchrun
#
# If that is all, we can do it ourselves. `MASTER_PORT` may be any free port.

# %%
import os
import socket

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))  # 0: any port that is free
    port = probe.getsockname()[1]


def start(rank):
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    meet_at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = {**os.environ, **place, **meet_at}
    command = [sys.executable, script]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


# %% [markdown]
# **Predict:** rank 0 is started alone. What does it do until rank 1 is there?

# %%
import time

first = start(0)
time.sleep(2)
print("rank 0 alone has ended:", first.poll() is not None)

second = start(1)
print(first.communicate()[0], end="")
assert second.wait() == 0

# %% [markdown]
# It waits in `init_process_group`, without a word, until all `WORLD_SIZE` processes
# have come. This is the first hang that everybody meets: when a job stays silent at its
# start, a process on another machine has often died, or the address is wrong.
#
# ## The meeting place
#
# How do processes find each other that know only one address? There, rank 0 opens a
# *store*, a small dictionary that answers over the network (under `torchrun` the
# launcher itself keeps it). Each rank writes into it where it listens, and reads where
# the others do. This is called the *rendezvous*. Here are two ends of such a store.

# %%
import torch
import torch.distributed as dist

here = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
there = dist.TCPStore("127.0.0.1", here.port, is_master=False)

here.set("rank 0 listens at", "10.0.0.5, port 4711")
print(there.get("rank 0 listens at").decode())
print("arrived:", here.add("arrived", 1), there.add("arrived", 1))
print("rank 1 has come:", there.check(["rank 1 listens at"]))

# %% [markdown]
# After the rendezvous the store is hardly used: tensors go from rank to rank directly.
#
# ## Who carries the data: backends
#
# | backend | between | used for |
# |---|---|---|
# | `nccl` | NVIDIA GPUs (as RCCL: AMD) | training on GPUs |
# | `gloo` | CPUs, on any system | this course, tests, small things on the side |
# | `mpi` | what the cluster's MPI can do | if PyTorch was built with it |
#
# The calls are the same for all, so what you learn on two CPU cores holds on GPUs. Only
# the tensors must be where the backend expects them: for NCCL, on the rank's own GPU.
#
# ## Ranks that stay
#
# To try things out, the lab keeps ranks waiting behind the notebook. `%ranks 3` starts
# them, and they join a process group; `%%ranks` at the top of a cell runs it on each of
# them. Each has its own variables, and `rank` and `world_size` are set.

# %%
# %load_ext ddp_lab
# %ranks 3 --device cpu --threads 1

# %% [markdown]
# ## One to all: broadcast
#
# A *collective* is a call that all ranks of the group make, each with its own tensor.
# The ranks begin with 1, 2, 3 and 11, 12, 13 and 21, 22, 23. The last line of a cell
# is shown for each of them.
#
# **Predict:** after `broadcast` with `src=0`, what does rank 1 hold?

# %%
# %%ranks
tensor = torch.tensor([1.0, 2.0, 3.0]) + 10 * rank
before = tensor.clone()
dist.broadcast(tensor, src=0)  # overwrites the tensor on the others
tensor

# %% [markdown]
# `%pull` fetches a variable from the ranks, as a list with one value a rank. A colour
# tells where a number comes from.

# %%
# %pull before
# %pull tensor
plot_collective("broadcast", before, tensor)
plt.show()

# %% [markdown]
# Everybody has rank 0's numbers now. DDP does this with the weights when it starts, so
# that all copies of the model begin alike.
#
# ## Deal out and collect: scatter, gather, all_gather
#
# **Predict:** rank 0 deals out 1, 2 and 3, each rank multiplies its piece by ten, and
# the results are collected. What does rank 1 see of them?

# %%
# %%ranks
dealt = list(torch.tensor([[1.0], [2.0], [3.0]])) if rank == 0 else None
piece = torch.zeros(1)
dist.scatter(piece, dealt, src=0)

product = 10 * piece
at_0 = [torch.zeros(1) for _ in range(world_size)] if rank == 0 else None
dist.gather(product, at_0, dst=0)

at_all = [torch.zeros(1) for _ in range(world_size)]
dist.all_gather(at_all, product)

# %% [markdown]
# The receiver must bring room for what comes, of the right shape and type. Nothing is
# sent but the numbers themselves.

# %%
# %pull dealt
# %pull piece
# %pull product
# %pull at_0
# %pull at_all
plot_collective("scatter", dealt, piece)
plt.show()
plot_collective("gather", product, at_0)
plt.show()
plot_collective("all_gather", product, at_all)
plt.show()

# %% [markdown]
# A dashed cell is nothing. After `gather`, only rank 0 has the results; after
# `all_gather`, each rank has them all, in the order of the ranks.
#
# ## Add up: reduce, all_reduce, reduce_scatter
#
# The first rank brings ones, the second tens, the third hundreds, so that each digit of
# a sum tells who is in it.
#
# **Predict:** after `reduce` to rank 0, what do ranks 1 and 2 hold?

# %%
# %%ranks
tensor = torch.tensor([1.0, 2.0, 4.0]) * 10**rank

to_0 = tensor.clone()
dist.reduce(to_0, dst=0)

to_all = tensor.clone()
dist.all_reduce(to_all)

my_part = torch.zeros(1)
dist.reduce_scatter(my_part, list(tensor.split(1)))

# %% [markdown]
# Look at the grey cells in the first picture.

# %%
# %pull tensor
# %pull to_0
# %pull to_all
# %pull my_part
plot_collective("reduce", tensor, to_0)
plt.show()
plot_collective("all_reduce", tensor, to_all)
plt.show()
plot_collective("reduce_scatter", tensor, my_part)
plt.show()

# %% [markdown]
# Only rank 0 can rely on the sum. On the others stands what was under way while it was
# formed: 110 is ranks 1 and 2 without rank 0, and one cell even happens to be right.
# `reduce` promises nothing about them. With `all_reduce`, everybody has the sum.
#
# `reduce_scatter` leaves each rank with one part of the sum. An `all_gather` of these
# parts makes an `all_reduce`, and that is how libraries do it for large tensors: there
# is no rank through which everything has to go. What they are used for:
#
# | collective | who uses it for what |
# |---|---|
# | `broadcast` | DDP, at the start: weights of rank 0 |
# | `all_reduce` | DDP, in each backward pass: gradients |
# | `reduce_scatter`, `all_gather` | FSDP: gradients and weights that are split |
# | `gather`, `reduce`, `all_gather` | results for rank 0 to print |
#
# ## The one rule, and what happens if you break it
#
# > All ranks call the same collectives, in the same order, with tensors of one shape.
#
# The classic way to break it looks harmless: only rank 0 should print the loss.
#
# **Predict:** in the next cell rank 0 waits for the others to come to the `all_reduce`.
# Where are they? The lab gives up after three seconds without progress.

# %%
from ddp_lab.errors import RanksStuck
from ddp_lab.launch import launch


def end_of_epoch():
    loss = torch.tensor([dist.get_rank() + 1.0])
    if dist.get_rank() == 0:
        dist.all_reduce(loss)
        print("loss of the run:", loss.item() / dist.get_world_size())
    dist.barrier()  # wait for each other


try:
    launch(end_of_epoch, num_ranks=2, init=True, device="cpu", stuck_after_s=3)
except RanksStuck as error:
    print(error)

# %% [markdown]
# Read it from right to left. Each rank stands in a line of ours, and the two lines are
# different collectives: rank 0 has entered one that the other has jumped over. So the
# mistake is the `if` above the first of these lines.
#
# Without the lab nothing would be shown. NCCL gives up after 10 minutes, gloo after 30,
# unless you set `init_process_group(timeout=...)`, and all GPUs are paid for meanwhile.
#
# The cure: everybody adds up, rank 0 prints.

# %%
# %%ranks
loss = torch.tensor([rank + 1.0])
dist.all_reduce(loss)
if rank == 0:
    print("loss of the run:", loss.item() / world_size)

# %% [markdown]
# ## Leave as you came
#
# A process group holds threads, sockets, and on GPUs memory. `destroy_process_group`
# gives them back, as in the last line of `hello.py`. A rank that ends without it may
# leave the others waiting, and NCCL complains. It must be called after an exception
# too, so put it into a `finally`, or use a `with` block that does it. The lab's is
#
# ```
# with join_world() as world:    # from ddp_lab.world
#     train(world.rank, world.device)
# ```
#
# Our three ranks may go now.

# %%
# %ranks off

# %% [markdown]
# ## Summary
#
# - A launcher starts one program several times and tells each process its place by
#   environment variables. `RANK` is unique in the run, `LOCAL_RANK` on the machine.
# - `init_process_group` waits until all have come. They find each other through a store
#   at `MASTER_ADDR` and `MASTER_PORT`.
# - Collectives: all ranks call them, in the same order. Names with `all_` leave the
#   result everywhere, the others on one rank.
# - A collective under `if rank == 0` is a deadlock. The report shows two lines that are
#   not the same collective.
#
# ## Exercises
#
# **1.** What `torchrun` sets is text. Write the function with which a program finds its
# place: `environ` is a dictionary like `os.environ`, and the result is (rank, local
# rank, world size). A program that nobody launched has none of these variables; it is
# rank 0 of 1.

# %%
from ddp_lab.checks import check


def place_from_environment(environ):
    # BEGIN SOLUTION
    rank = int(environ.get("RANK", 0))
    local_rank = int(environ.get("LOCAL_RANK", 0))
    return rank, local_rank, int(environ.get("WORLD_SIZE", 1))
    # END SOLUTION


# %%
check(place_from_environment, "place_from_environment")

# %% [markdown]
# **2.** Collect the tensors of all ranks on rank 0: it returns them as a list, in the
# order of the ranks, and the others return None. `check` tries it on 1, 2 and 3 ranks,
# with several shapes.


# %%
def collect_on_rank_0(tensor):
    # BEGIN SOLUTION
    everyone = None
    if dist.get_rank() == 0:
        everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.gather(tensor, everyone, dst=0)
    return everyone
    # END SOLUTION


# %%
check(collect_on_rank_0, "collect_on_rank_0")

# %% [markdown] tags=["solution"]
# The `if` is allowed here: what differs is what the ranks bring. The collective itself
# stands outside of it. An `all_gather` would do as well, for more bytes.

# %% [markdown]
# **3.** Collectives are made of messages between two ranks. `dist.send(tensor, dst)`
# sends one, and `dist.recv(tensor, src)` waits for one and overwrites the tensor. Write
# a broadcast with them.


# %%
def broadcast_by_hand(tensor, src):
    # BEGIN SOLUTION
    if dist.get_rank() != src:
        dist.recv(tensor, src)
        return
    for other in range(dist.get_world_size()):
        if other != src:
            dist.send(tensor, other)
    # END SOLUTION


# %%
check(broadcast_by_hand, "broadcast_by_hand")

# %% [markdown] tags=["solution"]
# The source sends the whole tensor once for each other rank, so with 1000 ranks it is
# busy for long. Libraries pass it on in a tree or a ring.

# %% [markdown]
# ## Next
#
# The ranks can meet and add up. In the next notebook that is enough to write DDP.
