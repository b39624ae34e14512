"""An extension of vLLM's workers that computes a fingerprint of their weights.

It is loaded with `--worker-extension-cls components.policy.vllm_worker.Fingerprint`, because vLLM 0.24 itself
has no call that identifies its weights. This file is imported in vLLM's Python environment and needs only
torch.
"""

from typing import Any

from components.policy.weights import fingerprint


class Fingerprint:
    """Extension that gives each vLLM worker a method that returns a fingerprint of its weights.

    vLLM adds this class to the bases of its worker class. `VllmSampler` calls the method after it has sent
    weights, to check that they have arrived.
    """

    def weight_fingerprint(self: Any) -> dict[str, Any]:
        """Return the fingerprint of this worker's parameters, and the dtype of the largest parameter.

        The keys are `fingerprint` and `dtype`.
        """
        parameters = list(self.get_model().parameters())
        dtype = max(parameters, key=lambda parameter: parameter.numel()).dtype
        return {"fingerprint": fingerprint(parameters, dtype), "dtype": str(dtype).removeprefix("torch.")}
