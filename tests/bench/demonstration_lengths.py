"""How long demonstrations are, and how many of their integers a language model can copy from the task.

    python tests/bench/demonstration_lengths.py [--count 150] [--profile smollm2] [--set KEY=VALUE]

Prints quantiles of the tokens of a whole demonstration and of one answer, by the tokenizer of
`policy.source`, and the share of the integers in kernels that a policy can copy from the task's source. The
integers 0 to 4, and block sizes and what rounds up to them, count as copied.
"""

import argparse
import itertools
import random
import re
from pathlib import Path

from transformers import AutoTokenizer

from components.bootstrap.demonstrations import make_demonstration
from components.core.config import load_arguments, resolve
from components.training.fine_tuning import demonstrated_tasks, encode

QUANTILES = (0.1, 0.5, 0.9, 0.99)
INTEGER = re.compile(r"(?<![\w.])\d+(?![\w.])")
KNOWN = {"0", "1", "2", "3", "4", "127", "128", "255", "256", "511", "512"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--profile", default="smollm2")
    parser.add_argument("--set", action="append", default=[], dest="sets")
    asked = parser.parse_args()
    params, rng = resolve(asked.profile, tuple(asked.sets)).params, random.Random(asked.seed)
    tokenizer = AutoTokenizer.from_pretrained(**load_arguments(Path(params.policy.source)))
    tasks = itertools.islice(demonstrated_tasks(params, asked.seed), asked.count)
    conversations = [make_demonstration(task, rng, params.coldstart, params.device) for task in tasks]
    answers = [
        (source["content"], turn["content"])
        for source, *turns in conversations
        for turn in turns
        if "KERNEL(" in turn["content"] and turn["role"] == "assistant"
    ]
    lengths = {
        "a demonstration": [len(ids) for ids, _ in encode(params, tokenizer, conversations)],
        "an answer": [len(tokenizer(answer)["input_ids"]) for _, answer in answers],
    }
    for name, values in lengths.items():
        values.sort()
        quantiles = ", ".join(f"{int(100 * q)} %: {values[int(q * len(values))]}" for q in QUANTILES)
        print(f"tokens of {name}: {quantiles}, at most {values[-1]}")
    copied = [
        number in KNOWN or number in INTEGER.findall(source)
        for source, answer in answers
        for number in INTEGER.findall(answer)
    ]
    print(f"integers of answers that stand in the source: {sum(copied) / len(copied):.1%} of {len(copied)}")


if __name__ == "__main__":
    main()
