"""What a vLLM worker is given beside its own methods: `--worker-extension-cls components.policy.vllm_worker.Fingerprint`.

vLLM acknowledges an update of its weights but offers no way to see which ones it holds (0.24). Imported by vLLM in its
own environment, so it needs torch alone.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from components.policy.weights import fingerprint


class _Worker(Protocol):
    def get_model(self) -> nn.Module: ...


class Fingerprint:
    """Mixed into vLLM's worker class."""

    def weight_fingerprint(self: _Worker) -> dict[str, Any]:
        """Of this worker's parameters: their fingerprint, and the dtype that most elements have."""
        parameters = list(self.get_model().parameters())
        dtype = max(parameters, key=lambda parameter: parameter.numel()).dtype
        return {"fingerprint": fingerprint(parameters, dtype), "dtype": str(dtype).removeprefix("torch.")}
