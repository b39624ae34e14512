"""Right answers of a small policy from scratch to tasks that it has not seen, without the judge.

    python tests/bench/cold_start_answers.py OUT [--tasks 100] [--profile smoke] [--set KEY=VALUE]

The cold start trains the policy for the cpu on demonstrations of one turn without mistakes, into the folder
OUT, or takes what an earlier call left there. Its most likely answers to composed tasks are built and
compared with torch: an answer is right if its error is at most 20 times that of torch in float32.
"""

import argparse
import collections
import itertools
import multiprocessing
import re
import subprocess
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))

from kernel_bench import is_right

from components.bootstrap.canonicalize import canonicalize
from components.bootstrap.cold_start import coldstart
from components.bootstrap.tokenizer import TURN_END, pieces
from components.core.config import resolve
from components.core.progress import Quiet
from components.training.fine_tuning import demonstrated_tasks

SETS = ("coldstart.multi_turn_share=0", "coldstart.wrong_share=0", "data.against=[]")
KERNEL = re.compile(r"<parameter=content>\n(.*)</parameter>", re.DOTALL)
BATCH, MOST_TOKENS, TEST_SEED = 20, 1000, 77


def compare(code: str, kernel: str) -> None:
    """End this process with 0 if the kernel computes the task, 1 if not, and 2 if it does not build."""
    try:
        sys.exit(not is_right(code, kernel))
    except subprocess.CalledProcessError:
        sys.exit(2)


def outcome(code: str, answer: str) -> str:
    """Return right, wrong, crashed, not built or no kernel."""
    kernel = KERNEL.search(answer)
    if kernel is None:
        return "no kernel"
    # A wrong kernel may crash its process.
    process = multiprocessing.Process(target=compare, args=(code, kernel[1]))
    process.start()
    process.join()
    return {0: "right", 1: "wrong", 2: "not built"}.get(process.exitcode or 0, "crashed")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--profile", default="smoke")
    parser.add_argument("--set", action="append", default=[], dest="sets")
    asked = parser.parse_args()
    params = resolve(asked.profile, (*SETS, *asked.sets)).params
    checkpoint = asked.out / "checkpoint"
    if not checkpoint.exists():
        sources = demonstrated_tasks(params, params.coldstart.seed)
        coldstart(params, sources, checkpoint, dataset="", code="", progress=Quiet())
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(checkpoint).float().eval()
    tasks = list(itertools.islice(demonstrated_tasks(params, TEST_SEED), asked.tasks))
    found: collections.Counter[tuple[str, bool]] = collections.Counter()
    for group in (tasks[first : first + BATCH] for first in range(0, len(tasks), BATCH)):
        turns = [[{"role": "user", "content": canonicalize(task.code) or task.code}] for task in group]
        texts = [pieces([*turn, {"role": "assistant", "content": ""}])[0][0] for turn in turns]
        prompts = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
        ends = tokenizer.convert_tokens_to_ids(TURN_END)
        rows = model.generate(**prompts, max_new_tokens=MOST_TOKENS, do_sample=False, eos_token_id=ends)
        for task, row in zip(group, rows, strict=True):
            answer = tokenizer.decode(row[prompts["input_ids"].shape[1] :], skip_special_tokens=True)
            found[outcome(task.code, answer), len(task.ops) == 1] += 1
    for single, kind in ((True, "single operators"), (False, "chains")):
        counts = {name: count for (name, one), count in found.most_common() if one is single}
        print(
            f"{kind}: {sum(counts.values())}",
            *(f"{name} {count}" for name, count in counts.items()),
            sep=", ",
        )


if __name__ == "__main__":
    main()
