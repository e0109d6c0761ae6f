"""Does the number of ranks change what is trained? Measured, step by step.

world_sizes.py    `compare_world_sizes`: the same training on several world sizes
comparison.py     `Comparison`: how far apart they were, and why
"""
