"""The command `cuda-agent`: parses options and prints results.

Imports every other package, and heavy libraries only inside the commands that need them. Start with `main.py`.
"""
