"""`python -m components.cli` is the command `cuda-agent`."""

from components.cli.main import main

main()
