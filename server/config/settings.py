"""All settings in one pydantic-settings class: the service's, declared here, and the engine's, derived from
`EngineConfig`. `cli.settings` fills it from flags, variables and a file.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_origin, get_type_hints
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, create_model
from pydantic import field_validator as check_field
from pydantic import model_validator as check_model
from pydantic_settings import BaseSettings, CliPositionalArg, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from engine import ConfigError, EngineConfig, parse_bytes
from server.answering.formats import CALLS, REASONING, check_name
from server.config.sources import VariableSource
from server.config.wording import allowed, choices, did_you_mean, field_docs, is_switch

_DEMO_FOLDER = Path(__file__).parent.parent / "demo"
DEMOS = {"chat": _DEMO_FOLDER / "chat", "seq2seq": _DEMO_FOLDER / "seq2seq"}  # the bundled models
DEMO_MODEL = DEMOS["chat"]
SECRETS = frozenset({"hf_token", "api_key", "ssl_keyfile_password", "rate_limit_storage"})
_NAME = Field(default=None, min_length=1)  # text that may be missing but not empty


class ServerSettings(BaseModel):
    """Settings of the service. Constructed with keywords, it reads no other source.

    Attributes:
        host: address to listen on; 0.0.0.0 or :: listens on all addresses.
        port: port to listen on; 0 picks a free port.
        uds: path of a Unix socket to listen on, instead of host and port.
        api_server_count: number of processes that answer HTTP requests. More than 1 helps only if a small model serves
            so many clients that a single Python process is the bottleneck.
        root_path: path prefix under which a proxy publishes the service, such as /llm.
        forwarded_allow_ips: proxies whose X-Forwarded headers are trusted: addresses and networks, separated by commas,
            or * for all (default: FORWARDED_ALLOW_IPS, else this machine).
        ssl_keyfile: private key of the certificate (PEM), if it is not in ssl_certfile.
        ssl_certfile: certificate chain (PEM); enables HTTPS.
        ssl_keyfile_password: password of an encrypted ssl_keyfile.
        served_model_name: model id for clients (default: the hub id, or the name of the folder or file).
        strict_model_name: accept only the model id in requests. Without this, default, tgi, dummy and an empty name are
            accepted too, because clients of single-model servers send them.
        models: YAML file that lists several models to serve, with settings for each; instead of MODEL.
        max_memory: maximum memory that several models may take together, predicted as by octavo models, in bytes or as
            "6GiB". The least recently used model is unloaded for another one (default: 90 % of the memory that is free
            at the start).
        model_idle_time: with several models, seconds without a request after which one is unloaded; 0: never.
        model_load_timeout: maximum seconds that a request waits until its model has loaded; then it gets 503.
        log_level: debug, info, warning or error.
        log_format: console or json; auto means console on a terminal and json otherwise.
        log_prompts: log prompts and answers; long ones are shortened. Without this, no log line holds any of their
            text.
        otlp_traces_endpoint: full URL that receives traces in OpenTelemetry's OTLP over HTTP, such as
            http://localhost:4318/v1/traces; needs octavo[otel].
        shutdown_timeout: seconds that running requests get to finish after SIGTERM or Ctrl-C.
        max_engine_failures: stop the service after this many engine crashes in a row. Before that, the engine is
            restarted; a minute of service resets the count.
        liveness_timeout: seconds without a step after which /health/live reports a busy engine as stuck. After three
            times as long, the engine is killed and restarted.
        loop_timeout: seconds that the event loop may hang before the service exits with status 3, so that a supervisor
            can restart it; 0: never.
        api_key: key that clients must send. For several keys, repeat the flag or separate them by commas.
        api_key_file: file with further keys, one per line, each with optional roles, name and limits. SIGHUP reads it
            again.
        key_requests_per_minute: requests per minute for each API key; further ones get 429.
        key_max_concurrency: concurrent requests for each API key; further ones get 429.
        rate_limit_storage: URL of a Redis server that counts requests for several services together, such as
            redis://host:6379/0 (default: each service counts its own).
        public_metrics: serve /metrics without an API key.
        allowed_hosts: accepted Host headers besides localhost, this machine's name and IP addresses: names,
            *.example.org for all subdomains, or * for any. For several, repeat the flag or separate them by commas.
        allowed_origins: other origins whose web pages may use the service (CORS), such as https://app.example.org, or *
            for all. For several, repeat the flag or separate them by commas.
        max_api_memory: maximum memory of the HTTP process, in bytes or as "2GiB"; above it, new requests get 503. 0: no
            limit (default: its memory at the start plus a quarter of the memory that is free then).
        max_connections: maximum number of open connections. Above it, idle connections are closed, and only health and
            metrics requests are answered (default: as many as the limit on open files allows).
        max_body_size: largest request body, in bytes or as "16MiB".
        max_answer_size: maximum memory for one answer, estimated from n, max_tokens and logprobs; requests that need
            more are refused.
        max_header_size: largest request head, in bytes or as "64KiB".
        max_num_queued_reqs: maximum requests (prompts) that may wait in addition to max_num_seqs; further ones get 503.
            Embedding, classification and fill-mask requests are counted separately, each as one.
        max_num_queued_tokens: maximum prompt tokens that may wait for their first answer token; further requests get
            503. Embedding and classification inputs are counted separately (default: 4 times the size of the KV cache;
            without one, 512 inputs of full length).
        max_queue_time: maximum expected wait for the first token, in seconds, while the server is full. A request that
            would wait longer gets 503. 0: no limit (default: half the time to first token of an idle server).
        prefix_cache_scope: scope of shared cached prompts if API keys are set: key shares them among requests with the
            same key, global among all requests.
        enable_lora_loading: folder of LoRA adapters that clients with an admin API key may load and unload while the
            service runs, with /v1/load_lora_adapter and /v1/unload_lora_adapter (default: loading is disabled).
        tool_call_parser: format of tool calls in the model's output: a name from the documentation, none, or auto to
            find it in the chat template.
        reasoning_parser: format of reasoning in the model's output: a name from the documentation, none, or auto to
            find it in the chat template.
        tool_prompt: auto: if the chat template does not support tools, describe them in a system message. off: refuse
            requests with tools in that case.
        reasoning_budget: maximum tokens of reasoning in an answer, for requests that do not set it; -1: no limit.
        response_store: SQLite file that stores answers of /v1/responses, so that clients can continue or read them
            later. It is created if missing (default: nothing is stored).
        response_store_max_age: seconds that an answer is stored.
        response_store_max_size: maximum bytes of all stored answers, or a size such as "1GiB". Above it, the API key
            with the most data loses its oldest answers.
        batch_store: folder for the files and batches of /v1/files and /v1/batches. It is created if missing (default:
            there are no batches).
        batch_store_max_size: maximum bytes of the files of an API key, or a size such as "1GiB".
        batch_max_unfinished: maximum unfinished batches of an API key; further ones get 429.
        batch_max_running: maximum lines of batches that are answered at the same time. A line begins only while no
            client waits for the model.
        stream_keepalive: seconds of silence after which a stream sends a comment; 0: never.
        stream_stall_timeout: seconds after which a client that does not read its answer is disconnected.
        grammar_timeout: maximum seconds for compiling a JSON schema, regular expression or grammar.
        max_image_bytes: largest image file, in bytes or as "10MiB". Base64 makes it a third larger in the request body.
        max_image_pixels: maximum pixels of an image, before and after resizing.
        limit_mm_per_prompt: maximum images in a conversation, in vLLM's form: image=64, or {"image": 64}.
        max_audio_seconds: longest audio file for /v1/audio, in seconds.
        max_n: maximum answers per prompt that a request may ask for.
        enable_playground: serve the playground, a web page to try the model, at /. The page needs no API key, but its
            requests do.
        enable_cache_map: show in the playground the state of each page of the KV cache, without contents and request
            ids, to clients that may read /metrics.
    """

    # A message must not contain the input, which may be a secret.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=8000, ge=0, le=65535)
    uds: str | None = _NAME
    api_server_count: int = Field(default=1, ge=1, le=64)
    root_path: str = ""
    forwarded_allow_ips: str | None = _NAME
    ssl_keyfile: str | None = _NAME
    ssl_certfile: str | None = _NAME
    ssl_keyfile_password: str | None = Field(default=None, min_length=1, repr=False)
    served_model_name: str | None = _NAME
    strict_model_name: bool = False
    models: str | None = _NAME
    max_memory: int | str | None = None
    model_idle_time: float = Field(default=300.0, ge=0, allow_inf_nan=False)
    model_load_timeout: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "console", "json"] = "auto"
    log_prompts: bool = False
    otlp_traces_endpoint: str | None = _NAME
    shutdown_timeout: int = Field(default=30, ge=0)
    max_engine_failures: int = Field(default=3, ge=1)
    liveness_timeout: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    loop_timeout: float = Field(default=60.0, ge=0, allow_inf_nan=False)
    api_key: Annotated[tuple[str, ...], NoDecode] = Field(default=(), repr=False)
    api_key_file: str | None = _NAME
    key_requests_per_minute: int | None = Field(default=None, ge=1)
    key_max_concurrency: int | None = Field(default=None, ge=1)
    rate_limit_storage: str | None = Field(default=None, min_length=1, repr=False)
    public_metrics: bool = False
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    allowed_origins: Annotated[tuple[str, ...], NoDecode] = ()
    max_api_memory: int | str | None = None
    max_connections: int | None = Field(default=None, ge=1)
    max_body_size: int | str = "16MiB"
    max_answer_size: int | str = "64MiB"
    max_header_size: int | str = "64KiB"
    max_num_queued_reqs: int = Field(default=256, ge=0)
    max_num_queued_tokens: int | None = Field(default=None, ge=1)
    max_queue_time: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    prefix_cache_scope: Literal["key", "global"] = "key"
    enable_lora_loading: str | None = _NAME
    tool_call_parser: str = Field(default="auto", min_length=1)
    reasoning_parser: str = Field(default="auto", min_length=1)
    tool_prompt: Literal["auto", "off"] = "auto"
    reasoning_budget: int = Field(default=-1, ge=-1)
    response_store: str | None = _NAME
    response_store_max_age: float = Field(default=30 * 86400.0, gt=0, allow_inf_nan=False)
    response_store_max_size: int | str = "1GiB"
    batch_store: str | None = _NAME
    batch_store_max_size: int | str = "1GiB"
    batch_max_unfinished: int = Field(default=16, ge=1)
    batch_max_running: int = Field(default=8, ge=1)
    stream_keepalive: float = Field(default=15.0, ge=0, allow_inf_nan=False)
    stream_stall_timeout: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    grammar_timeout: float = Field(default=2.0, gt=0, le=60, allow_inf_nan=False)
    max_image_bytes: int | str = "10MiB"
    max_image_pixels: int = Field(default=32_000_000, ge=1, le=100_000_000)
    limit_mm_per_prompt: str = "image=64"
    max_audio_seconds: float = Field(default=3600.0, gt=0, le=86400, allow_inf_nan=False)
    max_n: int = Field(default=128, ge=1)
    enable_playground: bool = True
    enable_cache_map: bool = True

    def __init__(self, **values: Any) -> None:
        """Raises ConfigError: a value has the wrong type or is out of range; its message begins with the name."""
        try:
            super().__init__(**values)
        except ValidationError as problem:
            raise ConfigError(_explain(type(self), problem)) from None

    @check_field("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic treats true as 1.
        if isinstance(value, bool) and not is_switch(cls.model_fields[info.field_name or ""]):
            raise ValueError
        return value

    @check_field("api_key", mode="before")
    @classmethod
    def _split_keys(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = value.split(",")
        if not isinstance(value, list | tuple) or not all(isinstance(key, str) for key in value):
            return value
        keys = [key.strip() for key in value]
        if value and not any(keys):
            # An empty key must not mean "no key", which would open the service.
            raise ConfigError("api_key must not be empty.")
        for key in filter(None, keys):
            if not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError("api_key must consist of printable ASCII characters without spaces.")
        return [key for key in keys if key]

    @check_field("allowed_hosts", "allowed_origins", mode="before")
    @classmethod
    def _split_names(cls, value: Any) -> Any:
        parts = _split(value)
        return [part.lower() for part in parts] if isinstance(parts, list) else parts

    @check_field("allowed_hosts")
    @classmethod
    def _check_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for host in value:
            if not re.fullmatch(r"\*|(\*\.)?[a-z0-9_]([\w.-]*[a-z0-9_])?|\[?[0-9a-f:.]+\]?", host, re.ASCII):
                raise ConfigError(
                    "allowed_hosts must be names such as llm.example.org, *.example.org or *, without scheme and port, "
                    f"got {host!r}."
                )
        return value

    @check_field("allowed_origins")
    @classmethod
    def _check_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        origins = []
        for origin in value:
            if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[\w.\[\]:-]+/?", origin, re.ASCII):
                raise ConfigError(
                    "allowed_origins must be sites such as https://app.example.org or http://localhost:3000, null, or "
                    f"*, got {origin!r}."
                )
            # Origins in the form that browsers send.
            origins.append(re.sub(r"^(http://.*):80$|^(https://.*):443$", r"\1\2", origin.rstrip("/")))
        return tuple(origins)

    @check_field("tool_call_parser", "reasoning_parser")
    @classmethod
    def _check_parser(cls, value: str, info: ValidationInfo) -> str:
        check_name(CALLS if info.field_name == "tool_call_parser" else REASONING, value)
        return value

    @check_field("root_path")
    @classmethod
    def _check_root_path(cls, value: str) -> str:
        if value.strip("/") == "":
            return ""
        if not re.fullmatch(r"/[\w.~/-]*", value, re.ASCII):
            raise ConfigError(f"root_path must be a path such as /llm, of letters, digits and -._~/, got {value!r}.")
        return value.rstrip("/")

    @check_field("forwarded_allow_ips")
    @classmethod
    def _check_proxies(cls, value: str | None) -> str | None:
        for item in filter(None, (item.strip() for item in (value or "").split(","))):
            try:
                item == "*" or ipaddress.ip_network(item)
            except ValueError as problem:
                raise ConfigError(
                    "forwarded_allow_ips must be *, or addresses and networks separated by commas, "
                    f"got {value!r}: {problem}."
                ) from None
        return value

    @check_field("otlp_traces_endpoint")
    @classmethod
    def _check_collector(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            parts = urlsplit(value)
            whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            whole = False
        if whole and "@" in parts.netloc:  # not shown, because it may be a secret
            raise ConfigError(
                "otlp_traces_endpoint must not contain a user name or password. Set "
                "OTEL_EXPORTER_OTLP_TRACES_HEADERS instead."
            )
        if not whole or not parts.path:
            raise ConfigError(
                "otlp_traces_endpoint must be a URL with its path, such as http://localhost:4318/v1/traces, "
                f"got {value!r}."
            )
        return value

    @check_field(
        "max_body_size",
        "max_answer_size",
        "max_header_size",
        "max_image_bytes",
        "response_store_max_size",
        "batch_store_max_size",
    )
    @classmethod
    def _check_size(cls, value: int | str, info: ValidationInfo) -> int | str:
        parse_bytes(value, info.field_name or "")
        return value

    @check_field("limit_mm_per_prompt", mode="before")
    @classmethod
    def _read_most_images(cls, value: Any) -> str:
        """The setting as "image=N". It may be given in that form, as a mapping, or as a mapping in JSON."""
        given: Any = value
        if isinstance(value, str):
            name, sign, count = value.partition("=")
            given = {name.strip(): int(count)} if sign and count.strip().isdecimal() else None
            if value.lstrip().startswith("{"):
                try:
                    given = json.loads(value)
                except ValueError:
                    given = None
        most = given.get("image") if isinstance(given, dict) and set(given) == {"image"} else None
        if isinstance(most, bool) or not isinstance(most, int) or not 0 <= most <= 1024:
            raise ConfigError(
                f'limit_mm_per_prompt must be image=N or {{"image": N}}, N from 0 to 1024, got {value!r}. Videos and '
                "sound are not read in conversations."
            )
        return f"image={most}"

    @property
    def most_images(self) -> int:
        """Images of a conversation (`limit_mm_per_prompt`)."""
        return int(self.limit_mm_per_prompt.partition("=")[2])

    @check_field("rate_limit_storage")
    @classmethod
    def _check_storage(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("redis://", "rediss://", "unix://")):
            raise ConfigError("rate_limit_storage must begin with redis://, rediss:// or unix://.")
        return value

    @check_model(mode="after")
    def _check_key_limits(self) -> Self:
        for name in ("key_requests_per_minute", "key_max_concurrency", "rate_limit_storage"):
            if getattr(self, name) is not None and not self.api_key and self.api_key_file is None:
                raise ConfigError(f"{name} is set, but there are no API keys to limit. Set api_key_file.")
        return self

    @check_model(mode="after")
    def _check_lora_loading(self) -> Self:
        if self.enable_lora_loading is None:
            return self
        if not self.api_key and self.api_key_file is None:
            raise ConfigError(
                "enable_lora_loading is set, but there are no API keys: loading needs one with the role admin. Set "
                "api_key_file."
            )
        if not Path(self.enable_lora_loading).expanduser().is_dir():
            raise ConfigError(f"enable_lora_loading must be a folder, but {self.enable_lora_loading!r} is not one.")
        return self

    @check_field("max_api_memory")
    @classmethod
    def _check_memory(cls, value: int | str | None) -> int | str | None:
        if value is None or str(value).strip() == "0":
            return None if value is None else 0
        parse_bytes(value, "max_api_memory")
        return value

    @check_field("max_memory")
    @classmethod
    def _check_max_memory(cls, value: int | str | None) -> int | str | None:
        if value is not None:
            parse_bytes(value, "max_memory")
        return value

    @check_model(mode="after")
    def _check_certificate(self) -> Self:
        for name in ("ssl_keyfile", "ssl_keyfile_password"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise ConfigError(f"{name} is set, but ssl_certfile is not: HTTPS needs a certificate.")
        return self


class SettingsBase(ServerSettings, BaseSettings):
    """The sources of values; `Settings` adds them to the settings of service and engine."""

    model_config = SettingsConfigDict(
        env_prefix="OCTAVO_", env_ignore_empty=True, env_parse_none_str="null", cli_parse_none_str="null",
        cli_kebab_case=True, cli_implicit_flags=True,
    )  # fmt: skip

    config: str | None = Field(
        default=None, min_length=1, description="YAML file of settings; environment variables and flags override it."
    )

    demo: Literal["chat", "seq2seq"] | None = Field(
        default=None,
        description="the bundled model to serve: chat tells stories and answers questions, seq2seq translates a toy "
        "language; not together with MODEL.",
    )

    @check_field("catalogue", mode="before", check_fields=False)
    @classmethod
    def _split_files(cls, value: Any) -> Any:
        return _split(value)

    @check_field("lora_modules", mode="before", check_fields=False)
    @classmethod
    def _split_modules(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list | tuple):
            return value
        texts = (json.dumps(item) if isinstance(item, dict) else item for item in value)
        return [part for item in texts for part in (_modules(item) if isinstance(item, str) else [item])]

    @check_field("kv_events_config", "speculative_config", mode="before", check_fields=False)
    @classmethod
    def _write_json(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        method = value.get("method")
        # Values outside JSON, such as a date, become texts.
        return json.dumps({**value, "method": "off"} if method is False else value, default=str)

    @check_field("quantization_cache", "speculative_config", "tool_prompt", mode="before", check_fields=False)
    @classmethod
    def _take_off(cls, value: Any) -> Any:
        """YAML reads the bare word off as false."""
        return "off" if value is False else value

    @check_model(mode="before")
    @classmethod
    def _choose_demo(cls, values: Any) -> Any:
        """A demo is another name for a model."""
        demo, model = values.get("demo"), values.get("model")
        if demo not in DEMOS:
            return values
        if model is not None:
            raise ConfigError(
                f"demo {demo} selects a bundled model, but MODEL is also set, to {model!r}. Remove one of them."
            )
        return {**values, "model": str(DEMOS[demo])}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Variables, then keywords: `loading` puts the flags first, and passes the file's values as keywords."""
        return VariableSource(settings_cls), init_settings

    @property
    def engine(self) -> EngineConfig:
        """The engine's settings.

        Raises:
            ConfigError: a value is out of range or contradicts another.
        """
        config = EngineConfig(**{field.name: getattr(self, field.name) for field in dataclasses.fields(EngineConfig)})
        if self.enable_lora_loading is not None and config.max_loras is None:
            config = dataclasses.replace(config, max_loras=max(1, len(config.lora_modules)))
        return config


def _engine_fields() -> dict[str, Any]:
    hints, docs = get_type_hints(EngineConfig), field_docs(EngineConfig)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(EngineConfig):
        kind: Any = hints[field.name]
        default = field.default
        if field.name == "model":
            kind, default = CliPositionalArg[str], str(DEMO_MODEL)
        elif get_origin(kind) is tuple:
            kind = Annotated[kind, NoDecode]
        fields[field.name] = (
            kind,
            Field(default=default, description=docs[field.name], repr=field.name not in SECRETS),
        )
    return fields


ENGINE_FIELDS = frozenset(field.name for field in dataclasses.fields(EngineConfig))
Settings: type[SettingsBase] = create_model("Settings", __base__=SettingsBase, **_engine_fields())


def flag(name: str) -> str:
    """max_model_len -> --max-model-len; the model has no flag."""
    return "MODEL" if name == "model" else "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """max_model_len -> OCTAVO_MAX_MODEL_LEN."""
    return "OCTAVO_" + name.upper()


def description(name: str) -> str:
    """The help text of a setting."""
    return Settings.model_fields[name].description or field_docs(ServerSettings)[name]


def shown(name: str, value: Any) -> Any:
    """A value for display, without secrets."""
    if name not in SECRETS or not value:
        return value
    return "(hidden)"


def _split(value: Any) -> Any:
    """A list, or one text separated by commas, as a list; repeated flags may contain both. Other values stay
    unchanged."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        return value
    return [part.strip() for item in value for part in item.split(",") if part.strip()]


def _modules(text: str) -> list[str]:
    """The items of one text that is separated by commas, which JSON objects may also contain."""
    found, rest = list[str](), text.strip()
    while rest:
        end = rest.find(",") if "," in rest else len(rest)
        if rest.startswith("{"):
            try:
                _, end = json.JSONDecoder().raw_decode(rest)
            except (ValueError, RecursionError):
                end = len(rest)  # the engine's config explains the error
        found.append(rest[:end].strip())
        rest = rest[end:].lstrip(", ")
    return found


def _explain(cls: type[BaseModel], problem: ValidationError) -> str:
    """The first error as a sentence that begins with the setting's name."""
    error = problem.errors(include_url=False)[0]
    raised = error.get("ctx", {}).get("error")
    if isinstance(raised, ConfigError):
        return str(raised)
    name = str(error["loc"][0]) if error["loc"] else ""
    if name not in cls.model_fields:
        return f"unknown setting {name}."
    field, given = cls.model_fields[name], error["input"]
    near = did_you_mean(given, choices(field)) if isinstance(given, str) and name not in SECRETS else ""
    return f"{name} must be {allowed(field)}, got {shown(name, given)!r}{near or '.'}"
