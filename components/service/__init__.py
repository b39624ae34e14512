"""The judge as a service: jobs over HTTP for callers with tokens, on the judges of `cuda-agent serve`.

Imports `core`, `judge` and `agent`. A remote caller sends sources and gets verdicts; it chooses no setting of
the sandbox. Start with `jobs.py`; the routes are in `app.py`, and their client is `judge/http_pool.py`.
`mcp_route.py` has the tools of coding agents and `kernelgym.py` the routes of KernelGYM.

The environment for trainers is apart: `environment.py` serves the sessions of `sessions.py` in OpenEnv's wire
form, and `client/` is a package of its own for the other side.
"""
