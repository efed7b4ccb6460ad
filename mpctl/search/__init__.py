"""Finding layouts: every legal one is thinkable, few are estimated.

space.py       which layouts there are for a job, as generators of legal values
bound.py       a floor under the seconds of many layouts at once, from the estimate's layer costs
evaluate.py    exact seconds and bytes of one layout, sharing layer costs with the others
find.py        branch and bound: the fastest, and the fastest under each memory limit
reasons.py     in words, what the best gains over the others
nearest.py     layouts that fit, near one that does not
"""
