"""Check model_new.py against model.py on secret inputs, in the judge's sandbox."""

from components.agent.commands import verification

if __name__ == "__main__":
    verification()
