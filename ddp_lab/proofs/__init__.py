"""Does the number of ranks change what is trained, or the batch? Measured by step.

world_sizes.py    `compare_world_sizes`: the same training on several world sizes
comparison.py     `Comparison`: how far apart they were, and why
trainings.py      `losses_of` a training on ranks, `losses_by_seed` of a small net
"""
