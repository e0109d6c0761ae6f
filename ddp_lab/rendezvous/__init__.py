"""How ranks meet: where, who is missing, and what the cluster says about them.

store.py      host the key-value store where ranks find each other
meeting.py    `meet`: check in there, and say who has not come
slurm.py      which rank Slurm has put on which host
"""
