"""The stream of weights equals save_pretrained, checkpoints load again, and adapters are merged exactly."""

import copy
import json
from pathlib import Path

import pytest
import torch
from model_forms import FORMS, tiny_model
from peft import PeftModel
from safetensors.torch import load_file
from stream_fixtures import ADAPTED, fill_adapter, save, sharded
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import Chunk, WeightConverter

from components.core.errors import UserError
from components.core.params import Adapter
from components.policy.adapter import adapter_disabled, add_adapter
from components.policy.checkpoint import verify_checkpoint
from components.policy.weight_stream import weight_buckets

LIMIT_BYTES = 20_000


def streamed(model: PreTrainedModel, limit_bytes: int = LIMIT_BYTES) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for bucket in weight_buckets(model, limit_bytes):
        size = sum(tensor.nbytes for tensor in bucket.values())
        assert size <= limit_bytes or len({name.partition(".experts.")[0] for name in bucket}) == 1
        assert not weights.keys() & bucket.keys()
        weights |= {name: tensor.clone() for name, tensor in bucket.items()}
    return weights


def written(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 60)[None]).logits


@pytest.mark.parametrize("form", FORMS)
def test_the_stream_is_what_save_pretrained_writes(form: str, tmp_path: Path) -> None:
    fresh = tiny_model(form, dtype=torch.bfloat16)
    expected = written(fresh, tmp_path / "fresh")
    assert_equal(streamed(fresh), expected)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fresh")
    assert_equal(streamed(loaded), expected)
    # A critic has only the backbone, which names its weights without a prefix.
    for name, backbone in (
        ("own", loaded.base_model),
        ("loaded", AutoModel.from_pretrained(tmp_path / "fresh")),
    ):
        assert_equal(streamed(backbone), written(backbone, tmp_path / name))


def test_matrices_that_the_public_format_fuses_are_in_one_bucket(tmp_path: Path) -> None:
    model = tiny_model("qwen3", num_key_value_heads=4)
    model._weight_conversions = [
        WeightConverter(
            "self_attn.qkv_proj.weight",
            [f"self_attn.{name}_proj.weight" for name in "qkv"],
            operations=[Chunk(dim=0)],
        )
    ]
    assert_equal(streamed(model, 1), written(model, tmp_path))
    assert "model.layers.1.self_attn.qkv_proj.weight" in streamed(model, 1)


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_in_several_files_loads_with_plain_transformers(form: str, tmp_path: Path) -> None:
    model = tiny_model(form)
    manifest = save(tmp_path / "parts", model)
    save(tmp_path / "whole", model, bucket_bytes=2**31)
    model.save_pretrained(tmp_path / "reference")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "reference" / name).read_bytes(), name
    files = {name for name in manifest.files if name.endswith(".safetensors")}
    assert len(files) > 3 and "model.safetensors" not in files
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == files
    for folder in ("parts", "whole"):
        verify_checkpoint(tmp_path / folder)
        loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(report.values()), report
        assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("form", ["qwen2.5", "qwen3-moe", "gpt-oss"])
def test_an_adapter_is_merged_into_the_weights_and_kept_beside_them(form: str, tmp_path: Path) -> None:
    model = tiny_model(form)
    start = logits(model)
    add_adapter(model, ADAPTED)
    assert torch.equal(logits(model), start), "a new adapter changes nothing"
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    assert not any("lm_head" in name or "router" in name or ".gate." in name for name in trained)
    fill_adapter(model)
    before = copy.deepcopy(model.state_dict())
    adapted = logits(model)
    assert (adapted - start).abs().max() > 0.1
    save(tmp_path / "saved", model, bucket_bytes=2**31)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    verify_checkpoint(tmp_path / "saved")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(logits(merged), adapted, atol=1e-4, rtol=0)
    base = tiny_model(form)
    with_adapter = PeftModel.from_pretrained(base, tmp_path / "saved" / "adapter")
    torch.testing.assert_close(logits(with_adapter), adapted, atol=1e-5, rtol=0)
    with adapter_disabled(model):
        assert torch.equal(logits(model), start)
    assert torch.equal(logits(model), adapted)
    assert trained == {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_a_merged_weight_is_rounded_once() -> None:
    model = tiny_model("qwen2.5", dtype=torch.bfloat16)
    add_adapter(model, ADAPTED)
    fill_adapter(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    layer = model.model.layers[1].mlp.down_proj
    a, b = (matrix["default"].weight.double() for matrix in (layer.lora_A, layer.lora_B))
    exact = layer.base_layer.weight.double() + ADAPTED.alpha / ADAPTED.rank * b @ a
    merged = streamed(model)["model.layers.1.mlp.down_proj.weight"]
    assert merged.dtype == torch.bfloat16
    # Half of the distance between neighbours, of which there are 128 in an octave.
    assert ((merged.double() - exact).abs() <= 1.001 * 2**-9 * 2 ** exact.abs().log2().ceil()).all()


def test_adapters_of_chosen_layers_are_equal_in_every_process() -> None:
    one, other = tiny_model("llama3"), tiny_model("llama3")
    chosen = Adapter(rank=2, alpha=4, targets=["q_proj", "self_attn.v_proj"])
    add_adapter(one, chosen)
    state = torch.get_rng_state()
    add_adapter(other, chosen)
    assert torch.equal(torch.get_rng_state(), state), "random numbers of the caller are not used up"
    names = {name for name, parameter in one.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[4] for name in names} == {"q_proj", "v_proj"} and len(names) == 8
    assert all(
        torch.equal(parameter, dict(other.named_parameters())[name])
        for name, parameter in one.named_parameters()
    )


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_an_adapter_trains_on_after_it_was_disabled(zero_stage: int) -> None:
    """DeepSpeed registers its hooks once, and peft switches the gradients of a disabled adapter off."""

    def trained(*, disables: bool) -> dict[str, Tensor]:
        model = tiny_model("qwen2.5")
        start = logits(model)
        add_adapter(model, ADAPTED)
        engine = sharded(model, zero_stage, learning_rate=0.01)
        for step in range(3):
            loss = engine(torch.arange(3 + step, 40)[None]).logits.float().logsumexp(-1).mean()
            engine.backward(loss)
            engine.step()
            if disables:
                with adapter_disabled(model):
                    torch.testing.assert_close(logits(engine), start, atol=1e-5, rtol=0)
        return streamed(model)

    expected, weights = trained(disables=False), trained(disables=True)
    assert_equal(weights, expected)
    start = streamed(tiny_model("qwen2.5"))
    changed = {name.split(".")[4] for name in start if not torch.equal(start[name], weights[name])}
    assert {"q_proj", "down_proj"} <= changed


def test_a_target_that_the_model_lacks_is_named_with_those_that_it_has() -> None:
    with pytest.raises(UserError, match=r"policy\.adapter\.targets: .* no linear layer c_attn .*down_proj"):
        add_adapter(tiny_model("llama3"), Adapter(rank=2, alpha=4, targets=["q_proj", "c_attn"]))
    with pytest.raises(
        UserError, match=r"no linear layer up_proj .*give some of k_proj, o_proj, q_proj, v_proj"
    ):
        add_adapter(tiny_model("qwen3-moe"), Adapter(rank=2, alpha=4, targets=["up_proj"]))
    with pytest.raises(UserError, match="no linear layer lm_head"):
        add_adapter(tiny_model("llama3"), Adapter(rank=2, alpha=4, targets=["lm_head"]))


def test_rank_zero_adds_no_adapter() -> None:
    model = tiny_model("qwen3")
    add_adapter(model, Adapter(rank=0, alpha=4, targets=[]))
    assert all(parameter.requires_grad for parameter in model.parameters())
    with adapter_disabled(model):
        logits(model)
