"""Every picture of the lab, in one place to import from.

    plot_three_steps  the three steps, in one optimiser step of two ranks
    plot_loss         how the loss of a run falls, and each rank's own behind it
    LiveCurve         the same, while the ranks train
    plot_comparison   the same training on several numbers of ranks, how far apart
    plot_losses       several trainings, also with different batch sizes
    plot_accumulation which micro-batch of a step sends, and what it adds up to
    plot_shards       which rank gets which sample, epoch by epoch
    plot_collective   what a collective does: each rank's tensor before and after
    plot_ring         the ring all-reduce, step by step, with the bytes on each link
    plot_buckets      which parameters travel together, and in which order
    plot_memory       where memory goes, against the batch size
    plot_hosts        which rank is on which host, and who talks to whom
    plot_resumed      the loss of a run that was interrupted, over one that was not
    plot_life         each rank through a kill, a rendezvous and a resume
    plot_lost_time    what saving costs, and failing, against the interval
    plot_bandwidth    how long all-reduces took, against their size
    plot_network_cost how long they must take, against the number of ranks

They turn records and situations into figures and know nothing of processes. Each
``plot_`` function returns a matplotlib figure; in a notebook, end the cell with
``plt.show()``.

    drawing.py      the style, and the colour of each rank
    loss.py         plot_loss, LiveCurve         trainings.py    plot_losses
    world_sizes.py  plot_comparison              recovery.py     plot_resumed, ...
    collectives.py  plot_collective, plot_ring   diagrams.py     shards, buckets, ...
    steps.py        plot_three_steps             accumulation.py plot_accumulation
    network.py      plot_bandwidth, ...          life.py         plot_life
"""

from ddp_lab.figures.accumulation import plot_accumulation
from ddp_lab.figures.collectives import plot_collective, plot_ring
from ddp_lab.figures.diagrams import plot_buckets, plot_hosts, plot_memory, plot_shards
from ddp_lab.figures.drawing import (
    RANK_COLOURS,
    rank_colour,
    save_picture,
    style,
)
from ddp_lab.figures.life import plot_life
from ddp_lab.figures.loss import LiveCurve, plot_loss
from ddp_lab.figures.network import plot_bandwidth, plot_network_cost
from ddp_lab.figures.recovery import plot_lost_time, plot_resumed
from ddp_lab.figures.steps import plot_three_steps
from ddp_lab.figures.trainings import plot_losses
from ddp_lab.figures.world_sizes import plot_comparison

__all__ = [
    "RANK_COLOURS",
    "LiveCurve",
    "plot_accumulation",
    "plot_bandwidth",
    "plot_buckets",
    "plot_collective",
    "plot_comparison",
    "plot_hosts",
    "plot_life",
    "plot_loss",
    "plot_losses",
    "plot_lost_time",
    "plot_memory",
    "plot_network_cost",
    "plot_resumed",
    "plot_ring",
    "plot_shards",
    "plot_three_steps",
    "rank_colour",
    "save_picture",
    "style",
]
