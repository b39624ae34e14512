"""Time eager, torch.compile and model_new.py side by side, with the judge's clock."""

from utils.ask import ask

if __name__ == "__main__":
    ask("profiling")
