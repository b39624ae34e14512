"""The command `cuda-agent`, with one file per command or group of commands.

The files parse options, call functions of other packages, and print results. They may import all other
packages. Heavy libraries are imported only inside the commands that need them. Start with `main.py` and
`common.py`.
"""
