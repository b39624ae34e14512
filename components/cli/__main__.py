"""Entry point of `python -m components.cli`, which is the same as the command `cuda-agent`."""

from components.cli.main import main

main()
