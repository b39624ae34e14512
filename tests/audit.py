"""An audit of a data set that shares no code with the project: pandas, torch and the standard library only.

    python tests/audit.py TASKS.parquet [--against FOLDER] [--device cuda] [--mix '{"torch#1": 0.1, ...}']

Prints one JSON object: rows by fault. Sources are executed here, so audit only sets that this project
composed.
"""

import argparse
import io
import json
import re
import tokenize
from pathlib import Path

import pandas
import torch

PLAIN = {
    # Names of the small operator table that are no names of torch, and how each looks in a source.
    "sqrt_abs": r"sqrt\(torch\.abs", "log1p_abs": r"log1p\(torch\.abs",
    "mul_constant": r"x \* -?[\d.]+", "add_constant": r"x \+ -?[\d.]+",
    "scale": r"x \* self\.scale", "shift": r"x \+ self\.shift",
    "add_input": r"x \+ y", "mul_input": r"x \* y",
    "avg_pool": r"F\.avg_pool1d\(x, [248]\)", "max_pool": r"F\.max_pool1d\(x, [248]\)",
    "transpose": r"x\.t\(\)\.contiguous\(\)",
    **{f"{name}_dim0": rf"\.{name}\(x, dim=0[,)]"
       for name in ("softmax", "normalize", "sum", "mean", "amax", "logsumexp", "cumsum")},
}  # fmt: skip


def words(code: str) -> list[str]:
    """Return the tokens without comments, layout and docstrings."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    return [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(code).readline)
        if token.type not in skipped and not token.string.startswith('"""')
    ]


def shingles(code: str, numbers: bool) -> set[tuple[str, ...]]:
    """Return the runs of five words of the model, with numbers erased unless asked for."""
    start = code.find("class Model")
    text = words(code[start : code.find("def get_inputs")])
    text = text if numbers else ["0" if re.fullmatch(r"[\d.e+-]+", word) else word for word in text]
    return {tuple(text[i : i + 5]) for i in range(len(text) - 4)}


def mislabelled(ops: list[str], source: str, code: str) -> bool:
    if source.startswith("torch#") and int(source.removeprefix("torch#")) != len(ops):
        return True
    flat = re.sub(r"[^a-z0-9]", " ", code.lower().replace("_", "")).split()
    return not all(
        (
            re.search(PLAIN[name], code)
            if name in PLAIN
            else name.rpartition(".")[2].replace("_", "").lower() in flat
        )
        for name in ops
    )


def inert(code: str, device: str = "cpu") -> str:
    """Return why a task is inert: its output is constant, or independent of an input or parameter."""
    scope: dict = {"__name__": "audited"}
    exec(code, scope)
    torch.manual_seed(0)
    with torch.device(device):
        model = scope["Model"](*scope["get_init_inputs"]()).eval()
        inputs, others = scope["get_inputs"](), scope["get_inputs"]()
    with torch.no_grad():
        out = model(*inputs)
        if out.std() <= 1e-3 * out.abs().mean():
            return "constant"
        for place, other in enumerate(others):
            if (
                isinstance(other, torch.Tensor)
                and other.is_floating_point()
                and torch.equal(model(*inputs[:place], other, *inputs[place + 1 :]), out)
            ):
                return "independent"
        for parameter in model.parameters():
            kept = parameter.clone()
            parameter.mul_(1.3).add_(torch.randn_like(parameter) * 0.1)
            if torch.equal(model(*inputs), out):
                return "independent"
            parameter.copy_(kept)
    return ""


def audit(path: Path, against: list[Path], mix: dict[str, float], device: str = "cpu") -> dict[str, object]:
    frame = pandas.read_parquet(path)
    programs = [
        shingles(file.read_text(), numbers=False) for folder in against for file in folder.rglob("*.py")
    ]
    near = 0
    for code in frame["code"]:
        own = shingles(code, numbers=False)
        near += any(2 * len(own & other) / max(len(own) + len(other), 1) > 0.9 for other in programs)
    shares = frame["data_source"].value_counts(normalize=True).to_dict()
    faults = [inert(code, device) for code in frame["code"]]
    trained = {
        tuple(ops) for ops, split in zip(frame["ops"], frame["split"], strict=True) if split == "train"
    }
    return {
        "rows": len(frame),
        "duplicates": len(frame) - len({tuple(words(code)) for code in frame["code"]}),
        "mislabelled": sum(
            mislabelled(list(ops), source, code)
            for ops, source, code in zip(frame["ops"], frame["data_source"], frame["code"], strict=True)
        ),
        "similar": near,
        "constant": faults.count("constant"),
        "independent": faults.count("independent"),
        "held_out_trained_on": sum(
            tuple(ops) in trained
            for ops, split in zip(frame["ops"], frame["split"], strict=True)
            if split == "held_out"
        ),
        "mix_error": max((abs(shares.get(kind, 0) - share) for kind, share in mix.items()), default=0.0),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", type=Path)
    parser.add_argument("--against", type=Path, action="append", default=[])
    parser.add_argument("--mix", type=json.loads, default={})
    parser.add_argument("--device", default="cpu", help="where the tasks run")
    options = parser.parse_args()
    print(json.dumps(audit(options.tasks, options.against, options.mix, options.device)))
