"""Build kernels/ exactly as the judge builds them; the compiler's words when it fails."""

from utils.ask import ask

if __name__ == "__main__":
    ask("compile")
