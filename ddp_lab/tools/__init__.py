"""Instruments for anybody's training.

cuda_finder.py    who used CUDA first, in a process that was to be forked?
"""
