"""Build and run untrusted code in sandboxes, which are made with bubblewrap and seccomp.

Code of candidates and tasks runs in runners. These are processes that a zygote, a process that has loaded
torch already, forks on demand.

Of the project, this package imports only `core`. Other packages mainly use `runner_factory.RunnerFactory`,
`runner_process.Runner`, `build.Builder` and `preflight.check_isolation`. The code that runs inside the
sandbox is in `inside/`. Start reading with `runner_factory.py`.
"""
