"""A vLLM that is loaded by this process and runs its engine in a child process."""

import os
import queue
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from components.core.errors import UserError
from components.core.params import Policy
from components.policy.sampler import Completion
from components.policy.vllm_server import Request, check_completion

WORKER_EXTENSION = "components.policy.vllm_worker.Fingerprint"


class LocalVllm:
    """A model that vLLM loads, samples from and updates on this machine, through the class `vllm.LLM`."""

    def __init__(self, folder: Path, settings: Policy, *, dtype: str, seed: int):
        """Load the checkpoint in `folder`.

        Raises UserError if vLLM is not installed.
        """
        # vLLM receives weights as pickled handles of CUDA memory. This is safe, because only this process
        # sends them.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        try:
            from vllm import LLM, SamplingParams
            from vllm.config import WeightTransferConfig
        except ImportError as error:
            raise UserError(
                f"policy.backend: vLLM cannot be imported here ({error}); install the extra vllm, "
                "or start a server and set policy.backend to vllm-server."
            ) from error
        self.sampling_params = SamplingParams
        self.lock = threading.Lock()
        self.waiting: queue.SimpleQueue[tuple[Request, Future[Completion]]] = queue.SimpleQueue()
        self.llm = LLM(
            model=str(folder),
            dtype=dtype,
            seed=seed,
            max_model_len=settings.context,
            gpu_memory_utilization=settings.gpu_memory_share,
            logprobs_mode="processed_logprobs",
            # Without this setting, the generation_config of the model would truncate the distribution that is
            # sampled.
            generation_config="vllm",
            # This is set only if it is needed, because the ipc engine of vLLM 0.24 imports ray, which is not
            # a dependency of vLLM.
            weight_transfer_config=WeightTransferConfig(backend="ipc")
            if settings.weight_transfer == "ipc"
            else None,
            worker_extension_cls=WORKER_EXTENSION,
            enable_sleep_mode=settings.sleep,
        )

    def complete(self, request: Request) -> Completion:
        """Return one completion; it is sampled together with all that other threads have asked for."""
        future: Future[Completion] = Future()
        self.waiting.put((request, future))
        with self.lock:
            together = [self.waiting.get() for _ in range(self.waiting.qsize())]
            if together:
                completions = self._complete([request for request, _ in together])
                for (_, asked), completion in zip(together, completions, strict=True):
                    asked.set_result(completion)
        return future.result()

    def _complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Return one completion for each request, in the order of the requests."""
        sampling = [
            self.sampling_params(
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                seed=request.seed,
                stop_token_ids=list(request.stop),
                logprobs=0,
                detokenize=False,
            )
            for request in requests
        ]
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(request.prompt)} for request in requests], sampling, use_tqdm=False
        )
        return [
            check_completion(
                list(sequence.token_ids),
                [
                    step[token].logprob
                    for step, token in zip(sequence.logprobs, sequence.token_ids, strict=True)
                ],
                sequence.finish_reason or "nothing",
            )
            for sequence in (output.outputs[0] for output in outputs)
        ]

    def init_weight_transfer_engine(self) -> None:
        self.llm.init_weight_transfer_engine({"init_info": {}})

    def update_weights(self, updates: Iterable[dict[str, Any]]) -> None:
        """Replace the weights in parts, as `VllmServer.update_weights` does."""
        self.llm.start_weight_update()
        for update_info in updates:
            self.llm.update_weights({"update_info": update_info})
        self.llm.finish_weight_update()

    def collective_rpc(self, method: str, arguments: dict[str, str]) -> list[Any]:
        """Call a method of every worker, and return the results of the workers."""
        results: list[Any] = self.llm.collective_rpc(method, kwargs=dict(arguments))
        return results

    def reset_prefix_cache(self) -> None:
        self.llm.reset_prefix_cache()

    def sleep(self) -> None:
        """Release the GPU memory of the weights and the key-value cache."""
        self.llm.sleep(level=1)

    def wake_up(self) -> None:
        self.llm.wake_up()
