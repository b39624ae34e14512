"""Build kernels/ exactly as the judge builds them, and print the compiler's errors if that fails."""

from utils.ask import ask

if __name__ == "__main__":
    ask("compile")
