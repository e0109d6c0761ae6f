"""Exercises: a task in words, and a judge who tries the answer.

An answer that needs other ranks is tried on 1, 2 and 3; any other in this process.

check.py       `check`: judge one function, from a notebook cell
exercise.py    what an exercise consists of
on_ranks.py    run an answer on several world sizes, and write down what was seen
about_*.py     the exercises, a file a notebook
"""
