"""DeepSpeed: its import, its configuration, and the loading of models that ZeRO 3 divides among the ranks.

DeepSpeed is imported only when it is first needed, because the import takes seconds.
"""

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

from components.core import records, stage_params
from components.training.ranks import join_world


def drop_unsearchable_folders() -> None:
    """Remove from the variable PATH the folders in which this account has no permission to search.

    An account that `su NAME` started from root has root's PATH. A program that is not installed, such as the
    numactl that DeepSpeed looks for, would then raise PermissionError instead of FileNotFoundError, which
    DeepSpeed expects.
    """
    os.environ["PATH"] = os.pathsep.join(
        folder
        for folder in os.environ.get("PATH", os.defpath).split(os.pathsep)
        if os.access(folder or ".", os.X_OK, effective_ids=True)
    )


def import_deepspeed(device: records.Device) -> Any:
    """Import the module deepspeed and return it, set up to compute on `device`.

    DeepSpeed then logs only warnings and errors, to standard error, and does not compile its extension for
    communication on a CPU, which would take about a minute.
    """
    drop_unsearchable_folders()
    os.environ.setdefault("DS_ACCELERATOR", device)
    import deepspeed
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    if device == "cpu" and get_accelerator().device_name() != "cpu":
        # If another package (accelerate, for instance) has imported DeepSpeed before on a machine with a GPU,
        # DeepSpeed has chosen the GPU.
        set_accelerator(CPU_Accelerator())
    # On cpu DeepSpeed compiles a shared-memory all-reduce (about a minute) when it first communicates, unless
    # this table says that it cannot be built.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)  # below it, each engine logs its whole configuration
    for handler in logger.handlers:
        if type(handler) is logging.StreamHandler:
            handler.setStream(sys.stderr)
    return deepspeed


def discarded_prints() -> contextlib.redirect_stdout[io.StringIO]:
    """Return a context that discards what is printed, such as the memory use that DeepSpeed reports."""
    return contextlib.redirect_stdout(io.StringIO())


def deepspeed_config(
    settings: stage_params.Engine, *, gradient_clip: float = 0.0, bucket: int = 500_000_000
) -> dict[str, Any]:
    """Return the dictionary `config` of `deepspeed.initialize` for the parameters of the section `engine`.

    A step's gradient is scaled down to the norm `gradient_clip` if its norm is larger; 0 means no limit. At
    most `bucket` elements of gradients are summed over the ranks at once.
    """
    zero: dict[str, Any] = {
        "stage": settings.zero_stage,
        "overlap_comm": False,
        "reduce_bucket_size": bucket,
    }
    if settings.cpu_offload and settings.zero_stage > 0:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # Micro-batches are packed by tokens, so their number varies and `step` decides when a step ends.
        "managed_gradient_accumulation": False,
        # Set explicitly, because DeepSpeed's default is 1.0 from version 0.19.3 on and was off before.
        "gradient_clipping": gradient_clip,
        "bf16": {"enabled": settings.dtype == "bfloat16"},
        # DeepSpeed's default is the model's precision. In bfloat16 a sum ignores gradients of less than
        # 1/512 of it, and most are in a step of a hundred micro-batches.
        "data_types": {"grad_accum_dtype": "fp32"},
        "sequence_parallel_size": settings.sequence_parallel,
        "zero_optimization": zero,
        # torch's AdamW everywhere, because DeepSpeed would compile its own optimizer for the cpu.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


@contextlib.contextmanager
def sharded_loading(settings: stage_params.Engine, device: records.Device) -> Iterator[None]:
    """Return a context in which transformers divides the models that it loads among the ranks, under ZeRO 3.

    Every rank must enter it and load the same models. Rank 0 reads the files, one tensor at a time goes to
    all ranks, and each rank keeps its part. Below ZeRO 3, the context changes nothing.
    """
    if settings.zero_stage < 3:
        yield
        return
    join_world(device, settings)
    import_deepspeed(device)
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    config = HfDeepSpeedConfig(deepspeed_config(settings))  # transformers keeps only a weak reference to it
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del config
