"""The plan of a job, its summary, its JSON document, comparisons and explanations of figures."""
