"""The disk space that a training stage needs, which is checked before the stage begins."""

import json
import math
import shutil
from pathlib import Path

from components.core.errors import UserError
from components.training.stage import Stage

# Bytes that a resumable state takes for each trained parameter, by engine.dtype: the weight in this dtype,
# and in float32 the optimizer's copy of the weight and its two moments.
STATE_BYTES = {"float32": 16, "bfloat16": 14}
# Bytes of a weight, by engine.dtype.
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}
# Number of states of a stage on disk at once: two are kept while the next is written (training_loop.py).
STATES = 3


def count_parameters(checkpoint: Path) -> int:
    """Return the number of parameters in the safetensors files of a checkpoint, read from their headers."""
    total = 0
    for path in checkpoint.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total


def needed_bytes(stage: Stage) -> int:
    """Return the number of bytes that the stage's resumable states and its checkpoint will take on disk."""
    params, dtype = stage.params, stage.params.engine.dtype
    ppo = {"warmup": params.warmup, "agentic": params.agentic}.get(stage.name)
    networks = 2 if ppo is not None and ppo.advantages == "critic" else 1
    states = max(STATES, params.critic.epochs + 1) if stage.name == "critic" else STATES
    # With an adapter, nearly all parameters are frozen: they have no optimizer state.
    state_bytes = WEIGHT_BYTES[dtype] if params.policy.adapter.rank else STATE_BYTES[dtype]
    each = states * networks * state_bytes + WEIGHT_BYTES[dtype]
    return count_parameters(stage.actor) * each


def check_disk_space(stage: Stage) -> None:
    """Raise UserError, with the needed and the free bytes, if the disk of `stage.out` has too little space.

    Bytes of states that the stage has written already count as available.
    """
    place = next(folder for folder in (stage.out, *stage.out.absolute().parents) if folder.is_dir())
    there = sum(path.stat().st_size for path in (stage.out / "state").rglob("*") if path.is_file())
    needed, free = max(0, needed_bytes(stage) - there), shutil.disk_usage(place).free
    if free < needed:
        raise UserError(
            f"{stage.out}: stage {stage.name} needs {needed:,} bytes for its states and its checkpoint, and "
            f"{free:,} are free; free some space (cuda-agent store gc), or give another folder with --home."
        )
