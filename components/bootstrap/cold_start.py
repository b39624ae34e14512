"""Train a tokenizer and a small Qwen3 from scratch on demonstrations, which is called the cold start.

Demonstrations are conversations that are written by rules. The model learns to predict the assistant's tokens
of the demonstrations. Muon trains the matrices, AdamW the other parameters. On a cpu with several cores a
second process computes half of every step's micro-batches, and the processes sum their gradients with gloo.
The training state is stored on disk, so a killed run continues and gives the same numbers as an uninterrupted
one.
"""

import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]  # not in its stubs
from torch.multiprocessing import get_context
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from components.bootstrap.corpus import MICROBATCHES, Corpus, load_corpus, make_corpus, plan_batches
from components.core.errors import StageFailed
from components.core.files import atomic_write, digest_json
from components.core.params import Params
from components.core.progress import Progress, Quiet
from components.core.task import KernelTask
from components.policy.checkpoint import Manifest, save_checkpoint

# Minimum time between two saves of the training state.
SAVE_SECONDS = 60.0
# Share of the steps in which the learning rate rises.
WARMUP_SHARE = 0.05
# Longest time that the first process waits for the second one.
TIMEOUT = timedelta(minutes=10)
# Longest time that the second process waits for the first one, which makes the corpus.
CORPUS_TIMEOUT = timedelta(days=1)
# Number of iterations of Muon.
ITERATIONS = 5
MOMENTUM = 0.95
EPSILON = 1e-7


def orthogonal(matrix: Tensor) -> Tensor:
    """Return `matrix` [rows, columns] with its singular values replaced by values of about 1 (0.7 to 1.2).

    The result is computed with five quintic Newton-Schulz iterations.
    """
    a, b, c = 3.4445, -4.7750, 2.0315  # Coefficients of the polynomial of an iteration.
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=EPSILON)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """The optimizer Muon for matrices, computed in float32.

    Its steps are the orthogonalised Nesterov momentum times a learning rate, which is larger for matrices
    with more rows than columns. It uses the same formulas, constants and state as torch.optim.Muon (Jordan,
    "Muon: an optimizer for hidden layers", 2024), without weight decay. torch's version is not used, because
    it orthogonalises in bfloat16, which is many times slower than float32 on a CPU without bfloat16
    instructions.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float):
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the matrices with their gradients. `closure` is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 - MOMENTUM)
                rows, columns = parameter.shape
                rate = group["lr"] * math.sqrt(max(1, rows / columns))
                parameter.add_(orthogonal(parameter.grad.lerp(momentum, MOMENTUM)), alpha=-rate)


def coldstart(
    params: Params, sources: Iterator[KernelTask], out: Path, *, dataset: str, code: str, progress: Progress
) -> Manifest:
    """Train a policy from scratch on demonstrations for `sources` and save it as the checkpoint `out`.

    Demonstrations are conversations that are written by rules for the tasks `sources`. `dataset` and `code`
    are versions that the checkpoint's manifest, which is returned, records. While the training runs, its
    corpus, weights and optimizer state are stored in the folder `state` in the parent folder of `out`. If a
    call that was interrupted left this folder, the next call continues from it, provided that the parameters
    of device, policy and cold start, `dataset` and `code` are the same; otherwise the folder is deleted
    first. The folder is removed at the end. On a cpu with several cores, a second process that this function
    starts computes half of every step. Raises StageFailed if that process ends too early, and UserError if
    `sources` has too few tasks or no demonstration fits into the context window.
    """
    state = out.parent / "state"
    settings = params.model_dump(include={"device", "policy", "coldstart"})
    key = digest_json([settings, dataset, code])
    if not (state / "key").is_file() or (state / "key").read_text() != key:
        shutil.rmtree(state, ignore_errors=True)
        atomic_write(state / "key", key)
    count = min(2, os.cpu_count() or 1) if params.device == "cpu" else 1
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = get_context("spawn").Process(target=_second_rank, args=(store.port, params, state), daemon=True)
    threads = torch.get_num_threads()
    if count > 1:
        # It starts before the corpus is made, so that its imports run at the same time.
        other.start()
    try:
        if not (state / "corpus").is_dir():
            make_corpus(params, sources, state / "corpus", progress)
        if other.exitcode is not None:
            raise RuntimeError("the second process ended before the training")
        corpus = load_corpus(state / "corpus")
        model, figures = train(params, corpus, ProcessGroupGloo(store, 0, count, TIMEOUT), state, progress)
    except RuntimeError as error:
        if count > 1:
            other.join(5)  # If the error is that the other process ended, its exit code comes a little later.
        if other.exitcode is None:
            raise
        raise StageFailed(
            f"cold start: its second process ended with exit code {other.exitcode}; run again to continue."
        ) from error
    finally:
        torch.set_num_threads(threads)
        if count > 1:
            other.kill()
            other.join()
    manifest = save_checkpoint(
        out,
        model.cpu(),
        corpus.tokenizer,
        stage="coldstart",
        parent=None,
        dataset=dataset,
        code=code,
        params=settings,
        figures=figures,
    )
    shutil.rmtree(state)
    return manifest


def _second_rank(port: int, params: Params, state: Path) -> None:
    """Train as the second of the two processes of a cold start on a cpu, which share every step.

    A cold start is the training of a policy from scratch. `port` is the port at which the first process
    waits. The first process makes the corpus and saves the training state, both in `state`. This process ends
    after the last step, or when the first process ends.
    """
    group = ProcessGroupGloo(TCPStore("127.0.0.1", port), 1, 2, CORPUS_TIMEOUT)
    train(params, load_corpus(state / "corpus"), group, state, Quiet())


def new_model(
    params: Params, vocabulary: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> PreTrainedModel:
    """Return a Qwen3 with random weights that depend only on the model's shape and coldstart.seed.

    The shape is in the parameters of the section policy. `vocabulary` is the number of tokens, which is
    padded to a multiple of 64. `tokenizer` provides the ids of the special tokens; without it, the model has
    none.
    """
    policy = params.policy
    config = Qwen3Config(
        vocab_size=-(-vocabulary // 64) * 64,
        hidden_size=policy.hidden,
        num_hidden_layers=policy.layers,
        num_attention_heads=policy.heads,
        num_key_value_heads=policy.kv_heads,
        head_dim=policy.head_dim,
        intermediate_size=policy.feed_forward,
        max_position_embeddings=policy.context,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id if tokenizer else None,
        eos_token_id=tokenizer.eos_token_id if tokenizer else None,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(params.coldstart.seed)
        return Qwen3ForCausalLM(config)


def optimizers(model: PreTrainedModel, params: Params) -> list[torch.optim.Optimizer]:
    """Return two optimizers: Muon for the matrices, AdamW for the embeddings and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        Muon(matrices, lr=params.coldstart.matrix_learning_rate),
        torch.optim.AdamW(others, lr=params.coldstart.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def schedule(step: int, steps: int) -> float:
    """Return the learning rate of a step as a share of its peak: linear warm-up, then linear decay to 0.

    `step` counts from 0, and `steps` is the number of all steps.
    """
    warmup = max(1, round(WARMUP_SHARE * steps))
    return min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))


def loss_sum(model: PreTrainedModel, ids: Tensor, action_mask: Tensor) -> Tensor:
    """Return the sum of the next-token losses (nats) over the assistant's tokens, as a scalar tensor.

    Both tensors are [rows, length]; `action_mask` is True on the assistant's tokens.
    """
    hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state
    own = action_mask[:, 1:]
    return nn.functional.cross_entropy(model.lm_head(hidden[own]).float(), ids[:, 1:][own], reduction="sum")


def train(
    params: Params, corpus: Corpus, group: ProcessGroupGloo, state: Path, progress: Progress
) -> tuple[PreTrainedModel, dict[str, float]]:
    """Train a new model on the corpus, or continue from the state saved in the folder `state`.

    `corpus` has tokenised conversations. `group` connects the processes that share the micro-batches of each
    step. The first of them also saves the state about once a minute. The result is the model and its figures.
    The figures are "loss" (nats per assistant's token, an exponential moving average over steps), "tokens"
    (number of all tokens in the batches of all steps, without padding) and "parameters" (number of the
    model's parameters).
    """
    settings = params.coldstart
    if params.device == "cpu":
        torch.set_num_threads(1)
    model = new_model(params, len(corpus.tokenizer), corpus.tokenizer)
    torch.nn.Module.to(model, params.device)
    parameters = list(model.parameters())
    optimizer_pair = optimizers(model, params)
    lengths = corpus.offsets.diff().tolist()
    batches = plan_batches(
        lengths,
        steps=settings.steps,
        tokens_per_step=settings.tokens_per_step,
        microbatches=MICROBATCHES,
        seed=settings.seed,
    )
    first, loss = _load_state(state / "last.pt", model, optimizer_pair)
    saved = time.monotonic()
    model.train()
    for step in range(first, settings.steps):
        model.zero_grad()
        own_loss = own_tokens = 0.0
        for which in batches[step][group.rank() :: group.size()]:
            ids, mask = (tensor.to(params.device) for tensor in corpus.rows(which))
            with torch.autocast("cuda", torch.bfloat16, enabled=params.device == "cuda"):
                total = loss_sum(model, ids, mask)
            total.backward()
            own_loss += total.item()
            own_tokens += float(mask.sum())
        step_loss = _reduce(parameters, group, own_loss, own_tokens)
        for optimizer, peak in zip(
            optimizer_pair, (settings.matrix_learning_rate, settings.learning_rate), strict=True
        ):
            for options in optimizer.param_groups:
                options["lr"] = peak * schedule(step, settings.steps)
            optimizer.step()
        loss = step_loss if step == 0 else 0.95 * loss + 0.05 * step_loss
        if group.rank() == 0:
            progress.update("coldstart", step + 1, settings.steps, loss=loss)
            if time.monotonic() - saved > SAVE_SECONDS:
                _save_state(state / "last.pt", model, optimizer_pair, step + 1, loss)
                saved = time.monotonic()
    return model.eval(), {
        "loss": loss,
        "tokens": float(sum(lengths[index] for step in batches for batch in step for index in batch)),
        "parameters": float(sum(p.numel() for p in parameters)),
    }


def _reduce(
    parameters: list[torch.nn.Parameter], group: ProcessGroupGloo, own_loss: float, own_tokens: float
) -> float:
    """Replace the gradients by the clipped gradients of the step's mean loss, and return that loss.

    The gradients of all processes are summed and divided by the number of the assistant's tokens in the step.
    Their norm is limited to 1. `own_loss` and `own_tokens` are the sum of the losses and the number of the
    assistant's tokens in the micro-batches of this process.
    """
    gradients = [parameter.grad.reshape(-1) for parameter in parameters if parameter.grad is not None]
    total = torch.cat([*gradients, gradients[0].new_tensor([own_loss, own_tokens])])
    if group.size() > 1:
        group.allreduce([total]).wait()  # type: ignore[attr-defined]  # not in torch's stubs
    total[:-2] /= total[-1]
    total[:-2] *= (1.0 / (total[:-2].norm() + 1e-6)).clamp(max=1.0)
    parts = total[:-2].split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
    return float(total[-2] / total[-1])


def _save_state(
    path: Path, model: PreTrainedModel, optimizer_pair: list[torch.optim.Optimizer], step: int, loss: float
) -> None:
    """Write the training state after `step` finished steps to `path`, which is replaced atomically.

    `loss` is the moving average that `train` computes.
    """
    temporary = path.with_suffix(".new")
    torch.save(
        {
            "model": model.state_dict(),
            "optimizers": [o.state_dict() for o in optimizer_pair],
            "step": step,
            "loss": loss,
        },
        temporary,
    )
    temporary.replace(path)


def _load_state(
    path: Path, model: PreTrainedModel, optimizer_pair: list[torch.optim.Optimizer]
) -> tuple[int, float]:
    """Restore the state that `_save_state` wrote; return the number of finished steps and the loss.

    `model` and the optimizers are changed in place. The loss is the moving average that `train` computes.
    Returns (0, 0.0) and restores nothing if there is no such file.
    """
    if not path.is_file():
        return 0, 0.0
    saved: dict[str, Any] = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    for optimizer, values in zip(optimizer_pair, saved["optimizers"], strict=True):
        optimizer.load_state_dict(values)
    return saved["step"], saved["loss"]
