# %% [markdown]
# # Survive failures
#
# > My run needs three days. The cluster gives me one, and last night a GPU fell out.
#
# A run on one machine fails now and then. A run on a thousand machines fails every few
# hours, because it fails as soon as one of them does. So a run has to be able to stop
# anywhere, and go on as if nothing had happened.
#
# At the end of this notebook you will be able to
#
# - say what belongs in a checkpoint, and write one that no crash can tear,
# - kill a rank, go on with the same curve to the last bit, or with another number of
#   ranks,
# - let `torchrun`, Slurm or Kubernetes do that by themselves,
# - say how often to save.
#
# It takes about 30 minutes. You know the training of notebook 05.

# %% [markdown]
# ## The same run
#
# What is a run, between two steps? Let us find out with a training so small that it
# needs no ranks: an optimiser with momentum, a learning rate that rises and falls, and
# an order of the samples that is drawn anew in each epoch.

# %%
import io

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

digits = load_digits()
images = torch.tensor(digits.images).flatten(1).float() / 16  # (1797, 64)
labels = torch.tensor(digits.target)
torch.set_num_threads(1)  # enough for so small a model


def start():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    schedule = OneCycleLR(optimizer, 0.2, total_steps=100, cycle_momentum=False)
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


# %% [markdown]
# `go_on` trains from a step on. Where it is in which epoch follows from the step,
# and the order of an epoch from its number: no random state has to be kept. It returns
# the losses, by the number of steps done.


# %%
def go_on(parts, first_step, num_steps):
    losses = {}
    for step in range(first_step, first_step + num_steps):
        epoch, k = divmod(step, 28)  # steps an epoch, of 64 samples
        generator = torch.Generator().manual_seed(epoch)
        batch = torch.randperm(len(labels), generator=generator)[64 * k : 64 * k + 64]
        loss = F.cross_entropy(parts["model"](images[batch]), labels[batch])
        parts["optimizer"].zero_grad()
        loss.backward()
        parts["optimizer"].step()
        parts["schedule"].step()
        losses[step + 1] = loss.item()
    return losses


whole = go_on(start(), 0, 60)
stopped = start()
first = go_on(stopped, 0, 20)
state = {name: part.state_dict() for name, part in stopped.items()} | {"step": 20}
torch.save(state, checkpoint := io.BytesIO())  # a file in memory

# %% [markdown]
# One run went through, the other stopped after step 20, in the middle of its first
# epoch. Of the three parts and the step, many scripts save the weights alone.
#
# **Predict:** you go on from the weights alone. What will the curve do at the seam?


# %%
import matplotlib.pyplot as plt

from ddp_lab import plot_resumed


def resume(forget=()):
    saved = torch.load(io.BytesIO(checkpoint.getvalue()), weights_only=True)
    parts = start()
    for name, part in parts.items():
        if name not in forget:
            part.load_state_dict(saved[name])
    losses = go_on(parts, 0 if "step" in forget else saved["step"], 40)
    return dict(enumerate(losses.values(), start=21))


alone = resume(forget=("optimizer", "schedule", "step"))
curves = {"until it stopped": first, "weights alone": alone}
title = "Weights alone: no jump, but a bend, and then it is another run"
plot_resumed(whole, curves, {20: "stopped"}, title)
plt.show()

# %% [markdown]
# The loss does not jump, so nothing looks wrong. But the learning rate begins to rise
# from the bottom again, the momentum is gone, and the samples that were just seen come
# again. What does each of them do?
#
# **Predict:** which of these matters most here? And if nothing is forgotten, how equal
# is equal?

# %%
for forget in (["optimizer"], ["schedule"], ["step"], []):
    losses = resume(forget)
    apart = max(abs(losses[step] - whole[step]) for step in losses)
    bits = losses == {step: whole[step] for step in losses}
    print(f"without {', '.join(forget) or 'nothing':10} same bits: {bits!s:6}", end="")
    print(f"loss apart by ~ {apart:.2f}")
    assert bits if not forget else apart > 0.01

# %% [markdown]
# With all four it is the *same run*: not a similar curve, the same bits. Each part that
# is forgotten makes another one, however small the difference looks.
#
# Is there more? Whatever the next step reads: a gradient scaler under mixed precision,
# an average of the weights, and the state of random generators, for dropout and
# augmentation. `ddp_lab` saves no generator: it seeds each step anew from (seed, step,
# rank). A state per rank could not go on with another number of ranks.
#
# ## Whole, or not at all
#
# Who writes a checkpoint over the old one has, for a moment, neither. The disk is full
# or the process is killed at that moment, and days are lost.

# %%
import tempfile
from pathlib import Path

scratch = tempfile.TemporaryDirectory()  # goes with the kernel
home = Path(scratch.name)
content = checkpoint.getvalue()


def try_to_load(path):
    try:
        print(f"{path.name}: step", torch.load(path, weights_only=True)["step"])
    except (OSError, RuntimeError, EOFError):
        print(f"{path.name}: cannot be read")


(home / "torn.pt").write_bytes(content[: len(content) // 2])  # killed half-way
try_to_load(home / "torn.pt")

# %% [markdown]
# A file system has one operation that cannot be seen half done: renaming. So write to
# another name, and rename when all is there.
#
# **Predict:** the same kill, half-way. What is at `whole.pt`, and what beside it?


# %%
import os


def save(state, path, killed=False):
    temporary = path.with_suffix(".tmp")  # in the same folder: on the same disk
    with open(temporary, "wb") as file:
        if killed:  # we play that the process is gone here
            return file.write(content[: len(content) // 2])
        torch.save(state, file)
        file.flush()  # out of Python,
        os.fsync(file.fileno())  # ... and onto the disk, if the power fails now
    os.replace(temporary, path)  # in one step: the old one or the new one


save(state | {"step": 10}, home / "whole.pt")
num_bytes = save(state, home / "whole.pt", killed=True)
try_to_load(home / "whole.pt")
try_to_load(home / "whole.tmp")

# %% [markdown]
# The old one is still there. Without `fsync` a file system may rename first and write
# the bytes later, and after a power cut the new name holds nothing.
#
# On several ranks, **rank 0 alone** saves: with DDP all have the same weights, and two
# writers of one file would tear it. The others need not wait, except before they leave.
# (Machines that do not see rank 0's disk keep a copy on their own: `ddp_lab` does so.)
#
# One more trap. `torch.load` reads a pickle, and a pickle can *run* what it likes.

# %%
import pickle


class Trap:
    def __reduce__(self):  # what to call when it is loaded
        return print, ("it runs: this could be any command",)


torch.save({"model": Trap()}, home / "gift.pt")
loaded = torch.load(home / "gift.pt", weights_only=False)
try:
    torch.load(home / "gift.pt", weights_only=True)
except pickle.UnpicklingError:
    print("weights_only=True: refused")

# %% [markdown]
# `weights_only=True` takes tensors, numbers, texts and containers, and runs nothing. It
# is the default since PyTorch 2.6. So put nothing else into a checkpoint.
#
# ## A run to kill
#
# Now the real one: `python -m ddp_lab.train` on two ranks, as `torchrun` would start
# it. `rehearse_failure` raises a signal on rank 1 after a certain step, or never.

# %%
import contextlib

from ddp_lab import rehearse_failure
from ddp_lab.train import main


def train(line, number=0, step=None):
    """Run the command line on a rank, in silence; return its exit status."""
    os.chdir(home)
    with contextlib.redirect_stdout(io.StringIO()):
        with rehearse_failure(number, rank=1, step=step):
            return main(line.split())


# %% [markdown]
# First a run that nobody kills: two epochs of six steps, and a checkpoint after every
# fourth step and every epoch. The model is a small one, so that saving is quick, with
# `GroupNorm` instead of BatchNorm: you will see why. `--auto-resume` means: go on if
# there is something to go on from, otherwise start.

# %%
from ddp_lab import Run, Workers

OPTIONS = (
    "--device cpu --model shufflenet_v2_x0_5 --norm group --image-size 16 "
    "--global-batch-size 32 --limit-train 192 --limit-test 64 "
    "--epochs 2 --lr 0.005 --checkpoint-every 4 --auto-resume"
)
workers = Workers(2)


def run(name, *fault):
    return workers.run(train, f"{OPTIONS} --out runs/{name}", *fault, echo=False)


print("exit status of each rank:", run("whole"))
folder = home / "runs/whole"
print(*sorted(os.listdir(folder)), sep="\n")
state = torch.load(folder / "checkpoint-00000008.pt", weights_only=True)
print(*state)
print({name: state["progress"][name] for name in ("epoch", "step", "samples")})

# %% [markdown]
# The last two are kept (one can be damaged), and `checkpoint.pt` is another name of the
# newest. Inside is what we found by hand. The `progress` says: one epoch and 8 steps
# are done, so the next one goes on in the middle of the second epoch.
#
# ## The polite kill
#
# A cluster that wants its machine back may ask first: it sends SIGTERM, waits a while,
# and only then sends SIGKILL, which no program can catch. Time to save, if somebody
# listens.
#
# **Predict:** rank 1 alone gets a SIGTERM in step 5. Who stops, and after which step?
# And when the same command is given again: will the weights be equal, nearly or to the
# bit?

# %%
import signal


def losses_of(name):
    steps = Run.open(home / "runs" / name).history.steps
    return {line["step"]: line["loss"] for line in steps}


def same_weights(one, other):
    names = [home / "runs" / name / "checkpoint.pt" for name in (one, other)]
    a, b = (torch.load(name, weights_only=True)["model"] for name in names)
    return all(torch.equal(a[key], b[key]) for key in a)


print("exit status of each rank:", run("asked", signal.SIGTERM, 5))
print("last step:", max(losses_of("asked")))
print("then:", run("asked"), " last step:", max(losses_of("asked")))
print("same losses:", losses_of("asked") == losses_of("whole"))
print("same weights:", same_weights("asked", "whole"))

# %% [markdown]
# Both, after the same step. The handler of a signal only makes a note; at the end of
# the step the ranks tell each other (`should_stop` of notebook 05), rank 0 saves, and
# all leave. Nothing is done twice, and the rest comes out the same to the last bit.
# Status 75 means, by an old convention of Unix (`EX_TEMPFAIL`): not done, run me again.
#
# | who asks | how | then |
# |---|---|---|
# | Slurm preempts | SIGTERM; SIGKILL after `GraceTime`: default **0 s** | may requeue |
# | Slurm: time limit | USR1, by `--signal=USR1@120` | on 75 `scontrol requeue` |
# | Kubernetes | SIGTERM; SIGKILL after 30 s | the Job starts a new pod |
# | spot instances | a notice, minutes or less | another machine |
# | torchrun, told to stop | passes it on; SIGKILL after 30 s | it ends with status 1 |
#
# Each wait must be longer than a step and a save. `scontrol show partition` tells the
# `GraceTime`; `TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100` gives the ranks 100 s when torchrun
# is told to stop. USR1 kills torchrun, unless it is named: `--signals-to-handle
# SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1`. `ddp_lab.train` treats USR1 like SIGTERM. What
# all of them need is a folder that outlives the machine.
#
# ## The other kill
#
# **Predict:** rank 1 gets SIGKILL in step 11, as when memory runs out. What becomes of
# rank 0? After which step is the last checkpoint?

# %%
from ddp_lab import RankFailed

try:
    run("killed", signal.SIGKILL, 11)
except RankFailed as error:
    print(error)
workers.close()
before = losses_of("killed")
newest = torch.load(home / "runs/killed/checkpoint.pt", weights_only=True)
print("last loss: step", max(before), " checkpoint: step", newest["progress"]["step"])

# %% [markdown]
# Who died, and by which signal. (The cause is a guess; it was us.) The other rank came
# to its next all-reduce and found the connection broken.
#
# Could it go on alone? DDP cannot: its *process group* was made for two ranks, and each
# collective waits for all of them. Those that live would have to agree on who that is,
# make a new group, and share the batch out anew.
# [torchft](https://github.com/pytorch/torchft) does the first two between two steps
# (its authors call it an alpha prototype; with its own sampler the lost rank's samples
# are left out), and PyTorch has begun with `shrink_group`. (Neither was run here.) The
# usual way is simpler: end *all*, and start anew from the last checkpoint.
#
# Say that the machine of rank 1 is broken, and there is no other. The run goes on with
# a single rank: the global batch stays 32, so it takes all 32 images of a step.
#
# **Predict:** which steps are done twice? Again the same bits?

# %%
from ddp_lab import launch

[status] = launch(train, "--resume runs/killed", num_ranks=1, echo=False)
whole, killed = losses_of("whole"), losses_of("killed")
print("exit status:", status, " steps in the history:", *killed)
apart = max(abs(killed[step] - whole[step]) for step in whole)
print(f"losses apart by at most ~ {apart:.0e}")
assert apart < 1e-3  # float32, and sums in another order

again = {step: loss for step, loss in killed.items() if step > 8}
parts = {"two ranks, until one was killed": before, "one rank": again}
marks = {8: "checkpoint", 11: "rank 1 is killed"}
title = "Resumed on one rank: the same curve, with two steps done twice"
plot_resumed(whole, parts, marks, title)
plt.show()

# %% [markdown]
# Steps 9 and 10 were in the history already. They were cut off and made again, so there
# is no gap and nothing is there twice. The losses are the same but for rounding: sums
# over the batch are now taken in another order. It takes three things. The checkpoint
# belongs to no rank. The position is counted in samples of *all* ranks. And the model
# does not look at a rank's own batch, as BatchNorm does: with it, one rank would train
# another model than two.
#
# ## torchrun starts them again
#
# Nobody wants to get up at night. With `--max-restarts`, `torchrun` starts all ranks of
# a machine again when one has failed. This script is `ddp_lab.train` with a fault in
# its first life:

# %%
num_written = (home / "flaky.py").write_text("""
import signal
import sys

from ddp_lab import rehearse_failure
from ddp_lab.train import main

with rehearse_failure(signal.SIGKILL, rank=1, step=11):
    sys.exit(main())
""")

# %% [markdown]
# In a terminal: `torchrun --standalone --nproc-per-node 2 --max-restarts 3 flaky.py`
# and the options.
#
# **Predict:** how often will rank 0 say its first line?

# %%
import re
import subprocess
import sys

torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 3"
line = f"{torchrun} flaky.py {OPTIONS} --out runs/torchrun".split()
done = subprocess.run([sys.executable, *line], cwd=home, capture_output=True, text=True)
assert done.returncode == 0, done.stderr

for said in done.stdout.splitlines():
    if said.startswith(("shufflenet", "going on")):
        print("rank 0:  ", said)
for code, rank in re.findall(r"exitcode: (\S+)\) local_rank: (\d)", done.stderr):
    print(f"torchrun: local rank {rank} failed with exit code {code}")
print("same weights:", same_weights("torchrun", "whole"))

# %% [markdown]
# Two lives, one run, no human, and the same bits. Exit code -9 is signal 9, SIGKILL. As
# a picture, in time from left to right, an optimiser step a cell:

# %%
from ddp_lab import plot_life

plot_life(num_steps=12, checkpoint_every=4, killed_in=11)
plt.show()

# %% [markdown]
# The pale steps are lost. torchrun sends the ranks that live a SIGTERM, and SIGKILL
# after 30 s. Then all meet again: a *rendezvous*, which gives out rank and world size
# anew. (The checkpoint after each epoch is left out here.)
#
# On several machines it works in the same way: each runs a `torchrun`, and all of them
# meet anew after a failure. With `--nnodes 1:2` it is *elastic*: it starts again
# without the second machine, and once more when that is back (if
# `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` is set on both; torch 2.14 otherwise lets the
# newcomer wait in vain). The endpoint's machine must stay: with it goes the meeting
# place.
#
# ## How often to save
#
# Saving costs time, and so does what is lost in a failure. Meta trained Llama 3 on
# 16,384 GPUs and counted 419 unexpected interruptions in 54 days ([The Llama 3 Herd of
# Models](https://arxiv.org/abs/2407.21783), section 3.3.4). Suppose that a save takes
# one minute, and let failures come by chance.

# %%
import random

save_s, mtbf_s = 60, 54 * 24 * 3600 / 419  # mean time between failures


def lost(every_s, num_saves=5_000):
    """Share of the time that is not progress, if saved after every_s of work."""
    chance = random.Random(0)
    clock_s, failure_in_s = 0.0, chance.expovariate(1 / mtbf_s)
    for _ in range(num_saves):
        while failure_in_s < every_s + save_s:  # all since the last save is lost
            clock_s += failure_in_s
            failure_in_s = chance.expovariate(1 / mtbf_s)
        clock_s += every_s + save_s
        failure_in_s -= every_s + save_s
    return 1 - num_saves * every_s / clock_s


print(f"a failure every {mtbf_s / 3600:.1f} hours")
print(f"saving every minute: {lost(60):.0%} of the time is lost")

# %% [markdown]
# So not every minute. Of an interval of work t, saving costs the share s / t, with s
# for the save. A failure, M apart on average, costs half an interval: t / (2 M). The
# sum is least where both are equal, at
#
# $$t = \sqrt{2 s M}$$
#
# ([Young, 1974](https://doi.org/10.1145/361147.361115)). [Daly
# (2006)](https://doi.org/10.1016/j.future.2004.11.016) derives the whole curve, drawn
# here in black.
#
# **Predict:** the best interval for this run? How bad is one that is twice too long?

# %%
from math import sqrt

from ddp_lab import plot_lost_time

best_s = sqrt(2 * save_s * mtbf_s)
print(f"best: every {best_s / 60:.0f} minutes, {lost(best_s):.0%} lost")
print(f"half and twice as long: {lost(best_s / 2):.0%}, {lost(2 * best_s):.0%}")
measured = {60 * m: lost(60 * m) for m in (2, 5, 10, 20, 40, 80, 160)}
plot_lost_time(save_s, mtbf_s, measured)
plt.show()

# %% [markdown]
# Look at the bottom: it is flat. A factor of two to either side costs little, so a
# rough guess of M is enough. The way further down is a *shorter* save: one that takes a
# tenth of the time lets you lose about a third. Coming back costs too, but it costs the
# same whatever the interval is.
#
# ## Summary
#
# - A run is weights, optimiser, schedule and position. With all of them it goes on to
#   the same bits; without one it is another run, and nothing tells.
# - Save to a temporary name, flush, rename; on rank 0; load with `weights_only=True`.
# - A failed rank breaks the process group of all. Start them anew from the checkpoint,
#   with the same command, on as many ranks as there are, at the same global batch.
# - `torchrun --max-restarts` does that by itself. A signal that asks first is agreed on
#   by all ranks; status 75 says: again. Know how long your cluster waits.
# - Save every sqrt(2 x save time x time between failures), of the whole run.
#
# ## Exercises
#
# **1.** Write the save that no crash can tear: at every moment there is a whole file at
# `path` (a `Path`), the old one or the new one, and nothing else is left beside it. The
# check looks into the folder in the middle of your writing, and lets the disk run full:
# then the old file stays, and the error goes on to the caller.

# %%
import os

import torch

from ddp_lab import check


def save_atomically(state, path):
    # BEGIN SOLUTION
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    # STUB
    # raise NotImplementedError
    # END SOLUTION


check(save_atomically, "save_atomically")

# %% [markdown] tags=["solution"]
# `os.replace` is one step for everybody who looks at the folder. The flush comes before
# it: first the bytes are on the disk, then the name points to them. An error needs no
# care here: it leaves before the rename.

# %% [markdown]
# **2.** A run was saved after `step` optimiser steps, and goes on with `world_size`
# ranks, perhaps not as many as before. Return `(epoch, skip)`: which epoch is under
# way, from 0, and how many samples each rank skips in its shard. What is left over at
# the end of an epoch is dropped.


# %%
def resume_position(step, num_samples, global_batch_size, world_size):
    # BEGIN SOLUTION
    steps_per_epoch = num_samples // global_batch_size  # the rest is dropped
    epoch, steps_into = divmod(step, steps_per_epoch)
    return epoch, steps_into * global_batch_size // world_size
    # STUB
    # raise NotImplementedError
    # END SOLUTION


check(resume_position, "resume_position")

# %% [markdown]
# **3.** How many optimiser steps, of `step_s` seconds each, should lie between two
# saves? Young's rule, as a whole number, and 1 at least. One machine fails every
# `machine_mtbf_s` seconds on average, the run as soon as *one* of its machines does.


# %%
def steps_between_saves(save_s, step_s, machine_mtbf_s, num_machines):
    # BEGIN SOLUTION
    run_mtbf_s = machine_mtbf_s / num_machines
    best_s = (2 * save_s * run_mtbf_s) ** 0.5
    return max(1, round(best_s / step_s))
    # STUB
    # raise NotImplementedError
    # END SOLUTION


check(steps_between_saves, "steps_between_saves")

# %% [markdown]
# ## Next
#
# A run that survives the loss of a machine can as well use many. The next notebook goes
# [from one machine to two](10_many_machines.ipynb).
