"""Two GRPO steps of TRL, rewarded by the judge that `cuda-agent serve --http 8470` serves.

    CUDA_AGENT_JUDGE=http://127.0.0.1:8470 python tests/environments/trl_grpo.py

The policy is an untrained Qwen3 of 0.2 million parameters with a tokenizer of bytes, made from scratch. Its
answers have no files, so every reward is -1. Needs trl, torch and the package in components/service/client.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "components" / "service" / "client"))
from cuda_agent_reward import ANSWER_FORMAT, ask, kernel_reward

SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> <tool_call> </tool_call> <tool_response> </tool_response> "
    "<think> </think>"
).split()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are bytes and the special tokens of Qwen3."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL[:3])
    tokenizer.add_tokens(SPECIAL[3:])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
    )
    fast.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    return fast


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    task = ask(f"/v1/tasks/{ask('/v1/tasks')[0]['task_id']}")
    prompt = [{"role": "user", "content": task["code"] + ANSWER_FORMAT}]
    row = {"prompt": prompt, "task": task["task_id"]}
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list([row] * 8),
            reward_funcs=kernel_reward,
            args=GRPOConfig(
                output_dir=folder,
                max_steps=2,
                per_device_train_batch_size=4,
                num_generations=4,
                max_completion_length=64,
                logging_steps=1,
                report_to="none",
                use_cpu=True,
                bf16=False,
                save_strategy="no",
            ),
        )
        started = time.monotonic()
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    for entry in logs:
        print(json.dumps({key: entry[key] for key in entry if key.startswith(("reward", "tools"))}))
    print(f"{len(logs)} steps in {time.monotonic() - started:.1f} s")
    assert len(logs) == 2 and all(-1 <= entry["reward"] <= 3 for entry in logs)


if __name__ == "__main__":
    main()
