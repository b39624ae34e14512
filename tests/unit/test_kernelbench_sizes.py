"""The script that measures KernelBench's tasks, and the file that it wrote."""

import json
from collections import Counter
from pathlib import Path

import pytest
from data import kernelbench_sizes

FILE = Path(kernelbench_sizes.__file__).with_suffix(".json")
TASK = """
import torch

class Model(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = torch.nn.Linear(size, size)

    def forward(self, x, factor):
        return torch.relu(self.linear(x)) * factor

def get_inputs():
    return [torch.rand(1 << 30, 4), 2.0]

def get_init_inputs():
    return [4]
"""


def test_peak_counts_inputs_state_and_two_intermediate_results():
    size = 16 << 30
    assert kernelbench_sizes.measured(TASK) == {
        "inputs": [([1 << 30, 4], "float32"), 2.0],
        "outputs": [([1 << 30, 4], "float32")],
        "state_bytes": 80,
        "state_tensors": 2,
        "parameters": 2,
        "peak_bytes": 3 * size + 80,
        "float64_peak_bytes": 6 * size + 160,
    }


def test_file_has_every_task_once():
    tasks = json.loads(FILE.read_text())["tasks"]
    assert Counter(task["level"] for task in tasks) == {1: 100, 2: 100, 3: 50, 4: 20}
    assert len({(task["level"], task["problem"]) for task in tasks}) == len(tasks)


@pytest.mark.parametrize("field", ["peak_bytes", "float64_peak_bytes"])
def test_peaks_hold_at_least_the_state(field):
    for task in json.loads(FILE.read_text())["tasks"]:
        assert task[field] > task["state_bytes"], task["name"]
