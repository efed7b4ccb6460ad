"""The fastest layouts of a job, those of least memory, and those near one that does not fit.

space.py       which layouts there are for a job; how a setting is added to what is searched
keys.py        what layouts have in common: layer key, axes key, family
evaluate.py    exact seconds and bytes of one layout, sharing layer times with the others
bound.py       lower bounds of the seconds of many layouts at once, from the same layer times
find.py        branch and bound: the fastest, and the fastest under each memory budget
nearest.py     layouts that fit, near one that does not
request.py     what was typed as a request: the job, what is fixed, numbers of GPUs
result.py      a whole search, on one number of GPUs or several
report.py      layouts with their figures, and in words what sets them apart
document.py    the result as JSON (schema mpctl.search/1) and as rows of a table
library.py     a search in one call, for programs
"""
