"""The updates of an actor that bench_update.py compares: this project's, TRL's, and a plain loop."""

import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torch import Tensor, distributed
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from components.core.params import Params
from components.training.batches import Rollout
from components.training.engine import BETAS, DTYPES, DeepSpeedEngine
from components.training.losses import policy_loss_sum
from components.training.networks import Actor, load_policy
from components.training.ppo import Experience, update_actor

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


def spread(batch: Rollout, row: int, values: Tensor) -> Tensor:
    """Return the values [own tokens of the batch] of a row as [tokens of the row], 0 at other tokens."""
    spread_values = torch.zeros(len(batch.ids[row]))
    own = torch.from_numpy(batch.action_mask[row]).bool()
    spread_values[own] = values[batch.offsets[row] : batch.offsets[row + 1]]
    return spread_values


def ours(params: Params, folder: Path, batch: Rollout, experience: Experience, repeats: int) -> Measured:
    found, settings, ppo = Measured(params.device), params.engine, params.agentic
    policy = load_policy(folder, params)
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
