"""Build kernels/ exactly as the judge builds them; the compiler's words when it fails."""

from components.agent.commands import compile

if __name__ == "__main__":
    compile()
