"""The groups of settings in the help."""

from __future__ import annotations

GROUPS: dict[str, tuple[str, ...]] = {
    "model": (
        "model", "demo", "served_model_name", "strict_model_name", "revision", "hf_token", "mmproj", "tokenizer",
        "skip_tokenizer_init", "chat_template", "generation_config", "tool_call_parser", "reasoning_parser",
        "tool_prompt", "reasoning_budget", "catalogue", "show_progress",
    ),
    "several models": ("models", "max_memory", "model_idle_time", "model_load_timeout"),
    "adapters": ("lora_modules", "max_loras", "max_lora_rank", "lora_dtype", "enable_lora_loading"),
    "device and formats": (
        "device", "dtype", "quantization", "quantization_cache", "share_weights", "threads",
        "distributed_executor_backend", "tensor_parallel_size", "enforce_eager", "flash_prefill", "seed",
    ),
    "batching": (
        "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_step_time", "async_scheduling",
        "speculative_config",
    ),
    "KV cache": (
        "kv_cache_memory", "kv_cache_dtype", "block_size", "gpu_memory_utilization", "num_gpu_blocks_override",
        "enable_prefix_caching", "prefix_cache_scope", "kv_disk", "kv_disk_size", "kv_events_config",
    ),
    "address": ("host", "port", "uds", "api_server_count", "root_path", "forwarded_allow_ips"),
    "access": (
        "api_key", "api_key_file", "key_requests_per_minute", "key_max_concurrency", "rate_limit_storage",
        "public_metrics", "allowed_hosts", "allowed_origins", "ssl_certfile", "ssl_keyfile",
        "ssl_keyfile_password",
    ),
    "playground": ("enable_playground", "enable_cache_map"),
    "limits": (
        "max_api_memory", "max_connections", "max_num_queued_reqs", "max_num_queued_tokens", "max_queue_time", "max_n",
        "max_num_beams", "grammar_timeout", "max_audio_seconds", "max_body_size", "max_answer_size", "max_header_size",
        "max_image_bytes", "max_image_pixels", "limit_mm_per_prompt", "stream_keepalive", "stream_stall_timeout",
    ),
    "stored responses": ("response_store", "response_store_max_age", "response_store_max_size"),
    "batches": ("batch_store", "batch_store_max_size", "batch_max_unfinished", "batch_max_running"),
    "logs and traces": ("log_level", "log_format", "log_prompts", "otlp_traces_endpoint"),
    "shutdown and failures": ("shutdown_timeout", "liveness_timeout", "loop_timeout", "max_engine_failures"),
    "settings": ("config",),
}  # fmt: skip
OTHER = "other settings"
_GROUP_OF = {name: title for title, names in GROUPS.items() for name in names}


def group_of(name: str) -> str:
    """The title of the group that a setting belongs to."""
    return _GROUP_OF.get(name, OTHER)
