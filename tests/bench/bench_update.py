"""Tokens per second and memory of a PPO update of the actor, beside TRL's update in the same run.

    python tests/bench/bench_update.py [--model smoke] [--profile smoke] [--device cpu] [--rows 96] \
        [--longest 512] [--repeats 3] [--against trl] [--set KEY=VALUE]
    torchrun --nproc-per-node N tests/bench/bench_update.py ...

Both start from the same random weights in a folder and train on the same rows of uneven length, prompts,
turns and observations, in the same number of optimizer steps. A third of the tokens are the policy's own.

- This project: update_actor under DeepSpeed with the engine's settings (`--set engine.KEY=VALUE`).
- `--against trl`: TRL's GRPOTrainer, which is not a dependency of the project. Its `train` runs with its own
  loss, log-probabilities, gradient accumulation and optimizer; instead of generating, it is given the rows.
  As in TRL, prompts are padded on the left and completions on the right, to the longest of all rows of the
  rank, and observations are masked with `tool_mask`. As many rows are in a micro-batch as padded rows fit
  into engine.tokens_per_microbatch. Weights are in float32, computed in the engine's precision by autocast,
  TRL's default. Several ranks are data parallel.
- `--against plain`, or if TRL cannot be imported: a loop over padded rows with the logits of every position
  and torch's AdamW.

Counted are tokens that are no padding. Seconds are CPU seconds of one thread for one rank on cpu (wall time
on a shared machine says little), and wall time otherwise. Memory is the largest use of a rank's GPU in the
updates by torch's allocator. Each way's first update warms up and is not counted. Printed is also the loss
of this first update, which differs between the ways only by rounding if there is one minibatch.
"""

import argparse
import gc
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# TRL's modules ask a server at start unless they are told to be offline.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))

import torch
from public_models import SHAPES, configuration, peak_flops, training_flops
from tokenizers import Tokenizer, models
from torch import Tensor, distributed
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from components.bootstrap.cold_start import new_model
from components.core.config import resolve
from components.core.params import Params
from components.training.batches import Rollout, make_batch
from components.training.engine import BETAS, DTYPES, DeepSpeedEngine
from components.training.losses import policy_loss_sum
from components.training.networks import Actor, load_policy
from components.training.ppo import Experience, update_actor
from components.training.ranks import sharded_loading

LEARNING_RATE = 1e-6


@dataclass
class Measured:
    """Times of a way's updates after the first one, its largest memory and its first loss."""

    device: str
    seconds: list[float] = field(default_factory=list)
    peak: float = 0.0
    loss: float = 0.0
    begun: float = 0.0
    updates: int = 0

    def clock(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.process_time() if self.device == "cpu" and ranks() == 1 else time.perf_counter()

    def begin(self) -> None:
        if self.updates == 1 and self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.begun = self.clock()

    def end(self) -> None:
        if self.updates:
            self.seconds.append(self.clock() - self.begun)
        self.updates += 1
        if self.device == "cuda":
            self.peak = float(torch.cuda.max_memory_allocated())


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def make_rows(vocabulary: int, rows: int, longest: int) -> tuple[Rollout, Experience]:
    """Draw turns and observations; lengths from a tenth of `longest` to `longest`, short ones more often."""
    source = random.Random(0)
    examples = []
    for _ in range(rows):
        length = int(longest * (0.1 + 0.9 * source.random() ** 2))
        mask = [0] * (length // 3)
        while len(mask) < length:
            mask += [1] * source.randint(20, 60) + [0] * source.randint(40, 120)
        examples.append(([source.randrange(3, vocabulary) for _ in range(length)], mask[:length]))
    batch = make_batch(examples)
    noise = torch.Generator().manual_seed(0)
    # About the log-probability of every token for random weights, so that few ratios are clipped.
    logprob = -torch.tensor(float(vocabulary)).log() + 0.1 * torch.randn(batch.tokens, generator=noise)
    zeros = torch.zeros(batch.tokens)
    experience = Experience(
        old_logprob=logprob,
        reference_logprob=zeros,
        old_values=zeros,
        advantages=torch.randn(batch.tokens, generator=noise),
        returns=zeros,
        importance=torch.ones(batch.tokens),
        best=torch.zeros(batch.tokens, dtype=torch.bool),
    )
    return Rollout(**vars(batch), sampler_logprob=logprob, rewards=torch.zeros(rows)), experience


def spread(batch: Rollout, row: int, values: Tensor) -> Tensor:
    """Return the values [own tokens of the batch] of a row as [tokens of the row], 0 at other tokens."""
    spread_values = torch.zeros(len(batch.ids[row]))
    own = torch.from_numpy(batch.action_mask[row]).bool()
    spread_values[own] = values[batch.offsets[row] : batch.offsets[row + 1]]
    return spread_values


def ours(params: Params, folder: Path, batch: Rollout, experience: Experience, repeats: int) -> Measured:
    found, settings, ppo = Measured(params.device), params.engine, params.agentic
    with sharded_loading(settings, params.device):
        policy = load_policy(folder, settings, params.policy.adapter, DTYPES[settings.dtype])
    engine = DeepSpeedEngine(
        Actor(policy, 1.0), settings, device=params.device, gradient_clip=ppo.gradient_clip
    )
    for _ in range(repeats + 1):
        found.begin()
        figures = update_actor(batch, experience, engine, ppo, 0, 100)
        found.end()
        found.loss = found.loss or figures["policy_loss"]
    return found


def grpo_trainer(
    params: Params, folder: Path, batch: Rollout, experience: Experience, repeats: int
) -> Measured:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import pad

    found, ppo, adapter = Measured(params.device), params.agentic, params.policy.adapter
    target = torch.device("cpu" if params.device == "cpu" else "cuda")
    # Every rank has the same number of rows in every optimizer step.
    parts = [
        list(range(len(batch.ids)))[part :: ppo.minibatches][rank() :: ranks()]
        for part in range(ppo.minibatches)
    ]
    local = [row for part in parts for row in part]
    prompts = {row: int(batch.action_mask[row].argmax()) for row in local}
    width = max(prompts.values()) + max(len(batch.ids[row]) - prompts[row] for row in local)
    per_device = max(1, params.engine.tokens_per_microbatch // width)
    count = -(-len(parts[0]) // per_device)

    def column(values: list[Tensor], side: str) -> Tensor:
        return pad(values, padding_value=0, padding_side=side)

    ids = {row: torch.from_numpy(batch.ids[row]).long() for row in local}
    columns: dict[str, Tensor] = {
        "prompt_ids": column([ids[row][: prompts[row]] for row in local], "left"),
        "prompt_mask": column([torch.ones(prompts[row], dtype=torch.long) for row in local], "left"),
        "completion_ids": column([ids[row][prompts[row] :] for row in local], "right"),
        "completion_mask": column([torch.ones_like(ids[row][prompts[row] :]) for row in local], "right"),
        "tool_mask": column(
            [torch.from_numpy(batch.action_mask[row]).long()[prompts[row] :] for row in local], "right"
        ),
    }
    for name, stream in (("old_per_token_logps", "old_logprob"), ("advantages", "advantages")):
        values = getattr(experience, stream)
        columns[name] = column([spread(batch, row, values)[prompts[row] :] for row in local], "right")
    microbatches = [
        slice(len(parts[0]) * part + first, len(parts[0]) * part + min(first + per_device, len(parts[0])))
        for part in range(ppo.minibatches)
        for first in range(0, len(parts[0]), per_device)
    ]

    class Trainer(GRPOTrainer):
        def get_train_dataloader(self) -> Any:
            numbers = torch.utils.data.TensorDataset(torch.arange(len(microbatches)))
            return torch.utils.data.DataLoader(
                numbers, batch_size=1, collate_fn=lambda rows: {"number": int(rows[0][0])}
            )

        def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
            rows = microbatches[generation_batch["number"]]
            inputs = {name: values[rows].to(target) for name, values in columns.items()}
            return inputs | {"num_items_in_batch": torch.tensor(float(batch.tokens), device=target)}

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
            if found.updates == 0:
                found.loss += float(loss) / ppo.minibatches
            return loss

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % ppo.minibatches == 0:
                found.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % ppo.minibatches == 0:
                found.end()

    peft_config = None
    if adapter.rank:
        from peft import LoraConfig

        peft_config = LoraConfig(
            r=adapter.rank, lora_alpha=adapter.alpha, target_modules=adapter.targets or "all-linear"
        )
    is_bf16 = params.engine.dtype == "bfloat16"
    dtype = torch.bfloat16 if is_bf16 and adapter.rank else torch.float32
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    with tempfile.TemporaryDirectory() as out:
        trainer = Trainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa"),
            reward_funcs=[lambda **kwargs: []],
            processing_class=tokenizer,
            peft_config=peft_config,
            train_dataset=Dataset.from_dict({"prompt": [""] * len(microbatches)}),
            callbacks=[Clock()],
            args=GRPOConfig(
                output_dir=out,
                use_cpu=params.device == "cpu",
                bf16=is_bf16,
                gradient_checkpointing=params.engine.activation_checkpointing,
                per_device_train_batch_size=per_device,
                gradient_accumulation_steps=count,
                steps_per_generation=count * ppo.minibatches,
                num_generations=per_device * count * ppo.minibatches * ranks(),
                max_steps=(repeats + 1) * ppo.minibatches,
                beta=0.0,
                temperature=1.0,
                epsilon=ppo.clip_low,
                epsilon_high=ppo.clip_high,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                adam_beta1=BETAS[0],
                adam_beta2=BETAS[1],
                weight_decay=0.0,
                max_grad_norm=ppo.gradient_clip,
                disable_tqdm=True,
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
            ),
        )
        trainer.train()
    trainer.accelerator.free_memory()
    if ranks() > 1:
        total = torch.tensor(found.loss, device=target)
        distributed.all_reduce(total)
        found.loss = float(total) / ranks()
    return found


def plain(params: Params, folder: Path, batch: Rollout, experience: Experience, repeats: int) -> Measured:
    found, ppo, settings = Measured(params.device), params.agentic, params.engine
    device = torch.device("cpu" if params.device == "cpu" else "cuda")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[settings.dtype]).to(device)
    if settings.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0)
    every, width = range(len(batch.ids)), max(batch.lengths)
    per_device = max(1, settings.tokens_per_microbatch // width)

    def padded(values: list[Tensor]) -> Tensor:
        return torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in values])

    ids = padded([torch.from_numpy(batch.ids[row]).long() for row in every])
    masks = padded([torch.from_numpy(batch.action_mask[row]) for row in every])
    old = padded([spread(batch, row, experience.old_logprob) for row in every])
    advantages = padded([spread(batch, row, experience.advantages) for row in every])

    def update() -> float:
        model.train()
        sums = 0.0
        for part in range(ppo.minibatches):
            rows = list(every)[part :: ppo.minibatches]
            tokens = masks[rows].sum()
            optimizer.zero_grad()
            for first in range(0, len(rows), per_device):
                some = rows[first : first + per_device]
                chosen, mask, old_logprob, advantage = (
                    values[some].to(device) for values in (ids, masks, old, advantages)
                )
                logits: Tensor = model(input_ids=chosen, use_cache=False).logits
                logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
                logprob = torch.nn.functional.pad(logprobs.gather(-1, chosen[:, 1:, None])[..., 0], (1, 0))
                loss, _ = policy_loss_sum(logprob, old_logprob, advantage, mask, ppo.clip_low, ppo.clip_high)
                (loss / tokens).backward()
                sums += float(loss.detach())
            torch.nn.utils.clip_grad_norm_(model.parameters(), ppo.gradient_clip)
            optimizer.step()
        return sums / batch.tokens

    for repeat in range(repeats + 1):
        found.begin()
        loss = update()
        found.end()
        found.loss = found.loss if repeat else loss
    return found


def shared_folder() -> Path:
    """Return a new folder that all ranks know."""
    names = [tempfile.mkdtemp(prefix="bench-update-") if rank() == 0 else ""]
    if ranks() > 1:
        distributed.broadcast_object_list(names)
    return Path(names[0])


def save_model(params: Params, name: str, folder: Path) -> Qwen3Config:
    """Write random weights of a public model, or of the profile's policy, and return the configuration."""
    smoke = new_model(params, params.policy.vocabulary) if name == "smoke" else None
    config = smoke.config if smoke else configuration(name)
    if rank() == 0:
        torch.manual_seed(0)
        with torch.device(params.device):
            model = smoke or AutoModelForCausalLM.from_config(config, dtype=DTYPES[params.engine.dtype])
        model.save_pretrained(folder)
    if ranks() > 1:
        distributed.barrier()
    return config


def alternative(name: str) -> tuple[str, Callable[..., Measured]]:
    """Return name and function of what this project is compared with."""
    if name == "trl":
        try:
            import trl

            assert trl.GRPOTrainer  # imported only now
            return f"TRL {trl.__version__}, GRPOTrainer", grpo_trainer
        except ImportError as error:
            if rank() == 0:
                print(f"TRL cannot be imported, so this compares with a plain loop: {error}", flush=True)
    return "plain loop over padded rows", plain


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smoke", choices=["smoke", *SHAPES])
    parser.add_argument("--profile", default="smoke")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--against", default="trl", choices=["trl", "plain", "nothing"])
    parser.add_argument("--set", dest="sets", action="append", default=[])
    options = parser.parse_args()
    params = resolve(options.profile, (f"device={options.device}", *options.sets)).params
    one_pass = {"epochs": 1, "learning_rate": LEARNING_RATE, "learning_rate_warmup_steps": 0}
    params = params.model_copy(update={"agentic": params.agentic.model_copy(update=one_pass)})
    if options.rows % (params.agentic.minibatches * ranks()):
        parser.error(
            f"--rows must be a multiple of {params.agentic.minibatches} minibatches x {ranks()} ranks"
        )
    if options.device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if ranks() > 1:
        distributed.init_process_group("gloo" if options.device == "cpu" else "nccl")
    name, other = alternative(options.against)
    if ranks() > 1 and other is plain and options.against != "nothing":
        parser.error("the plain loop has one rank; take --against nothing")
    folder = shared_folder()
    try:
        config = save_model(params, options.model, folder)
        batch, experience = make_rows(config.vocab_size, options.rows, options.longest)
        # The other way goes first: this project's engine makes a process group, which TRL would take for a
        # launch with several ranks.
        ways: dict[str, Callable[..., Measured]] = {} if options.against == "nothing" else {name: other}
        ways["this project"] = ours
        found = {}
        for way, measure in ways.items():
            gc.collect()
            before = 0
            if options.device == "cuda":
                torch.cuda.empty_cache()
                before = torch.cuda.memory_allocated()
            found[way] = measure(params, folder, batch, experience, options.repeats)
            found[way].peak -= before
    finally:
        if ranks() > 1:
            distributed.barrier()
        if rank() == 0:
            shutil.rmtree(folder)
    report(params, config, batch, found)
    sys.stdout.flush()
    sys.stderr.flush()
    # ZeRO 3 sometimes aborts when the interpreter ends ("terminate called without an active exception").
    os._exit(0)


def report(params: Params, config: Qwen3Config, batch: Rollout, found: dict[str, Measured]) -> None:
    device = torch.device(params.device if params.device == "cpu" else "cuda")
    for measured in found.values():
        largest = torch.tensor([measured.peak, *measured.seconds], dtype=torch.float64).to(device)
        if ranks() > 1:
            distributed.all_reduce(largest, distributed.ReduceOp.MAX)
        measured.peak, *measured.seconds = largest.tolist()
    if rank():
        return
    tokens, is_frozen = sum(batch.lengths), params.policy.adapter.rank > 0
    flops, with_attention = training_flops(config, batch.lengths, batch.tokens, is_frozen)
    peak = peak_flops() if params.device == "cuda" else None
    print(
        f"{len(batch.lengths)} rows, {tokens} tokens, {batch.tokens} own, longest {max(batch.lengths)}; "
        f"{ranks()} rank{'s' * (ranks() > 1)}, {params.engine.dtype}, "
        f"{torch.cuda.get_device_name() if params.device == 'cuda' else 'cpu'}"
    )
    seconds = {name: statistics.median(measured.seconds) for name, measured in found.items()}
    for name, measured in found.items():
        line = f"{name:28} {tokens / seconds[name]:10.0f} tokens/s  loss {measured.loss:9.6f}"
        if params.device == "cuda":
            line += f"  peak {measured.peak / 1e9:6.1f} GB"
        if peak:
            shares = [100 * count / seconds[name] / peak / ranks() for count in (flops, with_attention)]
            line += f"  {shares[0]:4.1f} % of the peak by {4 if is_frozen else 6}N"
            line += f" ({shares[1]:4.1f} % with attention)"
        ratio = seconds[name] / seconds["this project"]
        print(line + ("" if name == "this project" else f"  this project is {ratio:5.2f} times as fast"))
    if peak:
        print(
            f"{4 if is_frozen else 6}N counts each parameter of the layers for each token, and each of the "
            "output head for each own token; no padding, no recomputed activations"
        )


if __name__ == "__main__":
    main()
