"""Every setting of Baton, in one place: sections of `baton.toml`, each field with its unit and default.

One frozen object holds them all; a service reads the sections it needs. Secrets never stand here: see
`shared/store/secrets.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.contracts.grants import CLASSES
from shared.tools.formats import ReasoningSetting, ToolSetting

Dtype = Literal["auto", "float32", "bfloat16"]
_DTYPE = "weights and KV; auto: the fastest whose quality passed for the model, see ./baton bench quality"
_TOOLS = "how it calls tools; auto: as its chat template says, else as Hermes does"
_REASONING = "whether it thinks between <think> tags first; auto: as its chat template says"
POOL_PATTERN = r"^[a-z0-9-]{1,40}$"
_CLASS = rf"({'|'.join(CLASSES)})"
CLASSES_PATTERN = rf"^( *{_CLASS} *(, *{_CLASS} *)*)?$"
POOLS_PATTERN = rf"^( *{_CLASS}(\+{_CLASS})* *(, *{_CLASS}(\+{_CLASS})* *)*)?$"
"""An entry a worker, the classes of one joined by +; see `shared/settings/request_classes.py`."""
Quantization = Literal["none", "int8", "int4", "int4-g64", "int4-g128", "w8a8", "fp8"]
"""As `kernels.linear.quantize.GPU_QUANTS`, which a process without torch cannot ask; a test holds them together."""
GPU_ONLY: tuple[Quantization, ...] = ("w8a8", "fp8")
"""Of those, what no CPU multiplies."""


class Section(BaseModel):
    """A table of `baton.toml`."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class GatewaySettings(Section):
    """The HTTP door."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8080, ge=0, le=65535, description="TCP port; 0 takes a free one")
    max_body_bytes: int = Field(4 * 1024 * 1024, gt=0, description="largest request body, bytes")
    shutdown_s: float = Field(10.0, ge=0, description="how long streams may finish when the gateway stops, seconds")
    tls_cert: str = Field("", description="PEM file of the certificate chain; with tls_key: HTTPS instead of HTTP")
    tls_key: str = Field("", description="PEM file of the certificate's private key, without a password")
    trusted_proxies: str = Field(
        "", description="addresses or networks, comma-separated, whose X-Forwarded-For and -Proto are believed"
    )
    cors_origins: str = Field(
        "", description="origins, comma-separated, whose pages may call the API from a browser; * is any"
    )
    keep_alive_s: float = Field(
        15.0, ge=0, description="a stream silent for so long gets an SSE comment, seconds; 0: none"
    )
    keyed_linger_s: float = Field(
        60.0, ge=0, description="how long a request with an Idempotency-Key goes on without its client, seconds"
    )
    store_responses: Literal["asked", "always", "never"] = Field(
        "asked", description="whose responses are stored: where store is true, unless it is false, or nobody's"
    )


class ModelSettings(Section):
    """What is served."""

    path: str = Field("", description="folder with config.json, safetensors and tokenizer.json; empty: default model")
    name: str = Field("smollm2-135m-instruct", min_length=1, description="name clients ask for")
    dtype: Dtype = Field("auto", description=_DTYPE)
    pool: str = Field("default", pattern=POOL_PATTERN, description="model pool: part of the scheduler's subjects")
    generation_config: Literal["auto", "none"] = Field(
        "auto", description="sampling when a client names none: the model's own defaults, or the API's"
    )
    tools: ToolSetting = Field("auto", description=_TOOLS)
    reasoning: ReasoningSetting = Field("auto", description=_REASONING)


class ModelEntry(Section):
    """One of several models, each with a pool of workers of its own. A table of `[[models]]`."""

    name: str = Field(min_length=1, description="name clients ask for")
    path: str = Field("", description="folder with config.json, safetensors and tokenizer.json; empty: default model")
    dtype: Dtype = Field("auto", description=_DTYPE)
    pool: str = Field("", pattern=rf"^$|{POOL_PATTERN}", description="its pool; empty: derived from the name")
    generation_config: Literal["auto", "none"] = Field(
        "auto", description="sampling when a client names none: the model's own defaults, or the API's"
    )
    tools: ToolSetting = Field("auto", description=_TOOLS)
    reasoning: ReasoningSetting = Field("auto", description=_REASONING)
    quant: Quantization | None = Field(None, description="weights of its layers; none: as [engine] says")
    aliases: tuple[str, ...] = Field((), description="other names clients may ask for")
    prefill: int | None = Field(None, ge=0, le=64, description="prefill workers; none: as [workers] says")
    decode: int | None = Field(None, ge=1, le=64, description="decode workers; none: as [workers] says")
    prefill_classes: str | None = Field(
        None, pattern=POOLS_PATTERN, description="request classes of its prefill workers; none: as [workers] says"
    )
    decode_classes: str | None = Field(
        None, pattern=POOLS_PATTERN, description="request classes of its decode workers; none: as [workers] says"
    )
    pool_bytes: int = Field(0, ge=0, description="size of each of its workers' pools, bytes; 0: as [kv] says")


class KvSettings(Section):
    """KV cache blocks."""

    dtype: Literal["auto", "bfloat16", "float32", "float16", "int8", "fp8"] = Field(
        "auto",
        description="auto: as the model computes; float16: on a CPU, half the memory of float32; int8: half of "
        "bfloat16's, by native kernels or on a GPU; fp8: on a GPU, sm_89 or newer",
    )
    block_size: int = Field(32, ge=1, le=1024, description="tokens in a block")
    pool_bytes: int = Field(0, ge=0, description="size of each worker's pool, bytes; 0 derives it from free memory")
    eviction: Literal["reuse", "priority", "recency"] = Field(
        "reuse",
        description="which unused blocks are given up last: those a second request used, those of urgent classes, or "
        "those used last; always the largest tenant's first",
    )
    dir: str = Field("", description="folder of the pool files, best on tmpfs; empty: a private one in /dev/shm")
    transfer: Literal["auto", "shared-memory", "tcp"] = Field(
        "auto",
        description="how KV goes to a decode worker: through a folder that both share, over TCP, or auto: over TCP "
        "where they share none",
    )
    transfer_host: str = Field(
        "127.0.0.1",
        description="address at which prefill workers serve KV over TCP; any but loopback needs the three files below",
    )
    transfer_port: int = Field(
        0, ge=0, le=65535, description="TCP port of that, or the next free one of 64 from it on; 0 takes a free one"
    )
    transfer_name: str = Field(
        "", description="host that decode workers connect to, if not transfer_host; its certificate must have that name"
    )
    transfer_cert: str = Field("", description="PEM file of a worker's certificate chain, for KV over TLS")
    transfer_key: str = Field("", description="PEM file of that certificate's private key, without a password")
    transfer_ca: str = Field(
        "", description="PEM file of the authority of workers' certificates, and of no others: who has one may connect"
    )


class EngineSettings(Section):
    """One worker's step loop."""

    token_budget: int = Field(192, ge=1, description="most tokens in one step of a decode worker")
    prefill_token_budget: int = Field(
        512, ge=1, description="most tokens in one step of a prefill worker, or of a CPU's while nothing decodes"
    )
    itl_target_ms: Annotated[float, Field(ge=0)] | Literal["auto"] = Field(
        "auto",
        description="longest step while tokens stream, milliseconds, kept by smaller chunks; 0: no limit; auto: 39, or "
        "a step without prompts and 0.075 of it more for each sequence, whichever is longer",
    )
    publish_interval_ms: float = Field(
        50.0,
        ge=0,
        le=1000,
        description="tokens behind a request's first are gathered while the next comes within so long, milliseconds, "
        "and sent as one piece; at most engine.itl_target_ms where that is a number; 0: each by itself",
    )
    chunk_size: int = Field(0, ge=0, description="most tokens of one prompt in a step; 0: the token budget")
    max_sequences: int = Field(32, ge=1, description="most sequences running in one worker")
    classes: str = Field(
        "", pattern=CLASSES_PATTERN, description="request classes a worker takes, comma-separated; empty: all"
    )
    depth: int = Field(1, ge=0, le=1, description="steps planned ahead of the one in flight")
    batching: Literal["continuous", "static", "dynamic"] = Field(
        "continuous", description="when a sequence may begin: at once, or with a batch that runs until all have ended"
    )
    speculation: Literal["off", "prompt-lookup"] = Field(
        "off",
        description="verify guesses of the next tokens in one step, to the same output: prompt-lookup guesses by what "
        "followed the last tokens earlier in prompt and output; on CPUs only",
    )
    speculation_max_tokens: int = Field(
        8, ge=1, le=32, description="most tokens guessed for a sequence in a step; fewer where they do not pay"
    )
    batch_size: int = Field(8, ge=1, description="most sequences of a static or dynamic batch")
    batch_window_s: float = Field(0.05, ge=0, description="how long a dynamic batch waits to become full, seconds")
    threads: int = Field(
        0, ge=0, le=1024, description="most compute threads of a worker; 0: all cores, shared with other workers"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="what computes: auto is an NVIDIA GPU, sm_80 or newer, where torch and Triton find one"
    )
    gpu_share: float = Field(
        0.0, ge=0, le=0.98, description="most of the GPU's memory a worker takes, a share; 0: 0.9 among all workers"
    )
    kernels: Literal["auto", "torch", "native", "triton"] = Field(
        "auto",
        description="what computes on a CPU: native kernels compiled here, or torch; auto: native where that can be",
    )
    quick_head: bool = Field(
        True, description="keep the output head as 8-bit integers too: greedy steps read less, to the same tokens"
    )
    quant: Quantization = Field(
        "none",
        description="weights of layers as integers, by native kernels or on a GPU; int4 has groups of 32 inputs; w8a8 "
        "and fp8 round rows too, on a GPU only; none: as the checkpoint has them",
    )
    exact: bool = Field(
        False,
        description="on a GPU, sum so that no bit of a result depends on what shares a step, which is slower; a CPU "
        "always does",
    )


class SchedulerSettings(Section):
    """Queueing and placement."""

    max_queued: int = Field(
        1024, ge=1, description="most requests waiting; beyond it only tenants that have less than their share may wait"
    )
    slo_ttft_s: float = Field(60.0, gt=0, description="longest predicted wait of an interactive request, seconds")
    analysis_slo_ttft_s: float = Field(
        0.0, ge=0, description="longest predicted wait of an analysis request, seconds; 0: its budget"
    )
    batch_slo_ttft_s: float = Field(
        0.0, ge=0, description="longest predicted wait of a batch request, seconds; 0: its budget"
    )
    interactive_max_wait_s: float = Field(
        30.0, ge=0, description="wait after which an interactive request goes before its turn, seconds; 0: never"
    )
    analysis_max_wait_s: float = Field(300.0, ge=0, description="the same of an analysis request, seconds; 0: never")
    batch_max_wait_s: float = Field(0.0, ge=0, description="the same of a batch request, seconds; 0: never")
    beat_s: float = Field(1.0, gt=0, description="interval of the scheduler's beats, seconds")
    worker_timeout_s: float = Field(
        10.0, ge=2, description="silence, or a step without end, after which a worker counts as lost, seconds"
    )
    lease_s: float = Field(5.0, ge=1, description="leader's lease, seconds")


class PolicySettings(Section):
    """Defaults of tenants without limits of their own (0 = no limit), and how long a request may take."""

    requests_per_minute: int = Field(0, ge=0, description="requests a tenant may start in a minute")
    tokens_per_minute: int = Field(0, ge=0, description="prompt and output tokens a tenant may use in a minute")
    max_parallel: int = Field(0, ge=0, description="requests of a tenant that may run at once")
    default_max_tokens: int = Field(1024, ge=1, description="output tokens when a request names no max_tokens")
    interactive_budget_s: float = Field(600.0, ge=1, description="time an interactive request may take, seconds")
    analysis_budget_s: float = Field(3600.0, ge=1, description="time an analysis request may take, seconds")
    batch_budget_s: float = Field(86400.0, ge=1, description="time a batch request may take, seconds")
    idempotency_ttl_s: int = Field(
        86400, ge=60, le=30 * 86400, description="how long an Idempotency-Key is remembered, its answer too, seconds"
    )
    response_ttl_s: int = Field(
        30 * 86400, ge=60, le=366 * 86400, description="how long a stored response is kept from its end, seconds"
    )
    tenants: str = Field("", description="0600 JSON file of more tenants and key hashes, applied at every start")


class BatchSettings(Section):
    """Files and batch jobs."""

    max_running: int = Field(16, ge=1, description="most items at work at once, of all tenants together")
    max_file_bytes: int = Field(200 * 1024 * 1024, gt=0, description="largest uploaded file, bytes")
    max_stored_bytes: int = Field(
        2 * 1024 * 1024 * 1024,
        ge=0,
        description="bytes a tenant may keep in files, batches and queued lines; 0 = no limit",
    )
    max_lines: int = Field(50_000, ge=1, description="most lines of one batch")
    enqueued_tokens: int = Field(
        0,
        ge=0,
        description="prompt tokens a tenant may have waiting in batches; 0 = no limit",
    )
    max_queued_lines: int = Field(10_000, ge=1, description="most lines a tenant may have waiting that came over NATS")
    window_s: float = Field(86400.0, gt=0, description="time a batch may take before it expires, seconds")


class BusSettings(Section):
    """NATS."""

    nats_url: str = Field("", description="nats://host:port of a running server; empty: `./baton up` starts one")
    port: int = Field(
        0, ge=0, le=65535, description="TCP port, on loopback, of the server `./baton up` starts; 0 takes a free one"
    )


class StoreSettings(Section):
    """Redis."""

    redis_url: str = Field("", description="redis://host:port/db of a running server; empty: `./baton up` starts one")


class WorkersSettings(Section):
    """The workers `./baton up` starts."""

    fake: bool = Field(False, description="workers that make up tokens, for trying the system without a model")
    prefill: int = Field(1, ge=0, le=64, description="number of prefill workers")
    decode: int = Field(1, ge=1, le=64, description="number of decode workers")
    decode_classes: str = Field(
        "",
        pattern=POOLS_PATTERN,
        description="request classes of the first decode workers, as interactive, analysis+batch; others take all",
    )
    prefill_classes: str = Field("", pattern=POOLS_PATTERN, description="the same of prefill workers")


class LogSettings(Section):
    """Logs of every service."""

    format: Literal["plain", "json"] = Field("plain", description="plain lines for people, or JSON lines")
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severity written")


class LifecycleSettings(Section):
    """How processes that stand still are found and ended."""

    hang_s: float = Field(
        30.0,
        ge=0,
        description="a process that stands still for so long is ended, and started again by `./baton up` or compose, "
        "seconds; 0: never",
    )


class MetricsSettings(Section):
    """Prometheus metrics: every process serves `/metrics` on a listener of its own."""

    enabled: bool = Field(True, description="serve metrics")
    host: str = Field("127.0.0.1", description="address to listen on; not the clients' door")
    port: int = Field(
        0, ge=0, le=65535, description="TCP port; 0 takes a free one; `./baton up` counts on from it, one a process"
    )
    tenant_labels: bool = Field(False, description="tell tenants apart in policy's metrics")


class TelemetrySettings(Section):
    """Traces."""

    otlp_endpoint: str = Field(
        "",
        pattern=r"^(https?://\S+)?$",
        description="trace collector, OTLP over HTTP, such as http://127.0.0.1:4318; empty: none",
    )


class Settings(BaseModel):
    """All sections. Which models there are, in either form, tells `shared/settings/models.py`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gateway: GatewaySettings = GatewaySettings()
    model: ModelSettings = ModelSettings()
    models: tuple[ModelEntry, ...] = Field((), description="several models instead of [model]")
    kv: KvSettings = KvSettings()
    engine: EngineSettings = EngineSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    policy: PolicySettings = PolicySettings()
    batch: BatchSettings = BatchSettings()
    bus: BusSettings = BusSettings()
    store: StoreSettings = StoreSettings()
    workers: WorkersSettings = WorkersSettings()
    log: LogSettings = LogSettings()
    lifecycle: LifecycleSettings = LifecycleSettings()
    metrics: MetricsSettings = MetricsSettings()
    telemetry: TelemetrySettings = TelemetrySettings()


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Settings.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}
