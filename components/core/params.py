"""All parameters with their types, meanings and permitted values.

The parameters of the training stages and of the engine are in stage_params.py, those of the registry and of
the gates in promotion_params.py, and both are included here. The values are read from `params.yaml` by
`config.resolve`. No value has a default in this file. The description of each field gives its meaning and its
unit. Every parameter has the kind `result` (it changes what a run computes, measures or publishes) or
`throughput` (it does not), which records.py defines.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from components.core.promotion_params import GateThresholds, Registry
from components.core.records import (
    Count,
    Device,
    FrozenModel,
    Natural,
    Positive,
    Precision,
    Seed,
    Share,
    TaskDtype,
    Tasks,
    TrainingStage,
    result,
    throughput,
)
from components.core.stage_params import Coldstart, Critic, Engine, Ppo, Rejection


def _listed(value: Any) -> Any:
    """Convert a single address to a list with one item, and an empty text to an empty list.

    A value that is not a string is returned unchanged.
    """
    return ([value] if value else []) if isinstance(value, str) else value


class Data(FrozenModel):
    """Parameters of the data set of kernel tasks: what tasks are made of, and which of them are admitted."""

    tasks: Tasks = result("admitted training tasks to make")
    held_out: Tasks = result("admitted held-out tasks to make; never seen in any stage")
    seed: Seed = result("seed of the composer")
    held_out_seed: Seed = result(
        "seed that decides which sequences of operators are held out; keep it while data.seed changes from "
        "night to night"
    )
    operators: Literal["core", "kernelbench", "torch", "all"] = result(
        "what tasks are made of: core (a small table that a policy from scratch knows), kernelbench (the "
        "kinds of operators of its levels 1 and 2), torch (mined from it), all (and transformers)"
    )
    transformers_share: Share = result(
        "share of tasks that are a module of transformers; counts where data.operators is all"
    )
    operator_mix: dict[int, Share] = result("share of tasks by number of operators, 1 to 5 (paper, Table 3)")
    half_share: Share = result(
        "share of tasks whose module and inputs are in half precision, float16 and bfloat16 alike often"
    )
    workload_share: Share = result(
        "share of tasks that are judged on up to 4 shapes (workloads); needs data.operators=core"
    )
    eager_seconds: tuple[Positive, Positive] = result(
        "window for the eager time of one call, seconds; the paper uses 0.001 to 0.1"
    )
    numel: tuple[Count, Count] = result(
        "window for the elements of the input tensor if it is no vector; sizes are searched inside it"
    )
    headroom: bool = result(
        "measure torch.compile of every admitted task: its time over the least time that "
        "the device needs is the task's headroom"
    )
    weigh_by_headroom: bool = result("train more often on tasks with headroom; needs data.headroom")
    composer: str = result(
        "OpenAI-compatible server that composes, such as http://127.0.0.1:8000/v1; empty composes without one"
    )
    composer_model: str = result("the model that is asked; its answers are kept by this name")
    max_similarity: Share = result(
        "highest structural similarity to any evaluation program (paper, appendix 6)"
    )
    against: list[str] = result(
        "evaluation programs to stay clear of: KernelBench checkouts, folders, parquet files"
    )


class Sandbox(FrozenModel):
    """Parameters of the judge, which builds, checks and measures kernels, and of its sandbox."""

    isolation: Literal["bubblewrap", "none"] = result(
        "isolation of candidates; none must be written by a person and is recorded in every verdict"
    )
    build_seconds: Positive = result(
        "wall-clock limit of one build, or of the call that compiles kernels of Triton, seconds"
    )
    run_seconds: Positive = result(
        "wall-clock limit of everything one candidate does after its build, seconds"
    )
    memory_bytes: Count = result("address space of a runner on cpu; private temporary files count apart")
    device_bytes: Annotated[int, Field(ge=0)] = result(
        "device memory that judging one task may take; 0 is all of the GPU's, and no limit on cpu"
    )
    host_bytes: Annotated[int, Field(ge=0)] = throughput(
        "host memory that a judge on a GPU counts as available; 0 is what the machine reports "
        "and the limits of its control groups leave"
    )
    rules: Literal["kernel-only", "any"] = result(
        "what a candidate may do: compute with its own kernels only, or also with torch"
    )
    weights: Literal["state_dict", "seed"] = result(
        "how a candidate gets the task's weights: load_state_dict, or its constructor runs under "
        "the same secret seed as the task's"
    )
    tolerance: Literal["strict", "kernelbench"] = result(
        "largest accepted error: the judge's own criterion, or also KernelBench's tolerances on "
        "the task's own inputs"
    )
    input_delivery: Literal["round", "call"] = result(
        "on a GPU: all inputs of a timed round at once, or one call's after the outputs of the "
        "call before were taken, for tasks with small inputs and outputs"
    )
    input_cache: Literal["warm", "cold"] = result(
        "on a GPU: whether the inputs of a timed round may be in the L2 cache when its calls begin, or have "
        "been displaced from it"
    )
    compile_modes: Literal["all", "default"] = result(
        "modes of torch.compile on a GPU whose fastest one is compared with a final answer: all, that is "
        "default, reduce-overhead and max-autotune unless memory is scarce, or the default mode only"
    )
    counters: bool = throughput(
        "on a GPU: read its hardware counters in one more call of each correct candidate, which is not timed "
        "(Nsight Compute, about ten seconds)"
    )
    correctness_sets: Annotated[int, Field(ge=6)] = result(
        "secret input sets for correctness, over the input distributions"
    )
    rounds: Annotated[int, Field(ge=3)] = result("least number of timed rounds of each program")
    most_rounds: Count = result(
        "largest number of timed rounds of each program, while its ratio to the baseline is uncertain"
    )
    process_spread: Annotated[float, Field(ge=0, le=0.5)] = result(
        "standard deviation of the log-ratio of two processes of the same code, part of "
        "every interval (tests/bench/judge_validity.py)"
    )
    sets_per_round: Count = result("fresh secret input sets in one timed round")
    round_seconds: Positive = result(
        "a round repeats its sets until it lasts about this long on eager, seconds"
    )
    error_multiple: Positive = result(
        "a candidate's error may be this multiple of the float32 reference's own error"
    )
    absolute_tolerance: Positive = result(
        "ceiling of the error that is ever accepted, relative to the output's scale"
    )
    tf32_tolerance: Positive = result(
        "that ceiling where precision is tf32: its products keep 11 bits (NVIDIA A100 white paper)"
    )
    build_workers: Count = throughput("builds that run in parallel")
    warm_tasks: Count = throughput("tasks whose baselines are kept warm")
    attempts: Count = throughput("tries of a judgement that failed by the judge's own fault")
    measurable_share: Share = throughput(
        "least share of the tasks of a data set or a suite that the judge must be able to measure on its "
        "device; a training stage or an evaluation leaves out the others, and is refused if it is smaller"
    )


class Adapter(FrozenModel):
    """Parameters of low-rank adapters (LoRA, arXiv 2106.09685), made by peft."""

    rank: Natural = result("rank of the adapters; 0 trains all parameters instead")
    alpha: Count = result("the adapters' product is scaled by alpha / rank")
    targets: list[str] = result(
        "names of the linear layers that get an adapter; empty is all of them but the output head"
    )


class Policy(FrozenModel):
    """Parameters of the policy, which is the language model that writes kernels, and of its sampler."""

    source: str = result(
        "what a run starts from: scratch, champion, or a Hugging Face causal LM: its folder, or a GGUF file"
    )
    base: str = result(
        "what a run with policy.source champion starts from while there is no champion: scratch, a folder "
        "or a GGUF file"
    )
    hidden: Count = result("width of a policy made from scratch")
    layers: Count = result("its layers")
    heads: Count = result("its attention heads")
    kv_heads: Count = result("its key and value heads")
    head_dim: Count = result("its head dimension; vLLM needs 64 or 128 on a GPU")
    feed_forward: Count = result("its feed-forward width")
    vocabulary: Count = result("its vocabulary size")
    context: Count = result("its context window in tokens")
    adapter: Adapter = Field(description="low-rank adapters, which are trained in place of all parameters")
    prompt: Literal["compact", "full"] = result(
        "compact: the task's source only, with one operator a line and numbers instead of names if it is a "
        "chain of known operators; full: SKILL.md before the source"
    )
    backend: Literal["transformers", "vllm-server"] = result("sampling backend")
    batch: Count = throughput("sequences sampled together by the transformers backend")
    servers: Annotated[list[str], BeforeValidator(_listed)] = throughput(
        "roots of the vLLM servers for the backend vllm-server, such as [http://127.0.0.1:8000], or [ray]: "
        "those on the Ray cluster that RAY_ADDRESS names; each trajectory stays with one of them; empty, the "
        "run starts servers of its own on this machine when it first samples, and ends them"
    )
    vllm: str = throughput(
        "executable of the environment in which vLLM is installed, with which servers are started; empty is "
        "vllm on the PATH, or else .venv-vllm/bin/vllm of the project"
    )
    vllm_options: list[Annotated[str, Field(coerce_numbers_to_str=True)]] = throughput(
        "further options of the servers that are started, such as [--enforce-eager, --max-num-seqs, 96]"
    )
    weight_transfer: Literal["ipc", "nccl", "disk"] = throughput(
        "how new weights reach vLLM: ipc, CUDA memory of the same GPU; nccl, a broadcast to servers on other "
        "GPUs or hosts; disk, a folder that the server can read"
    )
    push_pause: Literal["keep", "abort", "wait"] = result(
        "what happens to running completions while servers get new weights: keep, they go on with them; "
        "abort, they end and are continued from their tokens; wait, they end before"
    )
    gpu_memory_share: Share = throughput(
        "share of a GPU's memory that a started server gets; a trainer on the same GPU needs the rest"
    )
    sleep: bool = throughput(
        "vLLM gives its memory back while the policy is trained; a server needs --enable-sleep-mode"
    )


class Pool(FrozenModel):
    """Parameters of the placement: the GPUs, or processor cores on cpu, of trainers, samplers and judges.

    Judges are processes that build, check and measure kernels. Trainers and judges are placed on the Ray
    cluster that the environment variable RAY_ADDRESS names, unless their number is 0.
    """

    trainers: Natural = throughput(
        "ranks that train, each with a GPU of the Ray cluster (on cpu, a core); "
        "0 trains in the process of the run"
    )
    samplers: Natural = throughput(
        "GPUs of the vLLM servers, which no other role uses; 0 samples on the trainers' GPUs"
    )
    judges: Natural = throughput(
        "judges, each with a GPU of the Ray cluster (on cpu, a core); "
        "0 judges in the process of the run, or of its first rank, and on its GPU"
    )
    resource: str = throughput(
        "Ray resource of which each trainer and each judge takes one, for instance H20; empty is none"
    )
    gpu: Literal["h20", "h100", "h200"] = throughput(
        "kind of these GPUs, whose datasheet gives the memory that a run must fit"
    )
    service: str = throughput(
        "address of a service that judges (cuda-agent serve --http), such as http://127.0.0.1:8470; "
        "empty judges as pool.judges says"
    )
    service_token: str = throughput("file with the service's token; empty sends none")


class Evaluation(FrozenModel):
    """Parameters of the evaluation of a policy on a suite, which is a set of kernel tasks."""

    suite: str = result(
        "held-out, shipped, or the path of a suite: task files, a KernelBench checkout, or parquet"
    )
    levels: list[Count] = result("levels of the suite that are evaluated; empty is all of them")
    dtype: TaskDtype = result(
        "dtype to which the suite's modules and inputs are cast; float32 leaves them as they are"
    )
    numel: Count = result("elements of the largest input of a task of the shipped suite")
    attempts: Count = result("trajectories per task; the first counts for pass and faster rates")
    temperature: Annotated[float, Field(ge=0)] = result("sampling temperature; 0 is greedy")
    max_turns: Count = result("turns of one trajectory; the paper uses 200")
    max_new_tokens: Count = result("tokens of one turn")


class StoreParams(FrozenModel):
    """Parameters of the artifact store, which keeps copies of checkpoints and of the files of runs."""

    url: str = result(
        "artifact store: empty is a folder in the home folder; "
        "s3://bucket/prefix needs boto3's usual settings"
    )
    endpoint: str = result("S3 endpoint; empty is AWS")


class Night(FrozenModel):
    """Parameters of a night, which is one run of the pipeline in a series of runs."""

    hours: Annotated[float, Field(ge=0, allow_inf_nan=False)] = throughput(
        "time budget in hours, for which training ends after a whole update; 0 is off"
    )
    stages: list[TrainingStage] = result("training stages that the night runs, in their order")
    new_tasks: bool = result(
        "a dated night makes training tasks of its own, with its day as data.seed; the operator sequences "
        "that are held out stay the same"
    )


class JudgeParams(FrozenModel):
    """Parameters of a judge, which builds, checks and measures kernels: device, precision and sandbox.

    All verdicts of the judge depend on them.
    """

    device: Device = result("what kernels run on")
    precision: Precision = result("precision policy of candidate and both baselines alike")
    sandbox: Sandbox = Field(description="the judge")


class Params(JudgeParams):
    """All parameters of a run of the pipeline, with one field for each parameter or section in params.yaml.

    `config.resolve` makes this record.
    """

    seed: Seed = result("seed of sampling and of the training stages")
    reward: str = result(
        "import path of the function that gives a trajectory its reward, such as "
        "components.agent.rewards.milestone, the paper's milestones"
    )
    home: str = throughput("folder that holds everything a run leaves behind")
    data: Data = Field(description="making of the training tasks")
    policy: Policy = Field(description="the policy and how it is sampled")
    coldstart: Coldstart = Field(description="first training of a policy made from scratch")
    warmup: Ppo = Field(description="stage 1, single-turn PPO")
    rejection: Rejection = Field(description="stage 2, rejection fine-tuning")
    critic: Critic = Field(description="stage 3, value pretraining")
    agentic: Ppo = Field(description="stage 4, multi-turn PPO")
    engine: Engine = Field(description="DeepSpeed")
    pool: Pool = Field(description="GPUs that train, sample and judge")
    night: Night = Field(description="how nights follow each other")
    evaluation: Evaluation = Field(description="evaluation of the trained policy")
    registry: Registry = Field(description="MLflow")
    gate: GateThresholds = Field(description="thresholds of promotion")
    store: StoreParams = Field(description="artifact store")
