"""A plan of a job: what is legal, how long a step takes, what fits, and which layout is best."""
