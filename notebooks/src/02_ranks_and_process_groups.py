# %% [markdown]
# # Ranks and process groups
#
# > Step 1: who am I, and how do the processes meet?
#
# Distributed training is one program that is started several times. How does each
# process learn which one it is, and how do they exchange tensors?
#
# At the end of this notebook you will be able to
#
# - start ranks with `torch.multiprocessing.spawn` and with `torchrun`, and say what a
#   rank knows at its start,
# - use the collectives, and say who holds what before and after,
# - read the report of a deadlock, and find the line that made it.
#
# It takes about 25 minutes.

# %% [markdown]
# ## One program, started twice
#
# First a helper: `run("-m", "this")` is `python -m this` in a terminal.

# %%
import os
import subprocess
import sys
import tempfile

scratch = tempfile.TemporaryDirectory()
os.chdir(scratch.name)


def run(*command):
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    print(done.stdout, end="")


# %% [markdown]
# A *rank* is one of these processes, and also its number. Here is a whole distributed
# program in plain PyTorch. The first line has the notebook write it into a file.

# %%
# %%writefile two_ranks.py
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def worker(rank, world_size, port):
    place = f"tcp://127.0.0.1:{port}"  # where they meet
    dist.init_process_group("gloo", place, rank=rank, world_size=world_size)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)  # add up what all ranks hold
    if rank == 0:
        print("sum over", world_size, "ranks:", total.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(worker, args=(2, int(sys.argv[1])), nprocs=2)  # worker(0, 2, ...), ...

# %% [markdown]
# **Predict:** the ranks hold 1 and 2. Which lines will be printed?

# %%
import socket

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))  # 0: any port that is free
    port = probe.getsockname()[1]
run("two_ranks.py", str(port))

# %% [markdown]
# Three Pythons ran the file: yours, and two that `spawn` started. Each of the two
# begins with nothing: it imports `two_ranks.py` again, as a module this time, finds
# `worker` in it, and calls it with its number and `args`. Hence the
# `if __name__ == "__main__"`: the ranks must not start ranks.
#
# ## A worker in a cell
#
# What travels to a new process is *pickled*. **Predict:** what does Python write down
# of a function from a notebook, so that another process can find it?

# %%
import pickle

from ddp_lab import launch


def worker():
    print("hello from rank", os.environ["RANK"])
    return os.environ["MASTER_ADDR"]


print(pickle.dumps(worker, protocol=4))
launch(worker, num_ranks=2)

# %% [markdown]
# The first line holds a module, `__main__`, and a name, `worker`, and no code. The new
# process has a `__main__` of its own, in which no cell was ever run, so
# `mp.spawn(worker)` fails in a notebook, and people keep the worker in a file.
#
# The lab's `launch` sends the code itself, and with it what it uses from the notebook;
# the start is the same `torch.multiprocessing.spawn`. What the ranks print and return
# comes back in their order, and an error of a rank is raised in the notebook.
#
# ## torchrun
#
# `launch` gives `worker` no number: each rank reads its place from its environment.
# `torchrun`, the launcher that comes with PyTorch, works the same way, also on several
# machines: `torchrun --standalone --nproc-per-node 2 hello.py`. The script is step 1 as
# you will write it, for GPUs (those lines were not run here) and for CPUs: one line
# picks the `device`.
#
# **Predict:** which of the three variables will differ between the two processes?

# %%
with open("hello.py", "w") as script:
    script.write("""
import os
import torch
import torch.distributed as dist
place = [f"{name}={os.environ[name]}" for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda:" + os.environ["LOCAL_RANK"] if gpus else "cpu")
if gpus:
    torch.cuda.set_device(device)  # from here on, "cuda" is this rank's GPU
    dist.init_process_group("nccl", device_id=device)
else:
    dist.init_process_group("gloo")  # waits until everybody has come
everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, place)  # what all of them have read
if dist.get_rank() == 0: print(*everyone, sep="; ")
dist.destroy_process_group()
""")
torchrun = ["-m", "torch.distributed.run", "--standalone"]
run(*torchrun, "--nproc-per-node", "2", "hello.py")

# %% [markdown]
# `RANK` is the number of the process in the whole run, `LOCAL_RANK` its number on this
# machine. On one machine they are the same, so many scripts mix them up. With two
# machines of three GPUs, one process a GPU:
#
# | | machine 0 | machine 1 |
# |---|---|---|
# | `RANK`: picks the data; 0 prints and writes files | 0, 1, 2 | 3, 4, 5 |
# | `LOCAL_RANK`: picks the GPU | 0, 1, 2 | 0, 1, 2 |
# | `WORLD_SIZE`, `LOCAL_WORLD_SIZE` | 6, 3 | 6, 3 |
# | `MASTER_ADDR`, `MASTER_PORT`: where they meet | those of machine 0 | the same |
#
# `torchrun` also sets `OMP_NUM_THREADS` to 1 if it starts several processes and you
# have not set it, so that they do not fight for the cores.
#
# Until all `WORLD_SIZE` processes have come, `init_process_group` waits, mostly without
# a word, and fails after minutes: the first hang that everybody meets.
#
# ## The meeting place
#
# How do processes find each other that know only one address? There, rank 0 opens a
# *store*, a small dictionary that answers over the network (under `torchrun` the
# launcher keeps it). Each rank writes there where it listens, and reads where the
# others do: the *rendezvous*. Here are two ends of such a store.

# %%
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist

from ddp_lab import plot_collective

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
#
# The calls are the same for all: who holds what, and in which order to call, you can
# learn on two CPU cores. Three things are different on GPUs (not run here):
#
# - The tensors must be on the rank's own GPU.
# - A call of NCCL returns when the work is *queued*. So a hang shows at a later line,
#   the first that waits for the GPU: `.item()`, `print`, `dist.barrier()`.
# - NCCL's `barrier` is an all-reduce of one number. If one rank calls `barrier` while
#   another sums its loss, the two can pair up: no hang, and a wrong sum.
#
# ## Ranks that stay
#
# To try things out, the lab keeps ranks behind the notebook. `%ranks 3` starts them,
# and they join a process group; `%%ranks` at the top of a cell runs it on each. Each
# has its own variables, and `rank` and `world_size` are set.

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
# `%pull` fetches a variable, as a list with one value a rank. A colour tells where a
# number comes from.

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
# The receiver must bring room for what comes, of the right shape and type.

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
# formed: 110 is ranks 1 and 2 without rank 0. `reduce` promises nothing about them.
# With `all_reduce`, everybody has the sum.
#
# `reduce_scatter` leaves rank r with piece r of the sum. An `all_gather` of the pieces
# makes an `all_reduce`, and that is how libraries do it for large tensors: there is no
# rank through which everything has to go. What they are used for:
#
# | collective | who uses it for what |
# |---|---|
# | `broadcast` | DDP, at the start: weights of rank 0 |
# | `all_reduce` | DDP, in each backward pass: gradients |
# | `reduce_scatter`, `all_gather` | FSDP: gradients and weights that are split |
# | `gather`, `reduce`, `all_gather` | results for rank 0 to print |
#
# ## Some of the ranks, and without waiting
#
# `new_group` makes a group of some ranks; *all* ranks call it, also those left out. And
# with `async_op=True` a collective returns at once, with a handle. The tensor belongs
# to the collective until `wait()`; the time in between is yours.
#
# **Predict:** what does rank 1 hold at the end, of each of the two tensors?

# %%
# %%ranks
pair = dist.new_group([0, 2])
of_two, of_all = torch.tensor([10.0**rank]), torch.tensor([10.0**rank])
if rank in (0, 2):
    dist.all_reduce(of_two, group=pair)

handle = dist.all_reduce(of_all, async_op=True)
meanwhile = sum(range(1000))  # anything that leaves of_all alone
handle.wait()
of_two, of_all

# %% [markdown]
# ## The one rule, and what happens if you break it
#
# > All ranks of a group call the same collectives, in the same order, with tensors of
# > one shape and type.
#
# The classic way to break it looks harmless: only rank 0 should print the loss.
#
# **Predict:** in the next cell rank 0 waits for the others to come to the `all_reduce`.
# Where are they? The lab gives up after three seconds without progress.

# %%
from ddp_lab import RanksStuck


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
# Read it from right to left. The two lines are different collectives: rank 0 has
# entered one that the other has jumped over. So the mistake is the `if` above it. The
# cure: everybody adds up, and only the `print` stands under the `if`.
#
# Without the lab you wait for the timeout, 10 minutes with NCCL, 30 with gloo, unless
# you set `init_process_group(timeout=...)`. And PyTorch has tools of its own:
#
# - the *flight recorder* remembers each rank's last collectives. With NCCL they
#   are written to files at a timeout (`TORCH_NCCL_DUMP_ON_TIMEOUT`; not run here), and
#   `torchfrtrace` compares them;
# - `TORCH_DISTRIBUTED_DEBUG=DETAIL` compares the calls before they are made, which
#   costs time; `set_debug_level` switches it on for groups made later;
# - `py-spy dump --pid 4711`, a package of its own, prints where a running Python
#   stands. Here (run by hand) rank 0's stack began with `all_reduce`, called from
#   `end_of_epoch (stuck.py:8)`, and rank 1's with `barrier`, from line 9.
#
# **Predict:** the same mistake, with a timeout of two seconds, and then in detail. When
# will rank 1 hear of it?

# %%
# %%ranks
import json
from datetime import timedelta


def end_of_epoch(group):
    try:
        if rank == 0:
            dist.all_reduce(torch.ones(1), group=group)
        dist.barrier(group)
    except RuntimeError as error:
        return str(error)


end_of_epoch(dist.new_group(timeout=timedelta(seconds=2)))
record = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())
print("after 2 s. The recorder's last entry:", record["entries"][-1]["profiling_name"])
dist.set_debug_level(dist.DebugLevel.DETAIL)
careful = dist.new_group()
print(end_of_epoch(careful).split(", Tensor")[0].split(")")[0])

# %% [markdown]
# The timeout alone says that somebody did not come. The recorders of all ranks together
# say who was where, and DETAIL says it as soon as all have come to *some* collective. A
# rank that comes to none is named at the timeout.
#
# A mistake can be worse than a hang. **Predict:** here rank 0 sums the loss and then
# the hits, and the others the hits first. Which of the tools will complain?

# %%
# %%ranks
loss, hits = torch.tensor([0.5]), torch.tensor([100.0])
for tensor in (loss, hits) if rank == 0 else (hits, loss):
    dist.all_reduce(tensor, group=careful)
loss.item(), hits.item()

# %% [markdown]
# None: the calls were alike, so rank 0's loss was added to the others' hits.
#
# ## Leave as you came
#
# A process group holds threads, sockets, and on GPUs memory. `destroy_process_group`
# gives them back: call it at the normal end of the program, on all ranks, as `hello.py`
# does. Without it NCCL complains.
#
# Do not put it into a `finally`. It waits for collectives that are under way, and after
# an exception on one rank the others may never join in: the error stays hidden behind a
# wait. Let it end the process; the launcher stops the others. The lab's
# `with join_world() as world:` does just that.
#
# ## Summary
#
# - `torch.multiprocessing.spawn` starts a function in new processes, which must be able
#   to import it. `torchrun` starts a program several times, also on several machines.
# - A rank learns its place from arguments or variables. `RANK` is unique in the run,
#   `LOCAL_RANK` on the machine.
# - `init_process_group` waits until all have come, through a store at `MASTER_ADDR`.
# - Collectives: all ranks call them, in the same order. `broadcast`, `all_gather` and
#   `all_reduce` leave one result on all ranks, `gather` and `reduce` on one rank;
#   `scatter` and `reduce_scatter` leave each rank its own piece.
# - A collective under `if rank == 0` is a deadlock; the same collectives in another
#   order are a wrong number. Destroy the group at a normal end only.
#
# ## Exercises
#
# **1.** What `torchrun` sets is text. Write the function with which a program finds its
# place: `environ` is a dictionary like `os.environ`, and the result is (rank, local
# rank, world size). A program that nobody launched has none of these variables; it is
# rank 0 of 1.

# %%
import torch
import torch.distributed as dist

from ddp_lab import check


def place_from_environment(environ):
    # BEGIN SOLUTION
    rank = int(environ.get("RANK", 0))
    local_rank = int(environ.get("LOCAL_RANK", 0))
    return rank, local_rank, int(environ.get("WORLD_SIZE", 1))
    # END SOLUTION


check(place_from_environment, "place_from_environment")

# %% [markdown]
# **2.** Collect the tensors of all ranks on rank 0: it returns them as a list, in the
# order of the ranks, and the others return None. The argument keeps its values. `check`
# tries it on 1, 2 and 3 ranks, with several shapes.


# %%
def collect_on_rank_0(tensor):
    # BEGIN SOLUTION
    everyone = None
    if dist.get_rank() == 0:
        everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.gather(tensor, everyone, dst=0)
    return everyone
    # END SOLUTION


check(collect_on_rank_0, "collect_on_rank_0")

# %% [markdown] tags=["solution"]
# The `if` is allowed here: what differs is what the ranks bring. The collective itself
# stands outside of it. An `all_gather` would do as well, for more bytes.

# %% [markdown]
# **3.** Collectives are made of messages between two ranks. `dist.send(tensor, dst)`
# sends one, and `dist.recv(tensor, src)` waits for one and overwrites the tensor.
# (`isend` and `irecv` return a handle instead of waiting. Keep it, call its `wait()`,
# and leave the tensor alone until then: if the handle is dropped, the message may never
# arrive.) Write a broadcast with these four alone: afterwards `tensor` itself holds
# the values of rank `src`.


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


check(broadcast_by_hand, "broadcast_by_hand")

# %% [markdown] tags=["solution"]
# The source sends the whole tensor once for each other rank, so with 1000 ranks it is
# busy for long. Libraries pass it on in a tree or a ring.

# %% [markdown]
# ## Next
#
# The ranks can meet and add up. In the next notebook that is enough to write DDP.
