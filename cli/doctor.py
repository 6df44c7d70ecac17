"""`octavo doctor`: problems that would prevent or impair a start, and their fixes. No weights are loaded."""

from __future__ import annotations

import json as jsonlib
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from http.client import HTTPException
from pathlib import Path

from cli import healthcheck
from cli.doctor_several import check_several
from cli.findings import Finding
from cli.terminal.paragraphs import filled
from cli.terminal.style import styled
from engine import ConfigError, EngineConfig, ModelFacts, NotDownloadedError, OctavoError, TorchFacts
from engine.host import gpus
from engine.host.logs import printable
from engine.text.processor import load_tokenizer
from server.config.settings import ServerSettings
from server.door.keys import read_api_keys
from server.door.listening import Listener, StartupError, check_certificate, is_public, usable_files
from server.door.rates import check_storage
from server.door.slots import OWN_FILES
from server.models.declared import Declared, memory_limit
from server.tracing.start import start_tracing

_OLDEST = (3, 11)
_SPARE = 2**30  # bytes that the two processes need besides weights and pages, with room for activations
_LARGEST_ANSWER = 2**20  # bytes to read of a response
_STYLES = {"ok": "green", "warn": "yellow", "FAIL": "bold red"}  # in a terminal


def examine(config: EngineConfig, settings: ServerSettings, several: Sequence[Declared] = ()) -> list[Finding]:
    """All checks, in the order of a start. `several`: the models, if there are several; `config` then has the settings
    for all."""
    findings = [check_python()]
    torch_found = list(check_torch(config))
    findings += torch_found
    if all(finding.verdict != "FAIL" for finding in torch_found):
        device, *more = check_device(config)
        findings += [device, *more]
        if device.verdict == "FAIL":  # without the device, the model's own checks run as for a CPU
            config = replace(config, device="cpu")
        if several:
            findings += check_several(several, memory_limit(settings))
        else:
            findings += check_model(config, memory=device.verdict != "FAIL")
        if config.quantization not in (None, "none"):
            findings.append(check_quantization_cache(config))
        if config.kv_disk is not None:
            findings.append(check_kv_disk(config))
    findings += check_listening(settings)
    findings += check_access(settings)
    findings += check_traces(settings)
    findings.append(check_socket_folder())
    findings.append(check_files(config, settings))
    return findings


def check_traces(settings: ServerSettings) -> Iterator[Finding]:
    """Check that traces can be made, if they are enabled; this does not contact the collector."""
    if settings.otlp_traces_endpoint is None:
        return
    try:
        tracing = start_tracing(settings, "0")
    except ConfigError as problem:
        yield Finding("traces", "FAIL", str(problem), "Install octavo[otel], or remove --otlp-traces-endpoint.")
    else:
        assert tracing is not None
        tracing.close()
        yield Finding("traces", "ok", f"to {settings.otlp_traces_endpoint}")


def report(findings: list[Finding], *, json: bool = False) -> str:
    if json:
        return jsonlib.dumps([asdict(finding) for finding in findings], indent=2)
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        verdict = styled(f"{finding.verdict:<4}", _STYLES[finding.verdict])
        column = " " * (width + 8)
        lines.append(f"{verdict}  {finding.check:<{width}}  {filled(column + finding.found, sys.stdout).lstrip()}")
        if finding.fix:
            lines.append(f"{column}-> {filled(f'{column}   {finding.fix}', sys.stdout).lstrip()}")
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in ("FAIL", "warn")}
    problems = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    return "\n".join([*lines, problems or "No problems found."])


def check_python() -> Finding:
    """Check that the Python version is supported."""
    found = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info < _OLDEST:
        return Finding("python", "FAIL", found, f"Use Python {'.'.join(map(str, _OLDEST))} or newer.")
    return Finding("python", "ok", found)


def check_torch(config: EngineConfig) -> Iterator[Finding]:
    """Check that torch can be imported, and find the kernels."""
    try:
        from engine import inspect_torch

        facts = inspect_torch()
    except Exception as error:  # a broken installation can raise any error
        yield Finding("torch", "FAIL", f"cannot be imported: {' '.join(str(error).split())}", "Reinstall Octavo.")
        return
    build = "a CPU build"
    if facts.cuda or facts.rocm:
        build = f"built for CUDA {facts.cuda}" if facts.cuda else f"built for ROCm {facts.rocm}"
    yield Finding("torch", "ok", f"{facts.version}, {build}")
    yield check_threads(config)
    if not facts.gpus:
        yield check_kernels(facts)


def check_kernels(facts: TorchFacts) -> Finding:
    """Check that the native kernels exist, or that the first start will compile them."""
    if facts.kernels:
        return Finding("kernels", "ok", facts.kernels)
    fix = "Install a C++ compiler (g++): the first start then builds kernels that make a CPU faster."
    return Finding("kernels", "warn", f"none: {facts.no_kernels}", fix)


def check_threads(config: EngineConfig) -> Finding:
    """Check that there are no more threads than CPUs."""
    from engine import inspect_threads

    threads = inspect_threads(config)
    found = f"{threads.count} for {threads.cpus:g} CPUs: {threads.reason}"
    if threads.too_many:
        fix = f"More threads than CPUs slow each other down: set --threads {max(1, int(threads.cpus))}."
        return Finding("threads", "warn", found, fix)
    return Finding("threads", "ok", found)


def check_device(config: EngineConfig) -> Iterator[Finding]:
    """Check that the device exists, that an existing GPU is used, and how much of its memory other processes use."""
    from engine import inspect_device, inspect_gpu, inspect_torch

    facts = inspect_torch()
    try:
        device = inspect_device(config)
    except ConfigError:
        found = f"{config.device} was requested, but torch sees {len(facts.gpus)} GPUs"
        if facts.gpus:
            yield Finding("device", "FAIL", found, gpus.another(len(facts.gpus)))
            return
        why, fix = gpus.obstacle(facts.cuda, facts.rocm)
        yield Finding("device", "FAIL", f"{found}: {why}", f"{fix} Or use --device cpu.")
        return
    if device == "cpu" and config.device == "auto" and gpus.has_driver():
        why, fix = gpus.obstacle(facts.cuda, facts.rocm)
        yield Finding("device", "warn", f"cpu, although there is an NVIDIA driver: {why}", fix)
    elif device.startswith("cuda"):
        gpu = inspect_gpu(config)
        yield Finding("device", "ok", gpu.chosen)
        why, fix = gpu.no_kernels
        yield Finding("kernels", "warn", f"none: {why}", fix) if why else Finding("kernels", "ok", "Triton's")
        yield from (Finding("gpu", "warn", *warning) for warning in gpu.warnings)
    else:
        yield Finding("device", "ok", device)


def check_model(config: EngineConfig, *, memory: bool = True) -> Iterator[Finding]:
    """Check that the checkpoint is complete and supported, that it fits into memory, and that its tokenizer can be
    read."""
    from engine import inspect_model

    try:
        facts = inspect_model(config)
    except NotDownloadedError as problem:
        fix = "octavo serve downloads it."
        if ":" not in config.model:  # a file of a repository; hf does not know it by that name
            fix += f" To download it now: hf download {config.model}"
        yield Finding("model", "warn", *_split(problem, fix))
        return
    except OctavoError as problem:
        yield Finding("model", "FAIL", *_split(problem, "Choose another model, or repair its folder."))
        return
    files = "1 file" if facts.weight_files == 1 else f"{facts.weight_files} files"
    room = f"context {facts.max_model_len} tokens"
    generates = "generate" in facts.tasks
    if not generates:
        kind = "" if facts.num_blocks else "encoder-only, "
        room = f"{kind}{', '.join(facts.tasks)}, inputs of up to {facts.max_model_len} tokens"
    elif facts.max_encoder_len is not None:
        inputs = "sound" if facts.hears else "prompts"
        room = f"encoder-decoder, {inputs} of {facts.max_encoder_len} tokens, answers of {facts.max_model_len}"
    found = f"{config.model}: {facts.architecture}, {files} of weights, {room}"
    yield Finding("model", "ok", found)
    if facts.ranks:
        parts = ", ".join(f"{rank.heads} heads and {_size(rank.weights)}" for rank in facts.ranks)
        yield Finding("ranks", "ok", f"{len(facts.ranks)} processes divide the model: {parts} of weights")
    if memory:
        yield check_memory(facts)
    if facts.num_blocks and (config.flash_prefill or facts.device.startswith("cuda")):
        yield check_flash(config, facts)
    if config.skip_tokenizer_init:
        yield Finding("tokenizer", "ok", "not loaded (--skip-tokenizer-init): requests and answers hold token ids")
    else:
        chats = generates and facts.max_encoder_len is None
        yield from check_tokenizer(config, facts.path, generates=generates and not facts.hears, chats=chats)


def check_memory(facts: ModelFacts) -> Finding:
    """Check that weights and pages fit into the free memory."""
    form = "packed" if facts.quantization == "stored" else facts.quantization or facts.dtype
    weights = f"weights {_size(facts.weights)} ({form})"
    found = f"{weights}, no KV cache"
    fix = "Use a 16-bit --dtype or a smaller model, or free memory."
    if facts.num_blocks:
        found = (
            f"{weights}, KV cache {_size(facts.pages)} for {facts.num_blocks * facts.block_size} tokens "
            f"({facts.kv_cache_dtype})"
        )
        fix = (
            "Lower --kv-cache-memory or --num-gpu-blocks-override, use a 16-bit --dtype or a smaller model, or free "
            "memory."
        )
    found += f"; {_size(facts.free)} free on {facts.device}"
    if facts.resident:
        found += (
            f"; the engine needs {_size(facts.resident)} before its first request and {_size(facts.peak)} while loading"
        )
    left = facts.free - facts.weights - facts.pages - facts.states
    if left < 0:
        return Finding("memory", "FAIL", found, fix)
    if left < _SPARE and facts.device == "cpu":
        return Finding("memory", "warn", f"{found}: only {_size(left)} are left for everything else", fix)
    return Finding("memory", "ok", found)


def check_flash(config: EngineConfig, facts: ModelFacts) -> Finding:
    """Try on the GPU which parts of long prompts torch's flash attention could compute, whether the setting is on or
    not."""
    from engine import inspect_flash

    check = "flash prefill"
    try:
        flash = inspect_flash(config, facts.path)
    except (OctavoError, RuntimeError) as problem:
        found, fix = _split(" ".join(str(problem).split()), "Free memory of the GPU.")
        return Finding(check, "warn", f"could not be tested: {found}", fix)
    why = f" ({flash.why})" if flash.why else ""
    layers = f"in {flash.layers} of {flash.of} layers{why}"
    if not config.flash_prefill:
        return Finding(check, "ok", f"off; torch's flash attention could compute long prompts {layers}")
    if not flash.layers:
        return Finding(
            check, "warn", f"not used: {flash.why}", "Remove --flash-prefill: Octavo's own kernels compute prompts."
        )
    if flash.too_short:
        return Finding(check, "warn", f"not used: {flash.too_short}", "Raise it, or remove --flash-prefill.")
    if flash.wrong:
        return Finding(
            check,
            "warn",
            f"torch's flash attention {layers}",
            "No action needed: Octavo's own kernels compute the rest.",
        )
    return Finding(check, "ok", f"torch's flash attention {layers}")


def check_quantization_cache(config: EngineConfig) -> Finding:
    """Check that quantised weights can be cached for the next start."""
    from engine import inspect_quantization_cache

    check, facts = "quantization cache", inspect_quantization_cache(config)
    if facts.folder is None:
        return Finding(
            check,
            "ok",
            "not used: --quantization-cache is off, or there is no home folder; weights are quantized at every start",
        )
    if facts.problem:
        fix = "Weights are quantized at every start. Set --quantization-cache to a writable folder, or to off."
        return Finding(check, "warn", f"cannot be used: {facts.problem}", fix)
    number = "1 file" if facts.entries == 1 else f"{facts.entries} files"
    return Finding(check, "ok", f"{facts.folder}: {number}, {_size(facts.size)}")


def check_kv_disk(config: EngineConfig) -> Finding:
    """Whether pages of the KV cache can be stored in the chosen folder."""
    from engine import inspect_kv_disk

    check = "pages on disk"
    try:
        facts = inspect_kv_disk(config)
    except ConfigError as problem:
        return Finding(check, "FAIL", *_split(problem))
    if facts.problem:
        fix = "Set --kv-disk to a folder that this user can write to."
        return Finding(check, "FAIL", f"cannot be stored: {facts.problem}", fix)
    found = f"{facts.folder}: {_size(facts.used)} of at most {_size(facts.limit)}"
    if facts.free < facts.limit - facts.used:
        fix = "Free some space, or lower --kv-disk-size. Once the disk is full, no more pages are written."
        return Finding(check, "warn", f"{found}, but only {_size(facts.free)} are free on the disk", fix)
    return Finding(check, "ok", found)


def _size(count: int) -> str:
    power = min(max(count.bit_length() - 1, 0) // 10, 4)
    return f"{count / 1024**power:.1f} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _split(message: object, fix: str = "") -> tuple[str, str]:
    """Split a message into the problem and the advice after it; `fix` is the advice for a message without any."""
    found, _, advice = str(message).partition(". ")
    return found.rstrip("."), advice or fix


def check_tokenizer(
    config: EngineConfig, path: Path, *, generates: bool = True, chats: bool = True
) -> Iterator[Finding]:
    """Check that there is a tokenizer and, for a chat model, a template."""
    source = config.tokenizer or str(path)
    if not Path(source).is_dir():
        fix = f"octavo serve downloads it. To download it now: hf download {source}"
        yield Finding("tokenizer", "warn", f"{source} is not a local folder, so it was not checked", fix)
        return
    try:
        tokenizer = load_tokenizer(source, chat_template=config.chat_template)
    except OctavoError as problem:
        yield Finding("tokenizer", "FAIL", *_split(problem, "Repair its files, or set --skip-tokenizer-init."))
        return
    if tokenizer is None:
        fix = (
            "Add tokenizer.json, or set --tokenizer to another folder. Without a tokenizer, prompts must be token ids."
        )
        yield Finding(
            "tokenizer", "warn", f"{source} has none: prompts must be token ids, and answers have no text", fix
        )
        return
    languages = len(tokenizer.languages.ids)
    yield Finding("tokenizer", "ok", f"{tokenizer.vocab_size} tokens" + f", {languages} languages" * bool(languages))
    if not generates:
        return
    if not chats:
        yield Finding(
            "chat",
            "ok",
            "not supported by encoder-decoder models; use /v1/completions, which takes the encoder's input",
        )
    elif tokenizer.chat_template is None:
        fix = "Use /v1/completions, or set --chat-template to a name (chatml, llama3, ...) or a file."
        yield Finding("chat template", "warn", "none: /v1/chat/completions answers 400", fix)
    else:
        yield Finding("chat template", "ok", f"{len(tokenizer.chat_template)} characters")


def check_listening(settings: ServerSettings) -> Iterator[Finding]:
    """Check that the address is free or used by an Octavo server, and that the certificate can be used."""
    check = "port" if settings.uds is None else "socket"
    try:
        with Listener(settings) as listener:
            yield Finding(check, "ok", f"{listener.url} is free")
    except StartupError as problem:
        yield _not_free(check, settings, problem)
    if settings.ssl_certfile is not None:
        try:
            check_certificate(settings)
            yield Finding("certificate", "ok", settings.ssl_certfile)
        except StartupError as problem:
            yield Finding("certificate", "FAIL", *_split(problem))


def _not_free(check: str, settings: ServerSettings, problem: StartupError) -> Finding:
    """The reason why the address cannot be bound. A running Octavo server is no error: a user may check a configuration
    before a restart."""
    served = _octavo_there(settings)
    if served is not None:
        another = "--port (OCTAVO_PORT)" if settings.uds is None else "--uds (OCTAVO_UDS)"
        fix = f"Stop that server first, or set another {another}."
        return Finding(check, "warn", f"Octavo already serves {served} at this address", fix)
    found, fix = _split(problem)
    if 0 < settings.port < 1024 and settings.uds is None:
        fix = f"Ports below 1024 may need root: use a higher port, such as 8000. {fix}"
    return Finding(check, "FAIL", found, fix)


def _octavo_there(settings: ServerSettings) -> str | None:
    """The model of the Octavo server at the settings' address; None if there is none. A key that is only in the key
    file is not sent; the page at / then identifies the server as Octavo."""
    listening = {
        "host": settings.host,
        "port": str(settings.port),
        "uds": settings.uds,
        "ssl_certfile": settings.ssl_certfile,
    }
    try:
        address = healthcheck.find({name: value for name, value in listening.items() if value}, {})
        key = settings.api_key[0] if settings.api_key else ""
        status, body = healthcheck.ask(address, "/v1/models", key=key, most=_LARGEST_ANSWER)
        if status == 200:
            cards = jsonlib.loads(body)["data"]
            return next((printable(str(card["id"])) for card in cards if card["owned_by"] == "octavo"), None)
        page = healthcheck.ask(address, "/", most=_LARGEST_ANSWER)[1] if status in (401, 403) else ""
    except (OSError, HTTPException, ValueError, TypeError, LookupError):
        return None  # nothing answers, or another program does
    return "a model" if "<title>Octavo</title>" in page else None


def check_access(settings: ServerSettings) -> Iterator[Finding]:
    """Check that keys can be read; without a key, only this machine has access."""
    try:
        read_api_keys(settings)
    except ConfigError as problem:
        yield Finding("access", "FAIL", *_split(problem, "Correct --api-key-file (OCTAVO_API_KEY_FILE)."))
        return
    try:
        check_storage(settings.rate_limit_storage)
    except ConfigError as problem:
        yield Finding("access", "FAIL", *_split(problem, "Correct --rate-limit-storage (OCTAVO_RATE_LIMIT_STORAGE)."))
        return
    if settings.api_key or settings.api_key_file:
        yield Finding("access", "ok", "an API key is required")
    elif is_public(settings):
        fix = "Set OCTAVO_API_KEY or --api-key-file, or listen on 127.0.0.1 behind a gateway that checks keys."
        yield Finding("access", "warn", f"{settings.host} is open to other machines, and no API key is set", fix)
    else:
        yield Finding("access", "ok", "this machine only, no API key")


def check_socket_folder() -> Finding:
    """Check that the engine's socket can be created."""
    try:
        from engine import inspect_socket_folder

        return Finding("engine socket", "ok", f"in {inspect_socket_folder()}")
    except ConfigError as problem:
        return Finding("engine socket", "FAIL", *_split(problem))


def check_files(config: EngineConfig, settings: ServerSettings) -> Finding:
    """Check that there are enough file descriptors for all running and waiting requests."""
    limit = usable_files()
    needed = config.most_seqs + settings.max_num_queued_reqs + OWN_FILES
    found = f"{limit}; running and waiting requests need up to {needed}"
    if limit >= needed:
        return Finding("open files", "ok", found)
    return Finding("open files", "warn", found, f"Run ulimit -n {needed} as root, or lower --max-num-queued-reqs.")
