"""Check model_new.py against model.py on secret inputs, in the judge's sandbox."""

from utils.ask import ask

if __name__ == "__main__":
    ask("verification")
