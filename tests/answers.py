"""Right and wrong answers to every exercise, as learners might write them.

``WRONG[name]`` holds pairs of a function and a part of the rule that it breaks.
"""

import io
import math
import os
import random
import re
import shutil
import tempfile
from collections import defaultdict

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

RIGHT = defaultdict(list)
WRONG = defaultdict(list)


def right(name):
    return lambda fn: RIGHT[name].append(fn) or fn


def wrong(name, rule):
    return lambda fn: WRONG[name].append((fn, rule)) or fn


def rank_and_size():
    return dist.get_rank(), dist.get_world_size()


# ---- mean_over_ranks -------------------------------------------------------------

MEAN = "every rank gets the mean"


@right("mean_over_ranks")
def _(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


@right("mean_over_ranks")
def _(tensor):
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor)
    return sum(rows) / len(rows)


@wrong("mean_over_ranks", MEAN)
def _(tensor):  # the sum
    total = tensor.clone()
    dist.all_reduce(total)
    return total


@wrong("mean_over_ranks", MEAN)
def _(tensor):  # two ranks, hard-wired
    total = tensor.clone()
    dist.all_reduce(total)
    return total / 2


@wrong("mean_over_ranks", MEAN)
def _(tensor):  # rank 0 only
    total = tensor.clone()
    dist.reduce(total, dst=0)
    if dist.get_rank() == 0:
        return total / dist.get_world_size()
    return tensor


@wrong("mean_over_ranks", MEAN)
def _(tensor):  # no return
    dist.all_reduce(tensor.clone())


@wrong("mean_over_ranks", MEAN)
def _(tensor):  # one number for the whole tensor
    total = tensor.clone()
    dist.all_reduce(total)
    return total.mean() / dist.get_world_size()


@wrong("mean_over_ranks", MEAN)
def _(tensor):  # the largest
    top = tensor.clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX)
    return top


@wrong("mean_over_ranks", "the argument keeps its values")
def _(tensor):
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


@wrong("mean_over_ranks", "returns on every rank")
def _(tensor):  # gloo knows no AVG, and neither does Python
    return tensor.mean_over_ranks()


@wrong("mean_over_ranks", "returns on every rank")
def _(tensor):  # a deadlock
    total = tensor.clone()
    if dist.get_rank() == 0:
        dist.all_reduce(total)
    return total / dist.get_world_size()


# ---- who_am_i --------------------------------------------------------------------

PAIR = "the pair of rank and world size"


@right("who_am_i")
def _():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@right("who_am_i")
def _():
    dist.init_process_group("gloo")
    place = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    return place


@wrong("who_am_i", "environment holds text")
def _():
    return os.environ["RANK"], os.environ["WORLD_SIZE"]


@wrong("who_am_i", PAIR)
def _():
    return int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])


@wrong("who_am_i", PAIR)
def _():
    return int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])


@wrong("who_am_i", PAIR)
def _():
    return int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])


@wrong("who_am_i", PAIR)
def _():
    return int(os.environ["RANK"])


@wrong("who_am_i", PAIR)
def _():
    return int(os.environ["RANK"]) + 1, int(os.environ["WORLD_SIZE"])


@wrong("who_am_i", PAIR)
def _():
    print(os.environ["RANK"], os.environ["WORLD_SIZE"])


@wrong("who_am_i", "returns on every rank")
def _():  # nobody has met
    return dist.get_rank(), dist.get_world_size()


# ---- fixed_bytes -----------------------------------------------------------------

ALL_FOUR = "it counts parameters, gradients and what the optimiser remembers"
ON_EVERY_RANK = "every rank holds all of it, and DDP's buckets"


@right("fixed_bytes")
def _(num_parameters, num_remembered, world_size):
    return 4 * num_parameters * (2 + num_remembered + (world_size > 1))


@right("fixed_bytes")
def _(num_parameters, num_remembered, world_size):
    parameters = gradients = 4 * num_parameters
    buckets = 0 if world_size == 1 else gradients
    return parameters + gradients + num_remembered * parameters + buckets


@wrong("fixed_bytes", ALL_FOUR)
def _(num_parameters, num_remembered, world_size):  # forgets the gradients
    return 4 * num_parameters * (1 + num_remembered + (world_size > 1))


@wrong("fixed_bytes", ALL_FOUR)
def _(num_parameters, num_remembered, world_size):  # numbers, not bytes
    return num_parameters * (2 + num_remembered + (world_size > 1))


@wrong("fixed_bytes", ALL_FOUR)
def _(num_parameters, num_remembered, world_size):  # buckets without DDP
    return 4 * num_parameters * (3 + num_remembered)


@wrong("fixed_bytes", ALL_FOUR)
def _(num_parameters, num_remembered, world_size):  # MB
    return 4 * num_parameters * (2 + num_remembered) / 2**20


@wrong("fixed_bytes", ALL_FOUR)
def _(num_parameters, num_remembered, world_size):  # SGD with momentum, always
    return 4 * num_parameters * (3 + (world_size > 1))


@wrong("fixed_bytes", ON_EVERY_RANK)
def _(num_parameters, num_remembered, world_size):  # no buckets
    return 4 * num_parameters * (2 + num_remembered)


@wrong("fixed_bytes", ON_EVERY_RANK)
def _(num_parameters, num_remembered, world_size):  # as if DDP split it
    return 4 * num_parameters * (2 + num_remembered + (world_size > 1)) // world_size


@wrong("fixed_bytes", ON_EVERY_RANK)
def _(num_parameters, num_remembered, world_size):  # of all ranks together
    return 4 * num_parameters * (2 + num_remembered + (world_size > 1)) * world_size


@wrong("fixed_bytes", ON_EVERY_RANK)
def _(num_parameters, num_remembered, world_size):  # a bucket for each other rank
    return 4 * num_parameters * (1 + num_remembered + world_size)


# ---- global_batch_size -----------------------------------------------------------

EVERY = "counts every sample"


@right("global_batch_size")
def _(micro_batch_size, accumulation_steps, world_size):
    return micro_batch_size * accumulation_steps * world_size


@right("global_batch_size")
def _(micro_batch_size, accumulation_steps, world_size):
    num_samples = 0
    for _rank in range(world_size):
        for _step in range(accumulation_steps):
            num_samples += micro_batch_size
    return num_samples


for answer in (
    lambda micro_batch_size, accumulation_steps, world_size: micro_batch_size,
    lambda micro_batch_size, accumulation_steps, world_size: (
        micro_batch_size * world_size
    ),
    lambda micro_batch_size, accumulation_steps, world_size: (
        micro_batch_size * accumulation_steps
    ),
    lambda micro_batch_size, accumulation_steps, world_size: (
        micro_batch_size * (accumulation_steps + world_size)
    ),
    lambda micro_batch_size, accumulation_steps, world_size: (
        micro_batch_size * accumulation_steps // world_size
    ),
    lambda micro_batch_size, accumulation_steps, world_size: (
        micro_batch_size * world_size / accumulation_steps
    ),
    lambda micro_batch_size, accumulation_steps, world_size: None,
):
    wrong("global_batch_size", EVERY)(answer)


# ---- micro_batches ---------------------------------------------------------------


@right("micro_batches")
def _(global_batch_size, world_size, bytes_per_sample, free_bytes):
    share, steps = global_batch_size // world_size, 1
    while share % steps or share // steps * bytes_per_sample > free_bytes:
        steps += 1
    return share // steps, steps


@right("micro_batches")
def _(global_batch_size, world_size, bytes_per_sample, free_bytes):
    share = global_batch_size // world_size
    fits = min(share, free_bytes // bytes_per_sample)
    micro = max(m for m in range(1, fits + 1) if share % m == 0)
    return micro, share // micro


@wrong("micro_batches", "is the global batch size")
def _(global_batch_size, world_size, bytes_per_sample, free_bytes):
    micro = min(global_batch_size // world_size, free_bytes // bytes_per_sample)
    return micro, -(-global_batch_size // (world_size * micro))  # does not divide


@wrong("micro_batches", "is the global batch size")
def _(global_batch_size, world_size, bytes_per_sample, free_bytes):
    steps = 1  # forgets the ranks
    while global_batch_size // steps * bytes_per_sample > free_bytes:
        steps += 1
    return global_batch_size // steps, steps


@wrong("micro_batches", "a micro-batch fits")
def _(global_batch_size, world_size, bytes_per_sample, free_bytes):
    return global_batch_size // world_size, 1


@wrong("micro_batches", "no more accumulation steps than needed")
def _(global_batch_size, world_size, bytes_per_sample, free_bytes):
    return 1, global_batch_size // world_size


@wrong("micro_batches", "no more accumulation steps than needed")
def _(global_batch_size, world_size, bytes_per_sample, free_bytes):
    share, steps = global_batch_size // world_size, 1
    while share % steps or share // steps * bytes_per_sample >= free_bytes:
        steps += 1  # >=: misses the last byte
    return share // steps, steps


@wrong("micro_batches", "a pair of whole numbers")
def _(global_batch_size, world_size, bytes_per_sample, free_bytes):
    return global_batch_size / world_size, 1


@wrong("micro_batches", "no more accumulation steps than needed")
def _(global_batch_size, world_size, bytes_per_sample, free_bytes):
    share, steps = global_batch_size // world_size, 1
    while share % steps or share // steps * bytes_per_sample > free_bytes:
        steps += 1
    return steps, share  # mixed up


@wrong("micro_batches", "a pair of whole numbers")
def _(global_batch_size, world_size, bytes_per_sample, free_bytes):
    return global_batch_size // world_size * bytes_per_sample // free_bytes


# ---- collect_on_rank_0 -----------------------------------------------------------

LIST = "rank 0 gets the list of all tensors"


@right("collect_on_rank_0")
def _(tensor):
    rank, world_size = rank_and_size()
    rows = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.gather(tensor, rows if rank == 0 else None, dst=0)
    return rows if rank == 0 else None


@right("collect_on_rank_0")
def _(tensor):
    rank, world_size = rank_and_size()
    if rank:
        dist.send(tensor, dst=0)
        return None
    rows = [tensor]
    for other in range(1, world_size):
        rows.append(torch.empty_like(tensor))
        dist.recv(rows[-1], src=other)
    return rows


@wrong("collect_on_rank_0", "the other ranks get None")
def _(tensor):
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor)
    return rows


@wrong("collect_on_rank_0", LIST)
def _(tensor):  # one buffer for all
    rank, world_size = rank_and_size()
    if rank:
        dist.send(tensor, dst=0)
        return None
    rows, buffer = [tensor], torch.empty_like(tensor)
    for other in range(1, world_size):
        dist.recv(buffer, src=other)
        rows.append(buffer)
    return rows


@wrong("collect_on_rank_0", LIST)
def _(tensor):  # backwards
    rank, world_size = rank_and_size()
    rows = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(rows, tensor)
    return rows[::-1] if rank == 0 else None


@wrong("collect_on_rank_0", LIST)
def _(tensor):  # without its own
    rank, world_size = rank_and_size()
    if rank:
        dist.send(tensor, dst=0)
        return None
    rows = [torch.empty_like(tensor) for _ in range(world_size - 1)]
    for other, row in enumerate(rows, start=1):
        dist.recv(row, src=other)
    return rows


@wrong("collect_on_rank_0", LIST)
def _(tensor):  # stacked
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor)
    return torch.stack(rows) if dist.get_rank() == 0 else None


@wrong("collect_on_rank_0", LIST)
def _(tensor):  # the sum
    total = tensor.clone()
    dist.all_reduce(total)
    return [total] if dist.get_rank() == 0 else None


@wrong("collect_on_rank_0", "returns on every rank")
def _(tensor):  # waits for two messages from each
    rank, world_size = rank_and_size()
    if rank:
        dist.send(tensor, dst=0)
        return None
    rows = [tensor]
    for other in [*range(1, world_size), *range(1, world_size)]:
        rows.append(torch.empty_like(tensor))
        dist.recv(rows[-1], src=other)
    return rows


@wrong("collect_on_rank_0", "the argument keeps its values")
def _(tensor):
    rank, world_size = rank_and_size()
    rows = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(rows, tensor)
    tensor.zero_()
    return rows if rank == 0 else None


# ---- broadcast_by_hand -----------------------------------------------------------

HOLDS = "the tensor itself now holds"


@right("broadcast_by_hand")
def _(tensor, src):
    rank, world_size = rank_and_size()
    if rank != src:
        dist.recv(tensor, src=src)
        return
    for other in range(world_size):
        if other != src:
            dist.send(tensor, dst=other)


@right("broadcast_by_hand")
def _(tensor, src):  # passed on from one to the next
    rank, world_size = rank_and_size()
    place = (rank - src) % world_size
    if place > 0:
        dist.recv(tensor, src=(rank - 1) % world_size)
    if place < world_size - 1:
        dist.isend(tensor, dst=(rank + 1) % world_size).wait()


@wrong("broadcast_by_hand", "only send and recv communicate")
def _(tensor, src):
    dist.broadcast(tensor, src=src)


@wrong("broadcast_by_hand", "only send and recv communicate")
def _(tensor, src):
    if dist.get_rank() != src:
        tensor.zero_()
    dist.all_reduce(tensor)


@wrong("broadcast_by_hand", HOLDS)
def _(tensor, src):  # a new tensor
    rank, world_size = rank_and_size()
    if rank != src:
        received = torch.empty_like(tensor)
        dist.recv(received, src=src)
        tensor = received
        return
    for other in range(world_size):
        if other != src:
            dist.send(tensor, dst=other)


@wrong("broadcast_by_hand", "returns on every rank")
def _(tensor, src):  # always from rank 0, but who waits, waits for src
    rank, world_size = rank_and_size()
    if rank == 0:
        for other in range(1, world_size):
            dist.send(tensor, dst=other)
    else:
        dist.recv(tensor, src=src)


@wrong("broadcast_by_hand", HOLDS)
def _(tensor, src):  # from rank 0, whatever src is
    rank, world_size = rank_and_size()
    if rank:
        dist.recv(tensor, src=0)
        return
    for other in range(1, world_size):
        dist.send(tensor, dst=other)


@wrong("broadcast_by_hand", HOLDS)
def _(tensor, src):  # does nothing
    pass


@wrong("broadcast_by_hand", HOLDS)
def _(tensor, src):  # to the neighbour only
    rank, world_size = rank_and_size()
    right_one = (src + 1) % world_size
    if rank == src and world_size > 1:
        dist.send(tensor, dst=right_one)
    elif rank == right_one and world_size > 1:
        dist.recv(tensor, src=src)


@wrong("broadcast_by_hand", "returns on every rank")
def _(tensor, src):  # sends to itself
    for other in range(dist.get_world_size()):
        if dist.get_rank() == src:
            dist.send(tensor, dst=other)
        elif dist.get_rank() == other:
            dist.recv(tensor, src=src)


@wrong("broadcast_by_hand", "the source keeps its values")
def _(tensor, src):
    rank, world_size = rank_and_size()
    if rank != src:
        dist.recv(tensor, src=src)
        return
    for other in range(world_size):
        if other != src:
            dist.send(tensor, dst=other)
    tensor.zero_()


# ---- place_from_environment ------------------------------------------------------

PLACE = "(rank, local rank, world size)"


@right("place_from_environment")
def _(environ):
    return (
        int(environ.get("RANK", 0)),
        int(environ.get("LOCAL_RANK", 0)),
        int(environ.get("WORLD_SIZE", 1)),
    )


@right("place_from_environment")
def _(environ):
    if "RANK" not in environ:
        return 0, 0, 1
    return tuple(int(environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


@wrong("place_from_environment", "environment holds text")
def _(environ):
    return environ["RANK"], environ["LOCAL_RANK"], environ["WORLD_SIZE"]


@wrong("place_from_environment", "returns")
def _(environ):
    return tuple(int(environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


@wrong("place_from_environment", PLACE)
def _(environ):  # one machine only
    rank = int(environ.get("RANK", 0))
    return rank, rank, int(environ.get("WORLD_SIZE", 1))


@wrong("place_from_environment", PLACE)
def _(environ):
    rank, world_size = int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1))
    return rank, world_size, int(environ.get("LOCAL_RANK", 0))


@wrong("place_from_environment", "nobody launched")
def _(environ):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    return tuple(int(environ.get(name, 0)) for name in names)


@wrong("place_from_environment", PLACE)
def _(environ):  # the notebook's own environment
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    return tuple(int(os.environ.get(name, 0)) for name in names)


@wrong("place_from_environment", PLACE)
def _(environ):  # the first digit
    places = [environ.get(n, "0") for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
    return tuple(int(place[0]) for place in places)


# ---- average_gradients -----------------------------------------------------------

GRADIENT = "each gradient is the mean"


@right("average_gradients")
def _(model):  # by another collective, and without waiting
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.nn.utils.parameters_to_vector(gradients)
    rows = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, flat, async_op=True).wait()
    torch.nn.utils.vector_to_parameters(torch.stack(rows).mean(0), gradients)


@right("average_gradients")
def _(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    flat = torch.cat([p.grad.flatten() for p in trained]) / dist.get_world_size()
    dist.all_reduce(flat)
    parts = flat.split([p.numel() for p in trained])
    for parameter, part in zip(trained, parts, strict=True):
        parameter.grad = part.view_as(parameter)


@wrong("average_gradients", "all gradients travel in one message")
def _(model):  # one each
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


@wrong("average_gradients", "all gradients travel in one message")
def _(model):  # an own name for the function is no way round
    from torch.distributed import all_reduce as send

    handles = []
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            handles.append(send(parameter.grad, async_op=True))
    for handle in handles:
        handle.wait()


@wrong("average_gradients", "all gradients travel in one message")
def _(model):  # round a ring, one neighbour at a time
    rank, world_size = rank_and_size()
    trained = [p for p in model.parameters() if p.grad is not None]
    total = torch.cat([p.grad.flatten() for p in trained])
    passed = total.clone()
    for _ in range(world_size - 1):
        arrived = torch.empty_like(passed)
        handle = dist.isend(passed, (rank + 1) % world_size)
        dist.recv(arrived, (rank - 1) % world_size)
        handle.wait()
        total, passed = total + arrived, arrived
    parts = (total / world_size).split([p.numel() for p in trained])
    for parameter, part in zip(trained, parts, strict=True):
        parameter.grad = part.view_as(parameter)


@wrong("average_gradients", GRADIENT)
def _(model):  # the sum
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)


@wrong("average_gradients", "the parameters do not")
def _(model):  # reduces the parameter
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size() + 1


@wrong("average_gradients", GRADIENT)
def _(model):  # changes a copy
    for parameter in model.parameters():
        if parameter.grad is not None:
            mean = parameter.grad.clone()
            dist.all_reduce(mean)
            mean /= dist.get_world_size()


@wrong("average_gradients", GRADIENT)
def _(model):  # rank 0's gradients for all
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.broadcast(parameter.grad, src=0)


@wrong("average_gradients", "returns on every rank")
def _(model):  # the frozen one
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@wrong("average_gradients", "still has none")
def _(model):
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@wrong("average_gradients", GRADIENT)
def _(model):  # the first layer only
    for parameter in model[0].parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@wrong("average_gradients", GRADIENT)
def _(model):  # two ranks, hard-wired
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2


@wrong("average_gradients", "the parameters do not")
def _(model):  # steps too
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
            parameter.data -= 0.1 * parameter.grad


# ---- broadcast_model -------------------------------------------------------------


@right("broadcast_model")
def _(model):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)


@right("broadcast_model")
def _(model):
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if dist.get_rank() != 0:
                tensor.zero_()
            dist.all_reduce(tensor)


@wrong("broadcast_model", "every buffer is that of rank 0")
def _(model):
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)


@wrong("broadcast_model", "every parameter is that of rank 0")
def _(model):
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


@wrong("broadcast_model", "every parameter is that of rank 0")
def _(model):  # the last rank's
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=dist.get_world_size() - 1)


@wrong("broadcast_model", "every parameter is that of rank 0")
def _(model):  # the mean
    for tensor in model.state_dict().values():
        dist.all_reduce(tensor)
        tensor.div_(dist.get_world_size(), rounding_mode="floor")


@wrong("broadcast_model", "every parameter is that of rank 0")
def _(model):  # only what is trained
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.requires_grad or tensor.dim() != 1 or tensor.numel() != 1:
            dist.broadcast(tensor.data, src=0)


@wrong("broadcast_model", "parameters change in place")
def _(model):
    for module in model:
        for name, parameter in list(module.named_parameters()):
            new = parameter.detach().clone()
            dist.broadcast(new, src=0)
            new = torch.nn.Parameter(new, requires_grad=parameter.requires_grad)
            setattr(module, name, new)
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


@wrong("broadcast_model", "requires_grad stays")
def _(model):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    model.requires_grad_(True)


@wrong("broadcast_model", "every parameter is that of rank 0")
def _(model):
    pass


# ---- replicas_agree --------------------------------------------------------------

AGREE, DIFFER = "True on every rank", "False on every rank"


def _flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@right("replicas_agree")
def _(model):
    low, high = _flat(model), _flat(model)
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    return bool(low.equal(high))


@right("replicas_agree")
def _(model):
    own = _flat(model)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    return all(torch.equal(row, rows[0]) for row in rows)


@wrong("replicas_agree", DIFFER)
def _(model):
    return True


@wrong("replicas_agree", AGREE)
def _(model):
    return False


@wrong("replicas_agree", DIFFER)
def _(model):  # rank 0 does not look at itself
    first = _flat(model)
    dist.broadcast(first, src=0)
    return torch.equal(first, _flat(model))


@wrong("replicas_agree", DIFFER)
def _(model):  # asks the first and the last rank only
    first, last = _flat(model), _flat(model)
    dist.broadcast(first, src=0)
    dist.broadcast(last, src=dist.get_world_size() - 1)
    return torch.equal(first, last)


@wrong("replicas_agree", DIFFER)
def _(model):  # nearly equal
    own = _flat(model)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    return all(torch.allclose(row, rows[0]) for row in rows)


@wrong("replicas_agree", DIFFER)
def _(model):  # a sum does not see what is swapped
    own = _flat(model).sum()
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    return all(torch.equal(row, rows[0]) for row in rows)


@wrong("replicas_agree", DIFFER)
def _(model):  # the mean does not see what cancels
    own, mean = _flat(model), _flat(model)
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    agree = torch.tensor(float(torch.equal(mean, own)))
    dist.broadcast(agree, src=0)
    return bool(agree)


@wrong("replicas_agree", "it only looks")
def _(model):
    own = _flat(model)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    return all(torch.equal(row, rows[0]) for row in rows)


@wrong("replicas_agree", AGREE)
def _(model):  # says so on rank 0 only
    own = _flat(model)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    if dist.get_rank() == 0:
        return all(torch.equal(row, rows[0]) for row in rows)
    return None


# ---- shard_indices ---------------------------------------------------------------

EQUAL, DEALT = "all ranks get equally many", "what DistributedSampler gives"


@right("shard_indices")
def _(num_samples, rank, world_size):
    per_rank = -(-num_samples // world_size)
    return [(rank + k * world_size) % num_samples for k in range(per_rank)]


@right("shard_indices")
def _(num_samples, rank, world_size):
    everything = list(range(num_samples))
    while len(everything) % world_size:
        everything.append(everything[len(everything) % num_samples])
    return everything[rank::world_size]


@wrong("shard_indices", EQUAL)
def _(num_samples, rank, world_size):  # no padding
    return list(range(rank, num_samples, world_size))


@wrong("shard_indices", EQUAL)
def _(num_samples, rank, world_size):  # no sampler
    return list(range(num_samples))


@wrong("shard_indices", DEALT)
def _(num_samples, rank, world_size):  # blocks
    size = -(-num_samples // world_size)
    return [k % num_samples for k in range(rank * size, rank * size + size)]


@wrong("shard_indices", EQUAL)
def _(num_samples, rank, world_size):  # drops the end
    per_rank = num_samples // world_size
    return [rank + k * world_size for k in range(per_rank)]


@wrong("shard_indices", DEALT)
def _(num_samples, rank, world_size):  # fills up with the last one
    per_rank = -(-num_samples // world_size)
    last = num_samples - 1
    return [min(rank + k * world_size, last) for k in range(per_rank)]


@wrong("shard_indices", EQUAL)
def _(num_samples, rank, world_size):  # fills up once only
    everything = list(range(num_samples))
    everything += everything[: -num_samples % world_size]
    return everything[rank::world_size]


@wrong("shard_indices", DEALT)
def _(num_samples, rank, world_size):  # ranks from 1
    per_rank = -(-num_samples // world_size)
    return [(rank + 1 + k * world_size) % num_samples for k in range(per_rank)]


@wrong("shard_indices", "returns")
def _(num_samples, rank, world_size):
    return None


# ---- shuffled_shard --------------------------------------------------------------


def _order(num_samples, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(num_samples, generator=generator).tolist()


@right("shuffled_shard")
def _(num_samples, rank, world_size, epoch):
    return _order(num_samples, epoch)[rank::world_size]


@right("shuffled_shard")
def _(num_samples, rank, world_size, epoch):  # the last rank first
    order = list(range(num_samples))
    random.Random(1000 + epoch).shuffle(order)
    return order[world_size - 1 - rank :: world_size]


@right("shuffled_shard")
def _(num_samples, rank, world_size, epoch):  # torch's own
    sampler = DistributedSampler(range(num_samples), world_size, rank)
    sampler.set_epoch(epoch)
    return list(sampler)


@wrong("shuffled_shard", "a global batch does not depend on the number of ranks")
def _(num_samples, rank, world_size, epoch):  # blocks
    order = _order(num_samples, epoch)
    size = num_samples // world_size
    return order[rank * size : (rank + 1) * size]


@wrong("shuffled_shard", "a global batch does not depend on the number of ranks")
def _(num_samples, rank, world_size, epoch):  # another order for each world size
    return _order(num_samples, epoch + 10 * world_size)[rank::world_size]


@wrong("shuffled_shard", "a global batch does not depend on the number of ranks")
def _(num_samples, rank, world_size, epoch):  # each rank shuffles its part once more
    own = _order(num_samples, epoch)[rank::world_size]
    return [own[k] for k in _order(len(own), rank)]


@wrong("shuffled_shard", "another order than epoch 0")
def _(num_samples, rank, world_size, epoch):  # no epoch
    return _order(num_samples, 0)[rank::world_size]


@wrong("shuffled_shard", "each of 24 samples is on one rank")
def _(num_samples, rank, world_size, epoch):  # each rank its own order
    return _order(num_samples, epoch + 100 * rank)[rank::world_size]


@wrong("shuffled_shard", "asked for again")
def _(num_samples, rank, world_size, epoch):  # anything
    order = list(range(num_samples))
    random.shuffle(order)
    return order[rank::world_size]


@wrong("shuffled_shard", "global random state")
def _(num_samples, rank, world_size, epoch):
    torch.manual_seed(epoch)
    return torch.randperm(num_samples).tolist()[rank::world_size]


@wrong("shuffled_shard", "other samples in the next epoch")
def _(num_samples, rank, world_size, epoch):  # shuffles within a fixed shard
    own = list(range(num_samples))[rank::world_size]
    return [own[k] for k in _order(len(own), epoch)]


@wrong("shuffled_shard", "each of 24 samples is on one rank")
def _(num_samples, rank, world_size, epoch):  # everything for everybody
    return _order(num_samples, epoch)


@wrong("shuffled_shard", "epoch 0 is shuffled")
def _(num_samples, rank, world_size, epoch):
    order = _order(num_samples, epoch) if epoch else list(range(num_samples))
    return order[rank::world_size]


@wrong("shuffled_shard", "equally many")
def _(num_samples, rank, world_size, epoch):
    order = _order(num_samples, epoch)
    cut = num_samples // world_size + 1 if world_size > 1 else num_samples
    parts = [order[:cut], order[cut:]]
    if world_size == 3:
        parts = [order[:cut], order[cut : 2 * cut], order[2 * cut :]]
    return parts[rank]


# ---- exact_accuracy --------------------------------------------------------------

SHARE = "each counted once"


@right("exact_accuracy")
def _(predictions, labels):
    right_and_all = torch.tensor([(predictions == labels).sum(), len(labels)])
    dist.all_reduce(right_and_all)
    return (right_and_all[0] / right_and_all[1]).item()


@right("exact_accuracy")
def _(predictions, labels):
    counts = [None] * dist.get_world_size()
    own = (int((predictions == labels).sum()), len(labels))
    dist.all_gather_object(counts, own)
    return sum(c for c, _ in counts) / sum(n for _, n in counts)


@wrong("exact_accuracy", SHARE)
def _(predictions, labels):  # this rank's
    return (predictions == labels).sum().item() / max(1, len(labels))


@wrong("exact_accuracy", SHARE)
def _(predictions, labels):  # the mean of the ranks'
    own = (predictions == labels).sum() / max(1, len(labels))
    dist.all_reduce(own)
    return own.item() / dist.get_world_size()


@wrong("exact_accuracy", SHARE)
def _(predictions, labels):  # NaN where there is nothing
    own = (predictions == labels).float().mean()
    dist.all_reduce(own)
    return own.item() / dist.get_world_size()


@wrong("exact_accuracy", SHARE)
def _(predictions, labels):  # rank 0's samples for all
    correct = (predictions == labels).sum()
    dist.all_reduce(correct)
    return correct.item() / max(1, len(labels))


@wrong("exact_accuracy", SHARE)
def _(predictions, labels):  # a count
    correct = (predictions == labels).sum()
    dist.all_reduce(correct)
    return correct.item()


@wrong("exact_accuracy", SHARE)
def _(predictions, labels):  # per cent
    both = torch.tensor([(predictions == labels).sum(), len(labels)])
    dist.all_reduce(both)
    return 100 * both[0].item() / both[1].item()


@wrong("exact_accuracy", "returns on every rank")
def _(predictions, labels):  # an empty share stays away
    if len(labels) == 0:
        return 0.0
    both = torch.tensor([(predictions == labels).sum(), len(labels)])
    dist.all_reduce(both)
    return both[0].item() / both[1].item()


@wrong("exact_accuracy", SHARE)
def _(predictions, labels):  # rank 0 only
    both = torch.tensor([(predictions == labels).sum(), len(labels)])
    dist.reduce(both, dst=0)
    return both[0].item() / both[1].item() if dist.get_rank() == 0 else None


# ---- global_loss -----------------------------------------------------------------

LOSS = "the mean over the samples of all ranks"


@right("global_loss")
def _(loss_sum, num_samples):
    both = torch.tensor([loss_sum, num_samples], dtype=torch.float64)
    dist.all_reduce(both)
    return (both[0] / both[1]).item()


@right("global_loss")
def _(loss_sum, num_samples):
    total, count = torch.tensor(loss_sum), torch.tensor(num_samples)
    dist.all_reduce(total)
    dist.all_reduce(count)
    return total / count


@wrong("global_loss", LOSS)
def _(loss_sum, num_samples):
    return loss_sum / max(1, num_samples)


@wrong("global_loss", LOSS)
def _(loss_sum, num_samples):
    own = torch.tensor(loss_sum / max(1, num_samples))
    dist.all_reduce(own)
    return own.item() / dist.get_world_size()


@wrong("global_loss", "returns on every rank")
def _(loss_sum, num_samples):
    mean = loss_sum / num_samples  # of nothing, where there are none
    both = torch.tensor([mean * num_samples, num_samples])
    dist.all_reduce(both)
    return (both[0] / both[1]).item()


@wrong("global_loss", LOSS)
def _(loss_sum, num_samples):
    total = torch.tensor(loss_sum)
    dist.all_reduce(total)
    return total.item()


@wrong("global_loss", LOSS)
def _(loss_sum, num_samples):
    total = torch.tensor(loss_sum)
    dist.all_reduce(total)
    return total.item() / (num_samples * dist.get_world_size() or 1)


@wrong("global_loss", LOSS)
def _(loss_sum, num_samples):
    both = torch.tensor([loss_sum, num_samples])
    dist.broadcast(both, src=0)
    return (both[0] / both[1]).item()


@wrong("global_loss", LOSS)
def _(loss_sum, num_samples):
    both = torch.tensor([loss_sum, num_samples])
    dist.all_reduce(both)
    return both


# ---- should_stop -----------------------------------------------------------------

STOP, GO_ON, BOOL = "all ranks stop", "nobody stops", "the answer is a bool"


@right("should_stop")
def _(wants_to_stop):
    flag = torch.tensor(int(wants_to_stop))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


@right("should_stop")
def _(wants_to_stop):
    votes = [None] * dist.get_world_size()
    dist.all_gather_object(votes, wants_to_stop)
    return any(votes)


@wrong("should_stop", STOP)
def _(wants_to_stop):
    return wants_to_stop


@wrong("should_stop", STOP)
def _(wants_to_stop):  # all must want it
    flag = torch.tensor(int(wants_to_stop))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


@wrong("should_stop", STOP)
def _(wants_to_stop):  # the majority
    flag = torch.tensor(float(wants_to_stop))
    dist.all_reduce(flag)
    return bool(flag > dist.get_world_size() / 2)


@wrong("should_stop", STOP)
def _(wants_to_stop):  # rank 0 decides
    flag = torch.tensor(int(wants_to_stop))
    dist.broadcast(flag, src=0)
    return bool(flag)


@wrong("should_stop", GO_ON)
def _(wants_to_stop):
    return True


@wrong("should_stop", "returns on every rank")
def _(wants_to_stop):  # who wants to stop tells nobody
    if wants_to_stop:
        return True
    flag = torch.tensor(0)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


@wrong("should_stop", BOOL)
def _(wants_to_stop):
    flag = torch.tensor(int(wants_to_stop))
    dist.all_reduce(flag)
    return flag.item()


# ---- torchrun_options ------------------------------------------------------------


@right("torchrun_options")
def _(hosts, ranks_per_host, port):
    return [
        *("--nnodes", str(len(hosts)), "--nproc-per-node", str(ranks_per_host)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0]}:{port}"),
        *("--rdzv-id", "first"),
    ]


@right("torchrun_options")
def _(hosts, ranks_per_host, port):
    return (
        f"--rdzv_id=7 --rdzv_endpoint={hosts[-1]}:{port} --rdzv_backend=c10d "
        f"--nproc_per_node={ranks_per_host} --nnodes={len(hosts)} --max-restarts 3"
    ).split()


def _options(hosts, ranks_per_host, port, **changed):
    """A right answer with some options changed, or left out if None."""
    options = {
        "nnodes": len(hosts),
        "nproc-per-node": ranks_per_host,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": f"{hosts[0]}:{port}",
        "rdzv-id": "first",
        **{name.replace("_", "-"): value for name, value in changed.items()},
    }
    return [f"--{name}={x}" for name, x in options.items() if x is not None]


@wrong("torchrun_options", "--nproc-per-node is the number of ranks on one host")
def _(hosts, ranks_per_host, port):  # of all hosts
    return _options(hosts, ranks_per_host * len(hosts), port)


@wrong("torchrun_options", "--nnodes is the number of hosts")
def _(hosts, ranks_per_host, port):
    return _options(hosts, ranks_per_host, port, nnodes=None)


@wrong("torchrun_options", "--nnodes is the number of hosts")
def _(hosts, ranks_per_host, port):  # the world size
    return _options(hosts, ranks_per_host, port, nnodes=len(hosts) * ranks_per_host)


@wrong("torchrun_options", "--rdzv-backend is c10d")
def _(hosts, ranks_per_host, port):  # static: needs a rank of its own on each host
    return _options(hosts, ranks_per_host, port, rdzv_backend=None)


@wrong("torchrun_options", "--rdzv-endpoint is one of the hosts")
def _(hosts, ranks_per_host, port):  # every host meets itself
    return _options(hosts, ranks_per_host, port, rdzv_endpoint=f"localhost:{port}")


@wrong("torchrun_options", "--rdzv-endpoint is one of the hosts")
def _(hosts, ranks_per_host, port):  # without the port
    return _options(hosts, ranks_per_host, port, rdzv_endpoint=hosts[0])


@wrong("torchrun_options", "--rdzv-id names the job")
def _(hosts, ranks_per_host, port):
    return _options(hosts, ranks_per_host, port, rdzv_id=None)


@wrong("torchrun_options", "there is no --standalone")
def _(hosts, ranks_per_host, port):
    return ["--standalone", *_options(hosts, ranks_per_host, port)]


@right("torchrun_options")
def _(hosts, ranks_per_host, port):
    nnodes = f"{len(hosts)}:{len(hosts)}"
    options = _options(hosts, ranks_per_host, port, nnodes=nnodes)
    return [*options, "--rdzv-conf", "join_timeout=120,read_timeout=30", "--tee=3"]


ALIKE = "the same options do for every host"


@wrong("torchrun_options", ALIKE)
def _(hosts, ranks_per_host, port):  # each opens a store of its own
    return _options(hosts, ranks_per_host, port, rdzv_conf="is_host=1")


@wrong("torchrun_options", ALIKE)
def _(hosts, ranks_per_host, port):  # nobody opens one
    return _options(hosts, ranks_per_host, port, rdzv_conf="read_timeout=9,is_host=0")


@wrong("torchrun_options", ALIKE)
def _(hosts, ranks_per_host, port):  # on every host this is another machine
    return _options(hosts, ranks_per_host, port, local_addr="127.0.0.1")


@wrong("torchrun_options", ALIKE)
def _(hosts, ranks_per_host, port):  # all of them are alpha
    return _options(hosts, ranks_per_host, port, local_addr=hosts[0])


@wrong("torchrun_options", "over the network")
def _(hosts, ranks_per_host, port):  # a file on a disk that need not be shared
    return _options(hosts, ranks_per_host, port, rdzv_conf="store_type=file")


@wrong("torchrun_options", "the script is a file")
def _(hosts, ranks_per_host, port):  # it would look for a module train.py
    return [*_options(hosts, ranks_per_host, port), "-m"]


@wrong("torchrun_options", "the script is a file")
def _(hosts, ranks_per_host, port):
    return ["--no-python", *_options(hosts, ranks_per_host, port)]


@wrong("torchrun_options", "--nnodes is the number of hosts")
def _(hosts, ranks_per_host, port):  # starts with one already
    return _options(hosts, ranks_per_host, port, nnodes=f"1:{len(hosts)}")


@wrong("torchrun_options", "torchrun understands all of them")
def _(hosts, ranks_per_host, port):
    return _options(hosts, ranks_per_host, port, nnodes="all")


@wrong("torchrun_options", "torchrun understands all of them")
def _(hosts, ranks_per_host, port):
    return _options(hosts, ranks_per_host, port, num_hosts=len(hosts))


@wrong("torchrun_options", "torchrun understands all of them")
def _(hosts, ranks_per_host, port):
    return ["torchrun", *_options(hosts, ranks_per_host, port)]


@wrong("torchrun_options", "torchrun understands all of them")
def _(hosts, ranks_per_host, port):
    return ["--help"]


@wrong("torchrun_options", "it is a list of texts")
def _(hosts, ranks_per_host, port):
    return " ".join(_options(hosts, ranks_per_host, port))


@wrong("torchrun_options", "it is a list of texts")
def _(hosts, ranks_per_host, port):
    return ["--nnodes", len(hosts), "--nproc-per-node", ranks_per_host]


# ---- places_from_slurm -----------------------------------------------------------


@right("places_from_slurm")
def _(tasks_per_node):
    places, host = [], 0
    for part in tasks_per_node.split(","):
        number, _, times = part.partition("(x")
        for _same in range(int(times.rstrip(")") or 1)):
            places += [(host, local_rank) for local_rank in range(int(number))]
            host += 1
    return places


@right("places_from_slurm")
def _(tasks_per_node):
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node)
    counts = [int(number) for number, times in found for _ in range(int(times or 1))]
    return [[host, k] for host, count in enumerate(counts) for k in range(count)]


def _slurm_counts(tasks_per_node):
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node)
    return [int(number) for number, times in found for _ in range(int(times or 1))]


@wrong("places_from_slurm", "one place for each task")
def _(tasks_per_node):  # forgets (x3)
    counts = [int(part.split("(")[0]) for part in tasks_per_node.split(",")]
    return [(host, k) for host, count in enumerate(counts) for k in range(count)]


@wrong("places_from_slurm", "one place for each task")
def _(tasks_per_node):  # the first host only
    return [(0, k) for k in range(int(tasks_per_node.split(",")[0].split("(")[0]))]


@wrong("places_from_slurm", "start again from 0")
def _(tasks_per_node):  # the rank for the local rank
    counts = _slurm_counts(tasks_per_node)
    hosts = [host for host, count in enumerate(counts) for _ in range(count)]
    return list(zip(hosts, range(len(hosts)), strict=True))


@wrong("places_from_slurm", "start again from 0")
def _(tasks_per_node):  # local ranks from 1
    counts = _slurm_counts(tasks_per_node)
    return [(host, k + 1) for host, count in enumerate(counts) for k in range(count)]


@wrong("places_from_slurm", "hosts count from 0")
def _(tasks_per_node):
    counts = _slurm_counts(tasks_per_node)
    return [(host + 1, k) for host, count in enumerate(counts) for k in range(count)]


@wrong("places_from_slurm", "host 1 has 3 of the tasks")
def _(tasks_per_node):  # as if all hosts were like the first
    counts = _slurm_counts(tasks_per_node)
    return [divmod(rank, counts[0]) for rank in range(sum(counts))]


@wrong("places_from_slurm", "ranks fill one host after the other")
def _(tasks_per_node):  # one rank to each host in turn
    counts = _slurm_counts(tasks_per_node)
    places = [(host, k) for host, count in enumerate(counts) for k in range(count)]
    return sorted(places, key=lambda place: place[1])


@wrong("places_from_slurm", "pairs of whole numbers")
def _(tasks_per_node):
    return _slurm_counts(tasks_per_node)


@wrong("places_from_slurm", "pairs of whole numbers")
def _(tasks_per_node):
    return dict(enumerate(_slurm_counts(tasks_per_node)))


# ---- bandwidth_needed ------------------------------------------------------------

SENDS = "2 (n - 1) / n times"


@right("bandwidth_needed")
def _(num_bytes, num_ranks, seconds):
    return 2 * (num_ranks - 1) / num_ranks * num_bytes * 8 / seconds


@right("bandwidth_needed")
def _(num_bytes, num_ranks, seconds):
    chunk_bits = 8 * num_bytes / num_ranks
    num_steps = 2 * num_ranks - 2
    return num_steps * chunk_bits / seconds


@wrong("bandwidth_needed", "a byte has 8 bits")
def _(num_bytes, num_ranks, seconds):
    return 2 * (num_ranks - 1) / num_ranks * num_bytes / seconds


@wrong("bandwidth_needed", SENDS)
def _(num_bytes, num_ranks, seconds):  # the sums do not come back
    return (num_ranks - 1) / num_ranks * num_bytes * 8 / seconds


@wrong("bandwidth_needed", SENDS)
def _(num_bytes, num_ranks, seconds):  # everybody sends everything to everybody
    return (num_ranks - 1) * num_bytes * 8 / seconds


@wrong("bandwidth_needed", "alone needs no network")
def _(num_bytes, num_ranks, seconds):
    return 2 * (num_ranks - 1 or 1) / num_ranks * num_bytes * 8 / seconds


@wrong("bandwidth_needed", SENDS)
def _(num_bytes, num_ranks, seconds):  # only right for two
    return num_bytes * 8 / seconds


@wrong("bandwidth_needed", SENDS)
def _(num_bytes, num_ranks, seconds):  # in and out one after the other
    return 4 * (num_ranks - 1) / num_ranks * num_bytes * 8 / seconds


@wrong("bandwidth_needed", "less time needs more")
def _(num_bytes, num_ranks, seconds):
    return 2 * (num_ranks - 1) / num_ranks * num_bytes * 8 * seconds


@wrong("bandwidth_needed", SENDS)
def _(num_bytes, num_ranks, seconds):  # a text
    return f"{2 * (num_ranks - 1) / num_ranks * num_bytes * 8 / seconds} bit/s"


# ---- save_atomically -------------------------------------------------------------

WHOLE = "at every moment the path holds a whole file"
FLUSHED = "flushed to the disk"


def _write_flushed(state, path):
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


@right("save_atomically")
def _(state, path):
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@right("save_atomically")
def _(state, path):
    content = io.BytesIO()
    torch.save(state, content)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content.getvalue())
        file.flush()
        os.fsync(file)
    os.rename(file.name, path)


@right("save_atomically")
def _(state, path):
    temporary = path.with_name("new")
    try:
        torch.save(state, temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@right("save_atomically")
def _(state, path):  # of the file's facts, only those that are needed to read it
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        getattr(os, "fdatasync", os.fsync)(file.fileno())
    os.replace(temporary, path)


@right("save_atomically")
def _(state, path):  # every write waits for the disk
    temporary = path.with_suffix(".tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_SYNC
    with os.fdopen(os.open(temporary, flags, 0o644), "wb") as file:
        torch.save(state, file)
    os.replace(temporary, path)


@right("save_atomically")
def _(state, path):  # everything that waits on this machine
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    os.sync()
    os.replace(temporary, path)


@wrong("save_atomically", WHOLE)
def _(state, path):
    torch.save(state, path)


@wrong("save_atomically", WHOLE)
def _(state, path):  # flushed, but the old one is gone at once
    _write_flushed(state, path)


@wrong("save_atomically", WHOLE)
def _(state, path):  # a moment with none
    temporary = path.with_suffix(".tmp")
    _write_flushed(state, temporary)
    path.unlink(missing_ok=True)
    os.replace(temporary, path)


@wrong("save_atomically", WHOLE)
def _(state, path):  # the old one is moved away first
    if path.exists():
        os.rename(path, path.with_suffix(".old"))
    _write_flushed(state, path)


@wrong("save_atomically", FLUSHED)
def _(state, path):
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


@wrong("save_atomically", "whole before it gets its name")
def _(state, path):  # renamed while the end is still in the buffer
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb", buffering=2**20) as file:
        torch.save(state, file)
        os.fsync(file.fileno())
        os.replace(temporary, path)


@wrong("save_atomically", FLUSHED)
def _(state, path):  # fsync before flush: nothing is there to be flushed
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb", buffering=2**20) as file:
        torch.save(state, file)
        os.fsync(file.fileno())
    os.replace(temporary, path)


@wrong("save_atomically", FLUSHED)
def _(state, path):  # the lock is written through, the state is not
    flags = os.O_WRONLY | os.O_CREAT | os.O_SYNC
    os.close(os.open(path.with_suffix(".lock"), flags, 0o644))
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    path.with_suffix(".lock").unlink()
    os.replace(temporary, path)


@wrong("save_atomically", FLUSHED)
def _(state, path):  # opened for writing, but not through
    temporary = path.with_suffix(".tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with os.fdopen(os.open(temporary, flags, 0o644), "wb") as file:
        torch.save(state, file)
    os.replace(temporary, path)


@wrong("save_atomically", "in the same folder")
def _(state, path):
    with tempfile.TemporaryDirectory() as elsewhere:
        temporary = os.path.join(elsewhere, "new.pt")
        _write_flushed(state, temporary)
        os.replace(temporary, path)


@wrong("save_atomically", "in one step, by os.replace")
def _(state, path):  # a copy is written bit by bit
    temporary = path.with_suffix(".tmp")
    _write_flushed(state, temporary)
    shutil.copyfile(temporary, path)
    temporary.unlink()


@wrong("save_atomically", "in one step, by os.replace")
def _(state, path):
    content = io.BytesIO()
    torch.save(state, content)
    path.write_bytes(content.getvalue())


@wrong("save_atomically", "the caller learns")
def _(state, path):
    temporary = path.with_suffix(".tmp")
    try:
        _write_flushed(state, temporary)
    except OSError:
        return
    os.replace(temporary, path)


@wrong("save_atomically", "nothing else is left")
def _(state, path):
    temporary = path.with_suffix(".tmp")
    _write_flushed(state, temporary)
    if path.exists():
        shutil.copyfile(path, path.with_suffix(".old"))
    os.replace(temporary, path)


@wrong("save_atomically", "holds the new state")
def _(state, path):
    _write_flushed(state, path.with_suffix(".new"))


@wrong("save_atomically", "it returns on every rank")
def _(state, path):
    os.replace(path.with_suffix(".tmp"), path)


# ---- resume_position -------------------------------------------------------------

WHOLE_EPOCHS = "whole epochs done"
SKIP = "the ranks together skip"


@right("resume_position")
def _(step, num_samples, global_batch_size, world_size):
    epoch, into = divmod(step, num_samples // global_batch_size)
    return epoch, into * global_batch_size // world_size


@right("resume_position")
def _(step, num_samples, global_batch_size, world_size):
    epoch, left = 0, step
    while left >= num_samples // global_batch_size:
        epoch, left = epoch + 1, left - num_samples // global_batch_size
    return [epoch, left * (global_batch_size // world_size)]


@wrong("resume_position", SKIP)
def _(step, num_samples, global_batch_size, world_size):  # all ranks' samples
    epoch, into = divmod(step, num_samples // global_batch_size)
    return epoch, into * global_batch_size


@wrong("resume_position", SKIP)
def _(step, num_samples, global_batch_size, world_size):  # steps
    return divmod(step, num_samples // global_batch_size)


@wrong("resume_position", SKIP)
def _(step, num_samples, global_batch_size, world_size):  # starts the epoch again
    return step // (num_samples // global_batch_size), 0


@wrong("resume_position", SKIP)
def _(step, num_samples, global_batch_size, world_size):  # as many as on two ranks
    epoch, into = divmod(step, num_samples // global_batch_size)
    return epoch, into * global_batch_size // 2


@wrong("resume_position", WHOLE_EPOCHS)
def _(step, num_samples, global_batch_size, world_size):  # counts from 1
    epoch, into = divmod(step, num_samples // global_batch_size)
    return epoch + 1, into * global_batch_size // world_size


@wrong("resume_position", WHOLE_EPOCHS)
def _(step, num_samples, global_batch_size, world_size):  # does not drop the rest
    epoch, into = divmod(step, -(-num_samples // global_batch_size))
    return epoch, into * global_batch_size // world_size


@wrong("resume_position", SKIP)
def _(step, num_samples, global_batch_size, world_size):  # the batch is each rank's
    epoch, into = divmod(step, num_samples // global_batch_size)
    return epoch, into * global_batch_size * world_size


@wrong("resume_position", SKIP)
def _(step, num_samples, global_batch_size, world_size):  # samples, rest included
    epoch, samples = divmod(step * global_batch_size, num_samples)
    return epoch, samples // world_size


@wrong("resume_position", WHOLE_EPOCHS)
def _(step, num_samples, global_batch_size, world_size):  # stays in the last epoch
    steps = num_samples // global_batch_size
    epoch = max(0, step - 1) // steps
    return epoch, (step - epoch * steps) * global_batch_size // world_size


@wrong("resume_position", "a pair of whole numbers")
def _(step, num_samples, global_batch_size, world_size):
    epoch, into = divmod(step, num_samples // global_batch_size)
    return epoch, into * global_batch_size / world_size


@wrong("resume_position", "a pair of whole numbers")
def _(step, num_samples, global_batch_size, world_size):
    return step * global_batch_size // world_size


# ---- steps_between_saves ---------------------------------------------------------

YOUNG = "sqrt(2 x save time"


@right("steps_between_saves")
def _(save_s, step_s, machine_mtbf_s, num_machines):
    best_s = math.sqrt(2 * save_s * machine_mtbf_s / num_machines)
    return max(1, round(best_s / step_s))


@right("steps_between_saves")
def _(save_s, step_s, machine_mtbf_s, num_machines):
    failures_per_s = num_machines / machine_mtbf_s
    return int((2 * save_s / failures_per_s) ** 0.5 / step_s) or 1


@wrong("steps_between_saves", YOUNG)
def _(save_s, step_s, machine_mtbf_s, num_machines):  # one machine's failures
    return max(1, round(math.sqrt(2 * save_s * machine_mtbf_s) / step_s))


@wrong("steps_between_saves", YOUNG)
def _(save_s, step_s, machine_mtbf_s, num_machines):  # seconds
    return max(1, round(math.sqrt(2 * save_s * machine_mtbf_s / num_machines)))


@wrong("steps_between_saves", YOUNG)
def _(save_s, step_s, machine_mtbf_s, num_machines):  # more machines fail less?
    return max(1, round(math.sqrt(2 * save_s * machine_mtbf_s * num_machines) / step_s))


@wrong("steps_between_saves", YOUNG)
def _(save_s, step_s, machine_mtbf_s, num_machines):  # without the 2
    return max(1, round(math.sqrt(save_s * machine_mtbf_s / num_machines) / step_s))


@wrong("steps_between_saves", YOUNG)
def _(save_s, step_s, machine_mtbf_s, num_machines):  # without the root
    return max(1, round(2 * save_s * machine_mtbf_s / num_machines / step_s))


@wrong("steps_between_saves", YOUNG)
def _(save_s, step_s, machine_mtbf_s, num_machines):  # once a failure
    return max(1, round(machine_mtbf_s / num_machines / step_s))


@wrong("steps_between_saves", "1 or more")
def _(save_s, step_s, machine_mtbf_s, num_machines):
    return round(math.sqrt(2 * save_s * machine_mtbf_s / num_machines) / step_s)


@wrong("steps_between_saves", "a whole number")
def _(save_s, step_s, machine_mtbf_s, num_machines):
    return math.sqrt(2 * save_s * machine_mtbf_s / num_machines) / step_s


# ---- loss_weight -----------------------------------------------------------------

EVERY_SAMPLE = "every sample counts the same"
MEAN_OF_ALL = "the mean over all samples"


def _total(num_samples):
    total = torch.tensor(float(num_samples))
    dist.all_reduce(total)
    return total.item()


@right("loss_weight")
def _(num_samples):
    return dist.get_world_size() / _total(num_samples)


@right("loss_weight")
def _(num_samples):
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, num_samples)
    return torch.tensor(len(counts) / sum(counts))


@wrong("loss_weight", EVERY_SAMPLE)
def _(num_samples):  # the mean of means
    return 1 / max(num_samples, 1)


@wrong("loss_weight", MEAN_OF_ALL)
def _(num_samples):  # as if DDP took the sum
    return 1 / _total(num_samples)


@wrong("loss_weight", MEAN_OF_ALL)
def _(num_samples):
    return 1 / dist.get_world_size()


@wrong("loss_weight", MEAN_OF_ALL)
def _(num_samples):  # upside down
    return _total(num_samples) / dist.get_world_size()


@wrong("loss_weight", MEAN_OF_ALL)
def _(num_samples):  # its share of the samples
    return dist.get_world_size() * num_samples / _total(num_samples)


@wrong("loss_weight", EVERY_SAMPLE)
def _(num_samples):  # the total stays on rank 0
    total = torch.tensor(float(num_samples))
    dist.reduce(total, dst=0)
    mine = total.item() if dist.get_rank() == 0 else max(num_samples, 1)
    return dist.get_world_size() / mine


@wrong("loss_weight", "returns on every rank")
def _(num_samples):  # a rank without samples stays away
    if num_samples == 0:
        return 0.0
    return dist.get_world_size() / _total(num_samples)


@wrong("loss_weight", "it is a number")
def _(num_samples):  # nothing is returned
    print(dist.get_world_size() / _total(num_samples))


# ---- splits ----------------------------------------------------------------------

EVERY_WAY = "every way is in the list"
PRODUCT = "is the global batch size"


@right("splits")
def _(global_batch_size, world_size):
    share, rest = divmod(global_batch_size, world_size)
    if rest:
        return []
    return [(share // k, k) for k in range(1, share + 1) if share % k == 0]


@right("splits")
def _(global_batch_size, world_size):
    found = []
    for micro in range(global_batch_size, 0, -1):
        if global_batch_size % (world_size * micro) == 0:
            found.append([micro, global_batch_size // (world_size * micro)])
    return found


@wrong("splits", PRODUCT)
def _(global_batch_size, world_size):  # forgets the ranks
    n = global_batch_size
    return [(n // k, k) for k in range(1, n + 1) if n % k == 0]


@wrong("splits", PRODUCT)
def _(global_batch_size, world_size):  # cuts off the rest
    share = global_batch_size // world_size
    return [(share // k, k) for k in range(1, share + 1) if share % k == 0]


@wrong("splits", EVERY_WAY)
def _(global_batch_size, world_size):  # one way only
    share, rest = divmod(global_batch_size, world_size)
    return [] if rest else [(share, 1)]


@wrong("splits", EVERY_WAY)
def _(global_batch_size, world_size):  # powers of two only
    share, rest = divmod(global_batch_size, world_size)
    steps = [2**k for k in range(10) if share % 2**k == 0 and share]
    return [] if rest else [(share // k, k) for k in steps]


@wrong("splits", EVERY_WAY)
def _(global_batch_size, world_size):  # the last one is missing
    share, rest = divmod(global_batch_size, world_size)
    return [] if rest else [(share // k, k) for k in range(1, share) if share % k == 0]


@wrong("splits", "the largest micro-batch comes first")
def _(global_batch_size, world_size):
    share, rest = divmod(global_batch_size, world_size)
    ways = [(share // k, k) for k in range(share, 0, -1) if share % k == 0]
    return [] if rest else ways


@wrong("splits", "pairs of whole numbers")
def _(global_batch_size, world_size):
    share, rest = divmod(global_batch_size, world_size)
    ways = [(share / k, k) for k in range(1, share + 1) if share % k == 0]
    return [] if rest else ways


@wrong("splits", "pairs of whole numbers")
def _(global_batch_size, world_size):
    return None


# ---- warm_up ---------------------------------------------------------------------

LINEAR = "lr x global_batch_size / lr_batch_size"
REACHED = "after num_warmup_steps steps"
FIRST = "the first step takes lr itself"


@right("warm_up")
def _(step, lr, lr_batch_size, global_batch_size, num_warmup_steps):
    full = lr * global_batch_size / lr_batch_size
    if step >= num_warmup_steps:
        return full
    return lr + (full - lr) * step / num_warmup_steps


@right("warm_up")
def _(step, lr, lr_batch_size, global_batch_size, num_warmup_steps):
    k = global_batch_size / lr_batch_size
    done = min(1.0, step / num_warmup_steps) if num_warmup_steps else 1.0
    return lr * (1 + done * (k - 1))


@wrong("warm_up", LINEAR)
def _(step, lr, lr_batch_size, global_batch_size, num_warmup_steps):  # square root
    full = lr * math.sqrt(global_batch_size / lr_batch_size)
    done = min(1.0, step / num_warmup_steps) if num_warmup_steps else 1.0
    return lr + (full - lr) * done


@wrong("warm_up", LINEAR)
def _(step, lr, lr_batch_size, global_batch_size, num_warmup_steps):  # no end
    full = lr * global_batch_size / lr_batch_size
    return lr + (full - lr) * step / max(num_warmup_steps, 1)


@wrong("warm_up", LINEAR)
def _(step, lr, lr_batch_size, global_batch_size, num_warmup_steps):  # upside down
    full = lr * lr_batch_size / global_batch_size
    done = min(1.0, step / num_warmup_steps) if num_warmup_steps else 1.0
    return lr + (full - lr) * done


@wrong("warm_up", REACHED)
def _(step, lr, lr_batch_size, global_batch_size, num_warmup_steps):  # one late
    full = lr * global_batch_size / lr_batch_size
    return lr + (full - lr) * min(1.0, step / (num_warmup_steps + 1))


@wrong("warm_up", FIRST)
def _(step, lr, lr_batch_size, global_batch_size, num_warmup_steps):  # from zero
    full = lr * global_batch_size / lr_batch_size
    return full * min(1.0, step / num_warmup_steps) if num_warmup_steps else full


@wrong("warm_up", FIRST)
def _(step, lr, lr_batch_size, global_batch_size, num_warmup_steps):  # no warm-up
    return lr * global_batch_size / lr_batch_size


@wrong("warm_up", "by equal amounts")
def _(step, lr, lr_batch_size, global_batch_size, num_warmup_steps):  # a constant
    full = lr * global_batch_size / lr_batch_size
    return full if step >= num_warmup_steps else lr


@wrong("warm_up", "by equal amounts")
def _(step, lr, lr_batch_size, global_batch_size, num_warmup_steps):  # geometric
    k = global_batch_size / lr_batch_size
    done = min(1.0, step / num_warmup_steps) if num_warmup_steps else 1.0
    return lr * k**done


@wrong("warm_up", "returns on every rank")
def _(step, lr, lr_batch_size, global_batch_size, num_warmup_steps):
    full = lr * global_batch_size / lr_batch_size
    return lr + (full - lr) * min(1.0, step / num_warmup_steps)


@wrong("warm_up", "it is a number")
def _(step, lr, lr_batch_size, global_batch_size, num_warmup_steps):
    full = lr * global_batch_size / lr_batch_size
    if step >= num_warmup_steps:
        return full
