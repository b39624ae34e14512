"""The weights of a model as a stream of complete tensors in the public checkpoint format.

Checkpoints and weight transfers read a model only through this stream, so no process holds a second copy of
the whole model, and none holds a whole model that DeepSpeed's ZeRO 3 has sharded. The names and shapes are
those that `save_pretrained` writes and vLLM loads: experts that transformers fuses are separate tensors, tied
weights occur once, and the adapters of `components.policy.adapter` are merged into the layers that they
change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key, revert_weight_conversion

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Name under which transformers and peft store the only adapter of a model.
ADAPTER = "default"
BASE, LOW_RANK_A, LOW_RANK_B = ".base_layer.", f".lora_A.{ADAPTER}.", f".lora_B.{ADAPTER}."


@dataclass(frozen=True)
class _Weight:
    """A tensor of the public checkpoint format, the one of `save_pretrained`, which has no adapters.

    `stored` is the model's own tensor. If `low_rank` is given, it has the matrices A [rank, in] and B [out,
    rank] of an adapter and their scale, and the value is `stored` + scale * B A; otherwise the value is
    `stored`.
    """

    name: str
    stored: Tensor
    low_rank: tuple[Tensor, Tensor, float] | None = None

    def parts(self) -> list[Tensor]:
        return [self.stored, *(self.low_rank[:2] if self.low_rank else ())]

    def value(self) -> Tensor:
        """Return the value of the tensor, with the adapter merged into it if there is one.

        If the model is sharded, the caller has gathered all `parts`: the stored tensor and the matrices of
        the adapter. The sum with an adapter is computed in float32 and rounded once to the dtype of `stored`.
        """
        stored = self.stored.detach()
        if self.low_rank is None:
            return stored
        a, b, scale = self.low_rank
        merged = torch.addmm(stored.float(), b.detach().float(), a.detach().float(), alpha=scale)
        return merged.to(stored.dtype)


def weight_buckets(model: PreTrainedModel, limit_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield all weights of `model` by their names in the public format, in buckets of complete tensors.

    The public format is the one that `save_pretrained` writes, and a bucket is a dictionary of tensors by
    name. The buckets are in the order of the model's modules. Each has at most `limit_bytes` of the model's
    parameters, or one larger parameter, or one larger group of parameters that the public format stores as
    one tensor. If ZeRO 3 has sharded the model, every rank must iterate over the whole stream, and only the
    parameters of the present bucket are gathered. The tensors may be the model's own memory, so they are
    valid until the next bucket is requested, and the caller must not write to them.
    """
    for bucket in _split(_conversion_groups(model, _weights(model)), limit_bytes):
        with _gathered([part for weight in bucket for part in weight.parts()]):
            yield revert_weight_conversion(model, {weight.name: weight.value() for weight in bucket})


def adapter_buckets(model: PreTrainedModel, limit_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield the matrices of the model's adapter by their names in peft's file format, in buckets.

    A bucket is a dictionary of tensors by name. It has at most `limit_bytes`, or one larger matrix, and is
    valid until the next one is requested. There is no bucket if the model has no adapter. Every rank must
    iterate over the whole stream if ZeRO 3 has sharded the model.
    """
    matrices = [
        [_Weight(f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}", tensor)]
        for name, tensor in model.state_dict(keep_vars=True).items()
        if LOW_RANK_A in name or LOW_RANK_B in name
    ]
    for bucket in _split(matrices, limit_bytes):
        with _gathered([weight.stored for weight in bucket]):
            yield {weight.name: weight.value() for weight in bucket}


def _weights(model: PreTrainedModel) -> Iterator[_Weight]:
    """Yield the parameters and persistent buffers of `model` in the order of its modules.

    Tied parameters occur once. The matrices of a LoRA adapter are not yielded alone, but as part of the
    weight that they change. Tensors that the model's class excludes from saving are left out.
    """
    tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
    seen = set()
    for name, tensor in tensors.items():
        if id(tensor) in seen or name in (model._keys_to_ignore_on_save or ()):
            continue
        seen.add(id(tensor))
        if BASE in name:
            layer, _, field = name.partition(BASE)
            merged = f"{layer}.{field}"
            if field == "weight":
                adapted: Any = model.get_submodule(layer)
                a, b = (tensors[f"{layer}{part}weight"] for part in (LOW_RANK_A, LOW_RANK_B))
                yield _Weight(merged, tensor, (a, b, float(adapted.scaling[ADAPTER])))
            else:
                yield _Weight(merged, tensor)
        elif LOW_RANK_A not in name and LOW_RANK_B not in name:
            yield _Weight(name, tensor)


def _conversion_groups(model: PreTrainedModel, weights: Iterator[_Weight]) -> list[list[_Weight]]:
    """Return the weights in groups; the public checkpoint format stores the weights of a group as one tensor.

    That is the format that `save_pretrained` writes, so the weights of a group must be converted together.
    Most groups have one weight. Some formats fuse matrices that transformers separates, such as query, key
    and value.
    """
    conversions = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(
        model, add_legacy=False
    )
    converters: list[Any] = [
        conversion.reverse_transform()
        for conversion in reversed(conversions)
        if isinstance(conversion, WeightConverter)
    ]
    groups: dict[str, list[_Weight]] = {}
    for weight in weights:
        public, _ = rename_source_key(weight.name, [], converters, reverse=True)
        groups.setdefault(public, []).append(weight)
    return list(groups.values())


def _split(groups: Sequence[list[_Weight]], limit_bytes: int) -> Iterator[list[_Weight]]:
    """Yield lists with the weights of consecutive groups, each of at most `limit_bytes`.

    A group is not divided: one that is larger than `limit_bytes` has a list of its own.
    """
    bucket: list[_Weight] = []
    filled = 0
    for group in groups:
        size = sum(
            # ZeRO 3 keeps the number of elements of a whole tensor that it has sharded in `ds_numel`.
            int(getattr(part, "ds_numel", part.numel())) * part.element_size()
            for weight in group
            for part in weight.parts()
        )
        if bucket and filled + size > limit_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket, filled = bucket + group, filled + size
    if bucket:
        yield bucket


def _gathered(tensors: Sequence[Tensor]) -> contextlib.AbstractContextManager[None]:
    """Return a context in which those of `tensors` that ZeRO 3 has sharded are complete on every rank.

    Every rank must enter it, because the shards are gathered then.
    """
    sharded = [
        tensor
        for tensor in tensors
        if hasattr(tensor, "ds_status") and tensor.ds_status.name != "AVAILABLE"  # not gathered at present
    ]
    if not sharded:
        return contextlib.nullcontext()
    import deepspeed

    context: contextlib.AbstractContextManager[None] = deepspeed.zero.GatheredParameters(sharded)
    return context
