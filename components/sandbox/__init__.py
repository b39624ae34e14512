"""This package builds and runs untrusted code in sandboxes, which it makes with bubblewrap and seccomp.

Code of candidates and tasks runs in runners. These are processes that a zygote, a process that has loaded
torch already, forks on demand.

This package imports only `core`. Other packages use `runner_factory.RunnerFactory`, `build.Builder`,
`isolation` and `preflight.check_isolation`. The code that runs inside the sandbox is in `inside/`. Start
reading with `runner_factory.py`.
"""
