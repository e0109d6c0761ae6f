"""All-reduce written out: a ring of ranks, each talks to its two neighbours only.

Letters: ``W`` is the world size, ``S`` the size in bytes of what is reduced.
"""

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["ring_all_reduce"]


def ring_all_reduce(tensor: Tensor) -> Tensor:
    """Sum `tensor` over all ranks, in place, so that every rank holds the same sum.

    The ranks stand in a ring, each sends to its right and receives from its left. The
    tensor is cut into ``W`` chunks, and each chunk goes round the ring twice: once to
    collect the sum, once to spread it. Every link carries data in every step, which
    is why the time hardly grows with the number of ranks.

    Args:
        tensor: any shape, length and dtype that can be added, equal on all ranks.

    Returns:
        `tensor` itself, with the same bits on all ranks.

    **Collective**: every rank calls it, with tensors in the same order.

    **Cost**: ``2 (W-1)`` messages and ``2 (W-1)/W * S`` bytes sent by each rank. With
    one rank nothing is sent.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters
    of workstations", J. Parallel Distrib. Comput. 69 (2009) 117-124.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    flat = tensor.detach().contiguous().view(-1)  # the tensor's own memory, if it can
    chunks = flat.tensor_split(world_size)  # W pieces; some are empty if numel < W

    # 1. Reduce-scatter: W-1 steps. In each, pass on the chunk that was just added to.
    #    At the end each rank owns one finished chunk: the one after its own number.
    for step in range(world_size - 1):
        outgoing = chunks[(rank - step) % world_size]
        incoming = chunks[(rank - step - 1) % world_size]
        incoming += _exchange(outgoing, torch.empty_like(incoming))

    # 2. All-gather: W-1 steps. Pass on the finished chunk that was just received.
    for step in range(world_size - 1):
        outgoing = chunks[(rank - step + 1) % world_size]
        _exchange(outgoing, chunks[(rank - step) % world_size])

    if flat.data_ptr() != tensor.data_ptr():  # `tensor` was not contiguous
        tensor.detach().copy_(flat.view(tensor.shape))
    return tensor


def _exchange(outgoing: Tensor, incoming: Tensor) -> Tensor:
    """Send to the right neighbour while receiving from the left one."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    # Both at once: if all ranks first sent and then received, all could wait for ever.
    messages = []
    if outgoing.numel():
        messages.append(dist.P2POp(dist.isend, outgoing, right))
    if incoming.numel():
        messages.append(dist.P2POp(dist.irecv, incoming, left))
    if messages:
        for work in dist.batch_isend_irecv(messages):
            work.wait()
    return incoming
