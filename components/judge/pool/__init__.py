"""This package gives every caller verdicts from one or more judges: here, on a Ray cluster, or over HTTP.

Other packages use `open_pool.open_pool`, the check of tasks `measurable.refused_tasks`, and the records `Job`
and `Candidate` of `local_pool.py`, which also keeps the journal of verdicts. Start with `local_pool.py`.
"""
