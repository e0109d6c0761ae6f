"""What a run carries along, what it leaves behind, and how it goes on.

state.py         `TrainState`: model, optimiser, schedule, and how far they got
session.py       `Session`: counts, writes, saves and stops while a run is under way
record.py        `Run`, `History`: the files in a run's folder
checkpoint.py    one file with all that decides the rest of the run
resume.py        the newest checkpoint of any machine, given to all ranks
stop.py          `StopRequest`: a signal asks, the run saves and ends
progress.py      what rank 0 prints meanwhile
"""
