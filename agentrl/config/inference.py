"""The recipe's inference section: the servers, and how they are asked."""

from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl.config.section import Positive, Section

Seconds = Annotated[float, Field(gt=0)]
DType = Literal["auto", "float32", "bfloat16"]


class InferenceConfig(Section):
    """The inference servers."""

    engine: str = Field(
        default="embedded",
        description="Kind of server: embedded, sglang, vllm, openai, or your own, path/to/file.py:Class.",
    )
    python: str | None = Field(
        default=None,
        description="Interpreter of the server; null: ours, or .venv-sglang/bin/python (by package) here.",
    )
    urls: tuple[str, ...] = Field(
        default=(), description="URLs of running servers, which agentrl does not start or stop."
    )
    servers: Positive = Field(
        default=1, description="Servers that the run starts; 2..8: at least 2, up to inference.max_servers=8."
    )
    max_servers: Positive | None = Field(
        default=None, description="With launch.type=ray: most servers, while the cluster has nodes for them."
    )
    nodes: int = Field(
        default=0, ge=0, description="Machines that run servers only, beside trainer.nodes; 0: they stand on the head."
    )
    port: int = Field(
        default=0, ge=0, le=65535, description="First port of servers on machines of their own; 0: any free ones."
    )
    tp: Positive = Field(default=1, description="Tensor-parallel ranks of a server (sglang, vllm).")
    pp: Positive = Field(default=1, description="Pipeline-parallel ranks of a server (sglang, vllm).")
    dp: Positive = Field(default=1, description="Data-parallel copies within a server (sglang, vllm).")
    ep: Positive = Field(default=1, description="Expert-parallel ranks of a server (sglang, vllm).")
    model: str | None = Field(default=None, description="Model name sent to an external OpenAI-compatible server.")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of each request to an external API, e.g. {max_completion_tokens: 4096, temperature: null, "
        "reasoning_effort: low, extra_body: {top_k: 20}}; null leaves one out.",
    )
    api_key_env: str = Field(default="OPENAI_API_KEY", description="Environment variable that holds the API key.")
    dtype: DType = "auto"
    max_running: Positive = Field(default=64, description="Requests decoded together in one server.")
    context_length: Positive = Field(
        default=1024, description="Longest sequence in tokens, prompt and answer together."
    )
    threads: int | None = Field(default=None, ge=1, description="CPU threads of a server; all cores by default.")
    niceness: int = Field(
        default=10, ge=0, le=19, description="Niceness of a server that shares the CPU with a trainer."
    )
    args: tuple[str | int | float, ...] = Field(default=(), description="The server's own flags, passed through.")
    history: Literal["append", "branch"] | None = Field(
        default=None,
        description="If the chat template rewrites earlier turns: keep the sampled tokens, or render each turn again.",
    )
    tool_parser: str | None = Field(default=None, description="Tool-call format; null: detected in the chat template.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Variables of the chat template, e.g. enable_thinking."
    )
    probe_seconds: Seconds = Field(default=5.0, description="Seconds between health probes of a server.")
    patience: Seconds = Field(default=60.0, description="Longest wait in seconds if no server is reachable.")
    start_timeout: Seconds = 180.0
    request_timeout: Seconds = 600.0
    retry_seconds: Seconds = Field(
        default=1800.0,
        description="Most seconds that an episode waits for an external API that refuses (429), fails or is lost, "
        "before it counts as failed. They are added to rollout.episode_timeout.",
    )

    @property
    def ranks(self) -> int:
        """GPUs that one server takes."""
        return self.tp * self.pp * self.dp
