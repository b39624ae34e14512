"""Extension of vLLM's workers: `--worker-extension-cls components.policy.vllm_worker.Fingerprint`.

vLLM 0.24 has no call that identifies the weights that it holds. This file is imported in vLLM's environment
and needs only torch.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from components.policy.weights import fingerprint


class _Worker(Protocol):
    def get_model(self) -> nn.Module: ...


class Fingerprint:
    """Mixin of vLLM's worker class."""

    def weight_fingerprint(self: _Worker) -> dict[str, Any]:
        """Return the fingerprint of this worker's parameters, and the dtype of the largest one."""
        parameters = list(self.get_model().parameters())
        dtype = max(parameters, key=lambda parameter: parameter.numel()).dtype
        return {"fingerprint": fingerprint(parameters, dtype), "dtype": str(dtype).removeprefix("torch.")}
