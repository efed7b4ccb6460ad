"""Estimates of many jobs, one JSON object a line in and one out: `mpctl batch`.

A line is a job (the keys of a job file, and `id`), or a row that holds one under `job`. No line can
end the others: its errors become its issues, and its figures are null.

rows.py        a stream as lines, a line as JSON, and a job from what it holds
answers.py     the answers, one at a time or by several processes
"""
