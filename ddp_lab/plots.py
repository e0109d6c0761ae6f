"""Every picture of the lab, in one place to import from.

    plot_loss         how the loss of a run falls, and each rank's own behind it
    LiveCurve         the same, while the ranks train
    plot_comparison   the same training on several numbers of ranks, how far apart
    plot_losses       several trainings, also with different batch sizes
    plot_shards       which rank gets which sample, epoch by epoch
    plot_collective   what a collective does: each rank's tensor before and after
    plot_ring         the ring all-reduce, step by step, with the bytes on each link
    plot_buckets      which parameters travel together, and in which order
    plot_memory       where memory goes, against the batch size
    plot_hosts        which rank is on which host, and who talks to whom
    plot_resumed      the loss of a run that was interrupted, over one that was not
    plot_lost_time    what saving costs, and failing, against the interval

They turn records into figures and know nothing of processes. Each returns a matplotlib
figure; in a notebook, end the cell with ``plt.show()``.
"""

from ddp_lab.curves import LiveCurve, plot_loss
from ddp_lab.diagrams import plot_buckets, plot_hosts, plot_memory, plot_shards
from ddp_lab.differences import plot_comparison
from ddp_lab.drawing import RANK_COLOURS, rank_colour, save_picture, style
from ddp_lab.messages import plot_collective, plot_ring
from ddp_lab.recovery import plot_lost_time, plot_resumed
from ddp_lab.side_by_side import plot_losses

__all__ = [
    "RANK_COLOURS",
    "LiveCurve",
    "plot_buckets",
    "plot_collective",
    "plot_comparison",
    "plot_hosts",
    "plot_loss",
    "plot_losses",
    "plot_lost_time",
    "plot_memory",
    "plot_resumed",
    "plot_ring",
    "plot_shards",
    "rank_colour",
    "save_picture",
    "style",
]
