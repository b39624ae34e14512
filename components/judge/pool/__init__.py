"""This package gives verdicts from judges in this process, on a Ray cluster, or behind an HTTP service.

The main entry points for other packages are `open_pool.open_pool`, `measurable.check_tasks` (the check
which tasks can be judged), and `JudgePool`, `Job` and `Candidate` of `local_pool.py`. The pool in that file
also keeps the journal, a folder of stored verdicts. Start with `local_pool.py`.
"""
