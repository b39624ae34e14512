"""The judge as a service: jobs over HTTP for callers with tokens, on the judges of `cuda-agent serve`.

This package imports `core`, `judge` and `agent`. A remote caller sends sources and gets verdicts. Of the
judge's settings, a request chooses only the precision, the labels (rules, weights and tolerance) and, for an
admission, the shortest and longest eager time of a task. Start with `jobs.py`; the routes are in `app.py`,
and their client is `judge/http_pool.py`. `mcp_route.py` has the tools of coding agents and `kernelgym.py` the
routes of KernelGYM.

The environment for trainers is another server: `environment.py` serves the sessions of `sessions.py` in
OpenEnv's wire form, and `client/` has separate packages for its clients.
"""
