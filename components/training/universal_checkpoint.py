"""Conversion of a ZeRO state to DeepSpeed's Universal Checkpoint, which any number of ranks can load.

Each rank writes its shard of the weights in float32 and of both moments of Adam. DeepSpeed's converter joins
the shards to a folder for each parameter, from which every rank of another number takes its own part.
"""

import contextlib
import io
import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from components.core.errors import UserError

# Folder of the shards within a state, and folder of the converted state.
SHARDS, UNIVERSAL = "state", "universal"


def convert(state: Path, out: Path) -> None:
    """Write the universal form of a state to the new folder `out`.

    `state` is the folder to which `DeepSpeedEngine.save` wrote the shards.
    """
    from deepspeed.checkpoint.ds_to_universal import main

    settings = Namespace(
        input_folder=str(state / SHARDS),
        output_folder=str(out / UNIVERSAL),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        # The version of the format, which the engine writes only with tensor parallelism.
        inject_missing_state=True,
    )
    # It prints its phases and shows progress bars.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(settings)


@contextlib.contextmanager
def converted(state: Path, *, writes: bool) -> Iterator[Path]:
    """Return a context that yields the folder of the universal form of the state in the folder `state`.

    `writes` must be True on rank 0 and False on all others. Rank 0 makes the folder at the beginning of the
    context and removes it at the end.
    """
    out = state.with_name(f".{state.name}.{UNIVERSAL}")
    try:
        if writes:
            shutil.rmtree(out, ignore_errors=True)
            try:
                convert(state, out)
            except OSError as error:
                raise UserError(
                    f"{state}: converting it for another number of ranks failed ({error}); free disk space, "
                    "or continue with as many ranks as before."
                ) from error
        yield out
    finally:
        if writes:
            shutil.rmtree(out, ignore_errors=True)
