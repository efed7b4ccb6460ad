"""The fastest layouts of a job, the plainest of their ties, those of least memory, those near one that does not fit.

space.py       which layouts there are for a job; how to add a setting to the search
evaluate.py    exact seconds and bytes of one layout, sharing layer times with the others
bound.py       lower bounds of the seconds of many layouts at once, from the same layer times
find.py        branch and bound: the fastest classes of layouts, the plainest of their ties, the front
plain.py       how plain a layout is under its runtime, and what a plainer one saves
nearest.py     layouts that fit, near one that does not; reasons why nothing was found
request.py     a search request: the job, fixed settings, numbers of GPUs
result.py      a complete search, on one number of GPUs or several, in one call
document.py    the result as JSON (schema mpctl.search/3) and as rows of a table
"""
