"""The rule-based kernel writer as a policy, by the real judge, on a suite that was never admitted before."""

from pathlib import Path

from typer.testing import CliRunner

from components.agent.trajectory import load_trajectories
from components.cli.main import app
from components.evaluation.results import load_evaluation

# As people write a task: a size and an argument with names, an attribute, a docstring, and one line.
NAMED = '''
import torch
import torch.nn as nn

class Model(nn.Module):
    """Model that performs a linear layer, a division and a softmax."""
    def __init__(self, in_features, out_features, divisor):
        super(Model, self).__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.divisor = divisor
        self.act = nn.LeakyReLU(negative_slope=0.2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = self.gemm(inputs)
        inputs = inputs / self.divisor
        inputs = self.act(inputs)
        return torch.softmax(inputs, dim=1)

batch_size = 60
in_features = 2 ** 6
divisor = 2.5

def get_inputs():
    return [torch.rand(batch_size, in_features)]

def get_init_inputs():
    return [in_features, 70, divisor]
'''
UNKNOWN = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        return torch.fft.rfft(x).abs()

def get_inputs():
    return [torch.rand(64, 256)]

def get_init_inputs():
    return []
"""


def test_kernels_by_rules_solve_a_suite_that_has_no_evidence(tmp_path: Path) -> None:
    suite = tmp_path / "suite"
    suite.mkdir()
    (suite / "a_named.py").write_text(NAMED)
    (suite / "b_unknown.py").write_text(UNKNOWN)
    words = ["evaluate", "--profile", "ci", "--policy", "rules", "--suite", str(suite)]
    words += ["--home", str(tmp_path / "home"), "--set", "evaluation.max_turns=3"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    (folder,) = (tmp_path / "home" / "evaluations").iterdir()
    known, unknown = load_evaluation(folder).tasks
    assert known.status == "correct" and known.speedup.eager is not None
    assert unknown.status != "correct"
    trajectories = load_trajectories(folder / "episodes" / "0000")
    turns, verdicts = trajectories[0].turns, trajectories[0].verdicts
    assert [len(turn.calls) for turn in turns] == [2, 2, 1] and trajectories[-1].finish_reason == "stop"
    speeds = [verdict.speedup.eager.estimate for verdict in verdicts if verdict.speedup.eager is not None]
    assert len(speeds) == 3 and speeds[2] == max(speeds[:2]), "the last turn writes the fastest again"
