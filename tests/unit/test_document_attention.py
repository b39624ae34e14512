"""One kernel for all packed rows is asked for what the rows one after the other compute."""

from functools import partial
from typing import Any

import packed_attention_fixtures
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from components.training import document_attention

attention = partial(packed_attention_fixtures.attention, (5, 1, 12, 7), (6, 2), 8)


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """Compute what torch documents for the function of this name, which is for CUDA only."""
    assert cu_seq_q.dtype == torch.int32 and max_q == max_k == int(cu_seq_q.diff().max())
    left, right = window_size
    sizes = cu_seq_q.diff().tolist()
    outputs = []
    for queries, keys, values in zip(query.split(sizes), key.split(sizes), value.split(sizes), strict=True):
        places = torch.arange(len(queries))
        ahead = places[None, :] - places[:, None]  # how far a key is after a query
        allowed = (ahead <= right) & ((ahead >= -left) | (left < 0))
        one = (part.transpose(0, 1)[None] for part in (queries, keys, values))
        outputs.append(scaled_dot_product_attention(*one, allowed, scale=scale, enable_gqa=enable_gqa))
    return torch.cat([output[0].transpose(0, 1) for output in outputs])


@pytest.mark.parametrize("has_gqa", [True, False])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_one_kernel_computes_what_rows_one_after_the_other_do(
    window: int | None, has_gqa: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_row = attention(window)
    calls = []

    def recorded(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        return varlen_attn(*args, **kwargs)

    names = {"scale", "window_size"} | ({"enable_gqa"} if has_gqa else set())
    monkeypatch.setattr(document_attention, "VARLEN_ARGUMENTS", names)
    monkeypatch.setattr(document_attention, "varlen_attn", recorded)
    monkeypatch.setattr(document_attention, "has_varlen", lambda *_: True)
    torch.testing.assert_close(attention(window), by_row)
    assert len(calls) == 1
    attention(window, dropout=0.5)  # which the kernel does not compute
    assert len(calls) == 1


def test_installed_torch_takes_scale_and_window_by_these_names() -> None:
    assert {"scale", "window_size"} <= document_attention.VARLEN_ARGUMENTS
