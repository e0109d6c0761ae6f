"""What PyTorch does inside, written out in Python, and proved equal to PyTorch's own.

all_reduce.py        `ring_all_reduce`: a tensor summed over all ranks
ddp.py               `NaiveDDP` and `BucketDDP`: gradients averaged over all ranks
sync_batch_norm.py   `SyncBatchNorm`: statistics of all ranks' samples
"""

from ddp_lab.by_hand.all_reduce import ring_all_reduce
from ddp_lab.by_hand.ddp import BucketDDP, NaiveDDP, assign_buckets
from ddp_lab.by_hand.sync_batch_norm import SyncBatchNorm, all_reduce_sum

__all__ = [
    "BucketDDP",
    "NaiveDDP",
    "SyncBatchNorm",
    "all_reduce_sum",
    "assign_buckets",
    "ring_all_reduce",
]
