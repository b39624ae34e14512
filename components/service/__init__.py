"""The judge as a service: jobs over HTTP for callers with tokens, on the judges of `cuda-agent serve`.

A judge builds, checks and measures candidates (implementations of a PyTorch module that shall be faster) and
gives verdicts. This package imports `core`, `policy`, `sandbox` and `judge`. A remote caller sends sources
and gets verdicts. Of the judge's settings, a remote caller chooses only the precision, the labels (rules,
weights, tolerance, input cache and modes of torch.compile) and, for an admission (the check whether a task
can be judged), the shortest and longest eager time of a task. Start with `jobs.py`; the routes are in
`app.py`, and their client is in `judge/pool/service_client.py`. `mcp_server.py` has the tools of coding
agents. `client/` is a package of its own for trainers: reward functions and an environment for verifiers.
"""
