"""The typed configuration of a run.

Guarantees: every key that a user can set is a field of these models, with its unit; unknown keys are refused; a value
outside its range, or a combination that cannot work, is refused when the recipe is built, before any process starts.
"""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from agentrl.config import adapter
from agentrl.config.adapter import AdapterConfig
from agentrl.config.algorithm import COMPARING, AlgorithmConfig
from agentrl.config.evaluation import EvalConfig
from agentrl.config.inference import DType, InferenceConfig, Seconds
from agentrl.config.machines import SlurmConfig, TlsConfig, machine_contradictions
from agentrl.config.mesh import MeshConfig, mesh_contradictions
from agentrl.config.rollout import RolloutConfig, rollout_contradictions
from agentrl.config.section import Amount, Positive, Section
from agentrl.config.supervised import NO_ENV, SUPERVISED, SupervisedConfig, contradictions
from agentrl.config.teacher import TeacherConfig, teacher_contradictions


class ModelConfig(Section):
    """The policy's starting point."""

    name: str = Field(description="Local folder, Hugging Face id, or a model that an installed package ships.")
    chat_template: str | None = Field(
        default=None,
        description="Replaces the model's template: a Jinja file, chatml_tools (ours: ChatML with tools, for models "
        "whose template has none), or training (TRL's, which keeps earlier turns).",
    )
    trust_remote_code: bool = Field(
        default=False, description="Run the Python code that comes with the model, in all processes of the run."
    )


class DatasetConfig(Section):
    """Source of the training tasks."""

    name: str = Field(
        default="env",
        description="Dataset id, e.g. openai/gsm8k; a JSONL, CSV or parquet file, or a folder; env: the environment's "
        "own dataset.",
    )
    path: str | None = Field(default=None, description="Folder with train.jsonl / test.jsonl, instead of the hub.")
    split: str = "train"
    limit: Positive | None = Field(default=None, description="Use the first N tasks only.")
    shuffle: bool = True
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Arguments of the dataset's own loader.")
    columns: dict[str, str] = Field(
        default_factory=dict, description="Columns by the name that the environment reads, e.g. {question: prompt}."
    )


class ValidDatasetConfig(DatasetConfig):
    """Source of the evaluation tasks."""

    split: str = "test"


class ComponentConfig(Section):
    """An environment, agent or workflow: a registered id or ``path/to/file.py:Class``, and its arguments."""

    id: str
    kwargs: dict[str, Any] = Field(default_factory=dict)


class RewardConfig(Section):
    """Reward function of whole episodes, and the scaling for the trainer; logs keep the unscaled reward."""

    id: str | None = Field(
        default=None,
        description="Function that replaces the environment's reward of whole episodes: (task, messages, reward) -> "
        "reward, or (reward, metrics).",
    )
    kwargs: dict[str, Any] = Field(default_factory=dict)
    scale: float = Field(default=1.0, description="The trainer gets scale * reward + bias, then clipped; not 0.")
    bias: float = 0.0
    clip: tuple[float, float] | None = Field(default=None, description="Lowest and highest reward for the trainer.")

    @model_validator(mode="after")
    def check_clip(self) -> Self:
        """Refuses bounds in the wrong order, and a scale of 0."""
        if self.scale == 0:
            raise ValueError("reward.scale=0 makes all rewards equal: nothing would be learned")
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(f"reward.clip={list(self.clip)}: want the lower bound first")
        return self

    def seen(self, reward: float) -> float:
        """Returns the scaled and clipped reward that the trainer gets."""
        value = self.scale * reward + self.bias
        return value if self.clip is None else min(max(value, self.clip[0]), self.clip[1])


class SamplingConfig(Section):
    """Sampling during training; evaluation is greedy by default."""

    temperature: float = Field(default=1.0, ge=0, le=10)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1, description="-1 for the whole vocabulary.")
    max_new_tokens: Positive = 256
    eval_temperature: float = Field(default=0.0, ge=0, le=10, description="Of evaluations; 0 is greedy.")


class TrainerConfig(AdapterConfig, MeshConfig, AlgorithmConfig):
    """The optimisation. Times are in wall-clock seconds, lengths in tokens."""

    type: str | None = Field(
        default="grpo", description="grpo, sft, rm, dpo, or a trainer's path; null: only evaluate."
    )
    nproc: Positive = Field(default=1, description="torchrun ranks on each machine.")
    nodes: Positive = Field(default=1, description="Machines that run trainer ranks, see launch.head.")
    total_steps: Positive = 100
    epochs: Positive | None = Field(
        default=None,
        description="Stop after so many passes over the training tasks: when each was drawn and ended as often, kept "
        "or not. The last batch may be smaller.",
    )
    time_budget: Seconds | None = Field(
        default=None, description="Seconds after which training stops; the learning-rate schedule follows it."
    )
    learning_rate: float = Field(default=1e-6, gt=0)
    warmup_steps: int = Field(default=2, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_learning_rate_ratio: float = Field(default=0.1, ge=0, le=1)
    weight_decay: float = Field(default=0.0, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.99, ge=0, lt=1)
    adam_epsilon: float = Field(default=1e-8, gt=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    max_nonfinite: Positive = Field(
        default=5, description="Consecutive steps with a non-finite gradient after which the run stops."
    )
    max_first_mismatch: float | None = Field(
        default=0.1,
        gt=0,
        description="Mean |log ratio| of trainer and server, on the first tokens of the current version, above which "
        "the run stops: they do not compute the same policy. null: no check.",
    )
    dtype: DType = Field(
        default="auto", description="Compute dtype; parameters are float32. auto: bfloat16 if it is native."
    )
    tokens_per_microbatch: Positive = Field(
        default=1024,
        description="Token budget of a micro-batch, padding included; 8192 or more on a GPU. With context_parallel "
        "each rank has about so many.",
    )
    attention: Literal["auto", "padded", "packed"] = Field(
        default="auto",
        description="Rows of a micro-batch: padded with a dense mask, or packed end to end with sparse attention. "
        "auto: packed if the model's attention can be replaced, except for layers compiled on a CPU.",
    )
    freeze: list[Literal["vision"]] = Field(
        default=[], description="Parts of the model that are not trained; vision: the image tower and its projector."
    )
    router_aux_loss: float = Field(
        default=0.0,
        ge=0,
        description="Coefficient of the load-balancing loss of a mixture of experts, as its class defines it over a "
        "micro-batch (train/router_loss); 0: off.",
    )
    replay_routing: bool = Field(
        default=False,
        description="Mixture of experts: the update computes each token with the experts that the server chose for it, "
        "so that trainer and server route alike; the server names them with its answers.",
    )
    logprob_chunk: Positive = Field(default=256, description="Number of tokens whose logits exist at one time.")
    metric_share: float = Field(
        default=0.125,
        ge=0,
        le=1,
        description="Tokens computed for metrics alone, as a share of those computed for the updates (at least one "
        "answer): a sample of the answers without advantage, and with minibatches of those of later updates; 0: none.",
    )
    gradient_checkpointing: bool = False
    compile: bool = Field(
        default=False, description="torch.compile of the decoder layers; the first step takes minutes."
    )
    cpu_offload: bool = Field(
        default=False, description="On GPU: parameters, gradients and optimizer stay in the host's memory (FSDP2)."
    )
    threads: int | None = Field(default=None, ge=1, description="CPU threads of each rank; cores / nproc by default.")
    save_every: int = Field(
        default=0, ge=0, description="Trainer steps between checkpoints; 0: only by time and at the end."
    )
    save_seconds: Seconds | None = Field(default=600.0, description="Seconds between checkpoints; null: never by time.")
    save_epochs: Positive | None = Field(default=None, description="Passes over the tasks between checkpoints.")
    keep_checkpoints: Positive = 1
    batch_timeout: Seconds = Field(default=1800.0, description="Longest wait for one batch, after which the run stops.")

    @property
    def ranks(self) -> int:
        """Number of ranks on all machines."""
        return self.nodes * self.nproc


class WeightsConfig(Section):
    """Weight push: transport of a new policy to the servers."""

    transport: Literal["auto", "shm", "disk", "broadcast"] = Field(
        default="auto",
        description="Shared memory, files that the servers can read, or a process group (gloo, NCCL) with the servers. "
        "auto: shared memory if it fits and all servers are on this host; else the process group, or files.",
    )
    pause_mode: Literal["retract", "in_place", "abort"] = Field(
        default="retract",
        description="Running requests during a push: recompute their KV cache, keep it (cheap on a CPU), or resubmit.",
    )
    lease_seconds: Seconds = Field(default=120.0, description="A push longer than this is rolled back.")
    names: Literal["auto", "files", "model"] = Field(
        default="auto",
        description="Names and shapes of the weights that are sent: of the model's files, where experts stand one by "
        "one, or of the loaded model. auto: as the kind of server takes them.",
    )


class LaunchConfig(Section):
    """The device, the folder and the supervision of a run's processes."""

    type: Literal["local", "slurm", "ray"] = Field(
        default="local",
        description="local: on this machine, and those that join it; slurm: submit a job; ray: on a Ray cluster.",
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    run_dir: str = "runs"
    heartbeat_timeout: Seconds = Field(
        default=600.0, description="Seconds without a trainer's heartbeat after which the run stops."
    )
    head: str | None = Field(
        default=None,
        description="With several machines: address of node 0, as the others reach it. Each machine runs the same "
        "command with its launch.node_rank, and launch.run_dir on a disk that all see.",
    )
    node_rank: int = Field(
        default=0,
        ge=0,
        description="Number of this machine: trainer.nodes first, then rollout.nodes, then inference.nodes; 0: the "
        "head.",
    )
    port: int = Field(
        default=0,
        ge=0,
        le=65533,
        description="Port of node 0 where ranks meet, the next for machines, then for rollout workers; 0: free ones.",
    )
    node_timeout: Seconds = Field(default=600.0, description="Seconds that machines wait for one another.")
    restarts: int = Field(
        default=0,
        ge=0,
        description="With launch.type=ray or slurm: times that the run starts again from a new checkpoint when a node "
        "dies or a process fails.",
    )
    interface: str | None = Field(
        default=None,
        description="Network interface of traffic between machines, e.g. ib0; null: the one that leads to the head.",
    )
    tls: TlsConfig = TlsConfig()
    slurm: SlurmConfig = SlurmConfig()
    ray_address: str | None = Field(
        default=None,
        description="Address of the Ray cluster, also ray://HOST:PORT; local: one of this machine, started for the "
        "run; null: $RAY_ADDRESS.",
    )
    ray_resources: dict[str, Amount] = Field(
        default={}, description="More that each node of the trainer must have in Ray, e.g. {CPU: 8, trainer: 1}."
    )
    ray_server_resources: dict[str, Amount] = Field(
        default={}, description="More that each node of servers must have in Ray, e.g. {CPU: 8}."
    )
    ray_worker_resources: dict[str, Amount] = Field(
        default={}, description="More that each node of rollout workers must have in Ray, e.g. {CPU: 8}."
    )


class LoggingConfig(Section):
    """Logs, metric files and the live view."""

    tensorboard: bool = True
    trackers: list[Literal["wandb", "trackio", "mlflow", "swanlab"]] = Field(
        default=[],
        description="Also send metrics, settings and sample episodes to these; each is an extra of the same name.",
    )
    episodes: bool = True
    pack_after: Positive | None = Field(
        default=64,
        description="Size of episodes.jsonl in MB at which it becomes a packed part in episodes/, of a tenth, with "
        "logprobs to 0.8%; null keeps all as JSON lines.",
    )
    trainer_logprobs: int = Field(
        default=1,
        ge=0,
        description="Groups of each step whose logprobs under the trainer are kept token by token, for agentrl view.",
    )
    record: bool = Field(
        default=False,
        description="Keep all requests to the servers and their answers in traffic.jsonl, for agentrl replay.",
    )
    live: bool = Field(default=True, description="Live view in a terminal; one line per step elsewhere.")


class Recipe(Section):
    """A whole run. Every field can be set on the command line as ``section.field=value``."""

    name: str = Field(default="run", description="Run name: runs/<name>/ holds its outputs.")
    description: str = ""
    allocation: str | None = Field(
        default=None,
        description="GPUs of servers and trainer in one word, e.g. sglang.d4t2+fsdp.d8; sets the keys of inference and "
        "trainer, see docs/machines.md.",
    )
    seed: int = 0
    model: ModelConfig
    train_dataset: DatasetConfig = DatasetConfig()
    valid_dataset: ValidDatasetConfig = ValidDatasetConfig()
    env: ComponentConfig = ComponentConfig(id=NO_ENV)
    agent: ComponentConfig = ComponentConfig(id="chat")
    workflow: ComponentConfig = ComponentConfig(id="agent_env")
    reward: RewardConfig = RewardConfig()
    sampling: SamplingConfig = SamplingConfig()
    inference: InferenceConfig = InferenceConfig()
    teacher: TeacherConfig = TeacherConfig()
    rollout: RolloutConfig = RolloutConfig()
    eval: EvalConfig = EvalConfig()
    trainer: TrainerConfig = TrainerConfig()
    supervised: SupervisedConfig = SupervisedConfig()
    weights: WeightsConfig = WeightsConfig()
    launch: LaunchConfig = LaunchConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def check_combinations(self) -> Self:
        """Refuses combinations that cannot work; the message names both keys."""
        if self.sampling.max_new_tokens >= self.inference.context_length:
            raise ValueError(
                f"sampling.max_new_tokens={self.sampling.max_new_tokens} leaves no room for a prompt in "
                f"inference.context_length={self.inference.context_length}"
            )
        for problem in (*contradictions(self), *machine_contradictions(self)):
            raise ValueError(problem)
        for key in ("until_ci", "max_cost", "max_total_tokens"):
            if self.trainer.type is not None and getattr(self.eval, key) is not None:
                raise ValueError(f"eval.{key} is for evaluations without a trainer: the tasks of a run stay the same")
        if self.trainer.type is None or self.trainer.type in SUPERVISED:
            return self
        for problem in (
            *teacher_contradictions(self), *adapter.contradictions(self), *rollout_contradictions(self),
            *mesh_contradictions(self),
        ):  # fmt: skip
            raise ValueError(problem)
        if self.trainer.aggregation == "constant" and self.trainer.aggregation_length is None:
            length = {"aggregation_length": self.sampling.max_new_tokens}
            object.__setattr__(self, "trainer", self.trainer.model_copy(update=length))  # the model is frozen
        if self.rollout.group_size < 2 and self.trainer.advantage in COMPARING and self.trainer.baseline != "tag":
            raise ValueError(
                f"trainer.advantage={self.trainer.advantage} compares episodes of one task: rollout.group_size must be "
                "at least 2, or trainer.baseline=tag"
            )
        if self.trainer.baseline == "tag" and self.rollout.skip_uniform_groups:
            raise ValueError(
                "trainer.baseline=tag compares episodes of several groups, so groups with equal rewards give a signal "
                "too: rollout.skip_uniform_groups=true would drop them"
            )
        if self.rollout.batch_size % self.trainer.minibatches:
            raise ValueError(
                f"rollout.batch_size={self.rollout.batch_size} is not a multiple of "
                f"trainer.minibatches={self.trainer.minibatches}"
            )
        if self.sampling.temperature == 0:
            raise ValueError("trainer.type=grpo cannot learn from sampling.temperature=0: behavior logprobs need T > 0")
        if self.sampling.top_p < 1 or self.sampling.top_k not in (-1, 0):
            raise ValueError(
                "trainer.type=grpo needs the whole distribution: sampling.top_p must be 1 and sampling.top_k -1"
            )
        shared = self.trainer.context_parallel * self.trainer.tensor_parallel
        if self.rollout.batch_size * self.rollout.group_size < self.trainer.ranks // shared:
            raise ValueError("trainer.nproc * trainer.nodes is larger than rollout.batch_size * rollout.group_size")
        return self
