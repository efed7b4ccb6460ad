"""The fastest layouts of a job, those of least memory, and those near one that does not fit.

space.py       which layouts there are for a job; how to add a setting to the search
evaluate.py    exact seconds and bytes of one layout, sharing layer times with the others
bound.py       lower bounds of the seconds of many layouts at once, from the same layer times
find.py        branch and bound: the fastest classes of layouts, and the fastest under each memory budget
nearest.py     layouts that fit, near one that does not; reasons why nothing was found
request.py     a search request: the job, fixed settings, numbers of GPUs
result.py      a complete search, on one number of GPUs or several, in one call
document.py    the result as JSON (schema mpctl.search/3) and as rows of a table
"""
