"""A vLLM engine that this process starts as a child process, for sampling without a server."""

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from components.core.errors import UserError
from components.core.params import Policy
from components.policy.sampler import Completion
from components.policy.vllm.protocol import Request, checked

WORKER_EXTENSION = "components.policy.vllm.worker.Fingerprint"
# Largest number of sequences that are sampled together. Sequences for which vLLM's cache has no room wait.
SEQUENCES = 256


class LocalVllm:
    """A model that vLLM loads, samples from and updates on this machine, through the class `vllm.LLM`."""

    def __init__(self, folder: Path, settings: Policy, *, dtype: str, seed: int, version: str):
        """Load the checkpoint in `folder`, whose weights have the name `version`.

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
        self.version = version
        self.threads = ThreadPoolExecutor(SEQUENCES, thread_name_prefix="vllm")
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

    def capacity(self) -> int:
        return SEQUENCES

    async def complete(self, request: Request, session: str) -> Completion:
        """Return the completion of a request, which is sampled in one batch with all requests that wait.

        `session` has no effect.
        """
        return await asyncio.get_running_loop().run_in_executor(self.threads, self._wait, request)

    def _wait(self, request: Request) -> Completion:
        future: Future[Completion] = Future()
        self.waiting.put((request, future))
        with self.lock:
            together = [self.waiting.get() for _ in range(self.waiting.qsize())]
            if together:
                try:
                    completions = self._complete([request for request, _ in together])
                except BaseException as error:
                    for _, asked in together:
                        asked.set_exception(error)
                    raise
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
            checked(
                list(sequence.token_ids),
                [
                    step[token].logprob
                    for step, token in zip(sequence.logprobs, sequence.token_ids, strict=True)
                ],
                sequence.finish_reason or "nothing",
                self.version,
            )
            for sequence in (output.outputs[0] for output in outputs)
        ]

    def begin(self, pause: str) -> list[dict[str, Any]]:
        """Begin a push, and return what `Fingerprint.expect_weights` of each worker returned.

        The caller sends no request during a push, so `pause` has no effect.
        """
        found: list[dict[str, Any]] = self.llm.collective_rpc("expect_weights")
        return found

    def start(self, init: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init})
        self.llm.start_weight_update()

    def update(self, info: Callable[[], dict[str, Any]]) -> None:
        self.llm.update_weights({"update_info": info()})

    def finish(self, version: str) -> None:
        self.llm.finish_weight_update()

    def reload(self, folder: str, version: str) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})

    def end(self, version: str, fault: Callable[[list[Any]], str]) -> None:
        """Check the weights of all workers after a push, and use them under the name `version`.

        `fault` takes the reports of the workers (`Fingerprint.weight_report`) and returns how they differ
        from the weights that were sent, or "" if they do not. Raises UserError if they differ.
        """
        if problem := fault(self.llm.collective_rpc("weight_report")):
            raise UserError(
                f"policy.backend: vLLM does not hold the weights that were sent to it ({problem}); run the "
                "same command again."
            )
        # The cached keys and values were computed with the old weights.
        self.llm.reset_prefix_cache()
        self.version = version

    def resume(self) -> None:
        return

    def sleep(self) -> None:
        """Release the GPU memory of the weights and the key-value cache."""
        self.llm.sleep(level=1)

    def wake_up(self) -> None:
        self.llm.wake_up()
