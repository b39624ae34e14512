"""A Hugging Face folder or a GGUF file of another project becomes the first policy of a run."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import shapes, weight, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from components.agent.chat_template import ChatTemplate
from components.agent.policies import folder_policy
from components.core.config import resolve
from components.core.errors import UserError
from components.core.files import digest_bytes, read_json
from components.planning.model_shapes import policy_shapes
from components.policy.checkpoint import verify_checkpoint
from components.policy.first_policy import adopt, adopted
from flows.run_context import check_training


def test_the_weights_of_a_gguf_file_become_a_checkpoint_of_its_model(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "model.gguf")
    (tmp_path / "LICENSE").write_text("text\n")
    manifest = adopt(
        source, tmp_path / "made", origin={"license": "MIT"}, notices=[tmp_path / "LICENSE"], code="c"
    )
    assert manifest == verify_checkpoint(tmp_path / "made", "cpu")
    assert manifest.params == {"origin": {"license": "MIT"}} and "LICENSE" in manifest.files
    assert adopt(tmp_path / "made", tmp_path / "again").params == manifest.params
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    tensors = model.state_dict()
    assert model.dtype == torch.float32 and model.config.tie_word_embeddings
    for name, theirs in {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
    }.items():
        assert np.array_equal(tensors[theirs].numpy(), weight(name, shapes()[name]))
    config = read_json(tmp_path / "made" / "config.json")
    assert config["architectures"] == ["LlamaForCausalLM"] and "quantization_config" not in config
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made")
    assert config["eos_token_id"] == tokenizer.eos_token_id == 2
    ids, mask = ChatTemplate(tokenizer, described=False).conversation_ids(
        [{"role": "user", "content": "a <|im_end|>"}, {"role": "assistant", "content": "b"}]
    )
    assert ids[-1] == 2 and sum(mask) == 2 and ids.count(2) == 2, "text is never a special token"


def test_a_gguf_file_without_a_tensor_is_refused(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "model.gguf", without="blk.0.ffn_up.weight")
    with pytest.raises(UserError, match=r"model\.gguf: 1 tensors .* such as .*up_proj\.weight; give a whole"):
        adopt(source, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_source_is_adopted_once(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "model.gguf")
    first = adopted(source, tmp_path / "home")
    made = (first / "manifest.json").stat().st_mtime_ns
    assert adopted(source, tmp_path / "home") == first
    assert (first / "manifest.json").stat().st_mtime_ns == made
    # Its files without the manifest are a Hugging Face folder.
    shutil.copytree(first, tmp_path / "folder")
    (tmp_path / "folder" / "manifest.json").unlink()
    again = adopted(tmp_path / "folder", tmp_path / "home")
    assert verify_checkpoint(again).digest == verify_checkpoint(first).digest


def test_of_a_folder_only_its_own_manifest_is_replaced(tmp_path: Path) -> None:
    folder = adopted(write_gguf(tmp_path / "model.gguf"), tmp_path / "home")
    before = verify_checkpoint(folder)
    (folder / "original").mkdir()
    (folder / "original" / "manifest.json").write_text("{}")
    again = adopted(folder, tmp_path / "home")
    assert (again / "original" / "manifest.json").read_text() == "{}"
    assert verify_checkpoint(again).files.items() - before.files.items() == {
        ("original/manifest.json", digest_bytes(b"{}"))
    }


def test_an_evaluation_takes_a_gguf_file_with_the_prompt_of_a_foreign_model(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "model.GGUF")
    params = resolve("ci", (f"home={tmp_path / 'home'}",)).params
    policy = folder_policy(source, params, frozenset())
    assert policy.params.policy.prompt == "full" and policy.params.policy.context == 1024
    assert policy.name.startswith(str(tmp_path / "home" / "adopted"))
    assert policy_shapes(resolve("ci", (f"policy.source={source}",)).params).layers == 1


def test_a_source_that_cannot_be_read_is_one_sentence_before_anything_is_made(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:3000])
    (tmp_path / "text.gguf").write_text("hello")
    write_gguf(tmp_path / "architecture.gguf", "rwkv7")
    write_gguf(tmp_path / "tokens.gguf", tokenizer=False)
    write_gguf(tmp_path / "template.gguf", template="")
    folder = adopted(tmp_path / "whole.gguf", tmp_path / "home")
    (folder / "chat_template.jinja").unlink()
    for name, sentence in {
        "cut.gguf": r"cut\.gguf: .* cannot .*; give",
        "text.gguf": r"policy\.source: .*text\.gguf is no GGUF file, or is damaged; fetch it again",
        "architecture.gguf": r"architecture\.gguf: .*rwkv7.*; give",
        "tokens.gguf": r"tokens\.gguf: its tokenizer cannot be loaded .*; give",
        "template.gguf": r"template\.gguf: the tokenizer has no chat template; add",
        "absent.gguf": r"policy\.source: .*absent\.gguf does not exist; link .* or a GGUF file",
        str(folder): r"the tokenizer has no chat template; add",
    }.items():
        params = resolve("ci", (f"policy.source={tmp_path / name}",)).params
        with pytest.raises(UserError, match=sentence) as caught:
            check_training(params)
        assert "\n" not in str(caught.value)
