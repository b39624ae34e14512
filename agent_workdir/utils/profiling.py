"""Time eager, torch.compile and model_new.py side by side, with the judge's clock."""

from components.agent.commands import profiling

if __name__ == "__main__":
    profiling()
