"""Instruments for anybody's training.

cuda_finder.py    who used CUDA first, in a process that was to be forked?
bandwidth.py      how fast is my network? (python -m ddp_lab.tools.bandwidth)
rehearse.py       does my run survive a failure of one of its ranks?
"""
