"""What every other package uses.

Parameters, the kernel task, files with digests, errors, progress, telemetry.

Imports nothing else of this project. Start with `config.py` (all parameters) and `task.py` (what is made
faster).
"""
