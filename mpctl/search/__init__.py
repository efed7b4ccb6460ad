"""The fastest layouts of a job, those of least memory, and those near one that does not fit.

space.py       which layouts there are for a job; how a setting is added to what is searched
evaluate.py    exact seconds and bytes of one layout, sharing layer times with the others
bound.py       lower bounds of the seconds of many layouts at once, from the same layer times
find.py        branch and bound: the fastest ideas, and the fastest under each memory budget
nearest.py     layouts that fit, near one that does not; why nothing was found
request.py     what was typed as a request: the job, what is fixed, numbers of GPUs
result.py      a whole search, on one number of GPUs or several, in one call
document.py    the result as JSON (schema mpctl.search/2) and as rows of a table
"""
