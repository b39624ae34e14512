"""The command `cuda-agent`: one file per command parses options and prints results, and decides nothing.

Imports every other package, and heavy libraries only inside the commands that need them. Start with `main.py`
and `common.py`.
"""
