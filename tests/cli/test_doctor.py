"""`octavo doctor`: each verdict, good and bad, and its exit status."""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from fake_client import FakeClient, byte_tokenizer, hf_byte_tokenizer, say
from support.service import PATIENCE, wait_for

import engine
from cli import doctor
from cli.doctor import Finding
from cli.main import main
from engine import EngineConfig, inspect_model
from engine.backends import native
from engine.host import cpus, gpus
from engine.host.cgroups import available_memory
from server.app import create_app
from server.config.settings import DEMO_MODEL, ServerSettings

CPU_BUILD = engine.TorchFacts(version="2.13.0+cpu", cuda=None, gpus=(), kernels="avx2")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the bundled checkpoint, to be damaged."""
    return Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))


def examine(model: Path | str = DEMO_MODEL, **settings: Any) -> dict[str, Finding]:
    """Findings by check."""
    own = {name: settings.pop(name) for name in list(settings) if name in ServerSettings.model_fields}
    config = EngineConfig(model=str(model), **settings)
    return {finding.check: finding for finding in doctor.examine(config, ServerSettings(**({"port": 0} | own)))}


def failed(finding: Finding) -> str:
    """What a failing check says, in one line."""
    assert finding.verdict == "FAIL", finding
    assert finding.fix
    return f"{finding.found} -> {finding.fix}"


def warned(finding: Finding) -> str:
    """What a warning says, in one line."""
    assert finding.verdict == "warn", finding
    assert finding.fix
    return f"{finding.found} -> {finding.fix}"


def one(findings: Iterable[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_all_is_well(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "load", lambda *arguments, **options: pytest.fail("weights were loaded"))
    monkeypatch.setattr(native, "prospect", lambda: ("avx2", ""))
    assert main(["doctor", "--port", "0", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    checks = " ".join(line.split()[1] for line in lines[:-1])
    assert checks == "python torch threads kernels device model memory tokenizer chat port access engine open"
    assert {line.split()[0] for line in lines[:-1]} == {"ok"}
    assert lines[-1] == "No problems found."


def test_a_failure_is_status_1_and_names_its_cure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["doctor", str(tmp_path / "absent"), "--port", "0", "--host", "0.0.0.0"]
    assert main(arguments) == 1
    text = capsys.readouterr().out
    assert f"FAIL  model          The folder {tmp_path / 'absent'} does not exist" in text
    assert "warn  access" in text
    assert text.splitlines()[-1] == "1 FAIL, 1 warn"
    assert main([*arguments, "--json"]) == 1
    findings = {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings["model"]["verdict"] == "FAIL"
    assert findings["model"]["fix"]
    assert findings["python"] == {
        "check": "python", "verdict": "ok", "found": findings["python"]["found"], "fix": ""
    }  # fmt: skip


def test_warnings_alone_are_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--port", "0", "--host", "0.0.0.0"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 warn"


def test_where_quantised_weights_are_kept(tmp_path: Path) -> None:
    """Looking makes nothing."""
    cache = tmp_path / "cache"
    look = {"quantization": "int8", "device": "cpu", "quantization_cache": str(cache)}
    assert examine(**look)["quantization cache"].found == f"{cache}: 0 files, 0.0 bytes"
    assert not cache.exists()
    engine.LLM(str(DEMO_MODEL), show_progress=False, num_gpu_blocks_override=64, **look).close()
    (entry,) = cache.iterdir()
    (cache / "notes").write_text("of somebody")
    found = examine(**look)["quantization cache"].found
    assert found == f"{cache}: 1 file, {entry.stat().st_size / 2**20:.1f} MiB"
    cache.chmod(0o777)
    text = warned(examine(**look)["quantization cache"])
    assert "other users can write to" in text
    assert "--quantization-cache" in text
    look["quantization_cache"] = str(entry / "folder")
    assert "cannot be written to" in warned(examine(**look)["quantization cache"])
    look["quantization_cache"] = "off"
    assert "not used" in examine(**look)["quantization cache"].found
    assert "quantization cache" not in examine(device="cpu")


def test_where_pages_are_kept(tmp_path: Path) -> None:
    """Looking makes nothing."""
    folder = tmp_path / "pages"
    look = {"device": "cpu", "kv_disk": str(folder), "kv_disk_size": "1MiB"}
    assert examine(**look)["pages on disk"].found == f"{folder}: 0.0 bytes of at most 1.0 MiB"
    assert not folder.exists()
    text = warned(examine(**look | {"kv_disk_size": "4000TiB"})["pages on disk"])
    assert "lower --kv-disk-size" in text
    text = failed(examine(**look, enable_prefix_caching=False)["pages on disk"])
    assert "enable_prefix_caching is false" in text
    folder.write_text("no folder")
    assert f"{folder} cannot be written to" in failed(examine(**look)["pages on disk"])
    assert "pages on disk" not in examine(device="cpu")


# ---------------------------------------------------------------- torch and the device


def test_an_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 9))
    assert "3.11" in failed(doctor.check_python())


def test_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("libgomp.so.1: cannot open\nshared object file")

    monkeypatch.setattr(engine, "inspect_torch", broken, raising=False)
    findings = examine()
    assert "libgomp.so.1: cannot open shared object file" in failed(findings["torch"])
    assert "model" not in findings
    assert findings["port"].verdict == "ok"


def test_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = replace(CPU_BUILD, kernels="", no_kernels="no C++ compiler was found")
    monkeypatch.setattr(engine, "inspect_torch", lambda: facts, raising=False)
    found = {finding.check: finding for finding in doctor.check_torch(EngineConfig(model="m"))}
    assert "no C++ compiler was found" in warned(found["kernels"])
    assert "g++" in found["kernels"].fix
    monkeypatch.setattr(engine, "inspect_torch", lambda: replace(facts, gpus=("H200",)), raising=False)
    assert "kernels" not in {finding.check for finding in doctor.check_torch(EngineConfig(model="m"))}, (
        "a GPU has no use for them"
    )


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "cpu_share", lambda: 1.5)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert examine()["threads"].found == "1 for 1.5 CPUs: what the container may use"
    found = examine(threads=64)["threads"]
    assert "64 for 1.5 CPUs: --threads" in warned(found)
    assert "--threads 1." in found.fix
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "3 for 1.5 CPUs: OMP_NUM_THREADS" in warned(examine()["threads"])


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(engine, "inspect_torch", lambda: CPU_BUILD, raising=False)
    (model / "model.safetensors").unlink()
    findings = examine(model, device="cuda:3")
    text = failed(findings["device"])
    assert "cuda:3 was requested, but torch sees 0 GPUs: torch is a CPU build" in text
    assert "--device cpu" in text
    assert "holds no weights" in failed(findings["model"]), "the model is looked at all the same"

    cuda_build = replace(CPU_BUILD, version="2.13.0+cu130", cuda="13.0")
    monkeypatch.setattr(engine, "inspect_torch", lambda: cuda_build, raising=False)
    monkeypatch.setattr(gpus, "has_driver", lambda: False)
    assert "Install the GPU's driver" in failed(one(doctor.check_device(EngineConfig(model="m", device="cuda:3"))))
    monkeypatch.setattr(gpus, "has_driver", lambda: True)
    assert "Check nvidia-smi, CUDA_VISIBLE_DEVICES" in failed(
        one(doctor.check_device(EngineConfig(model="m", device="cuda:3")))
    )


def test_a_driver_without_a_cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "inspect_torch", lambda: CPU_BUILD, raising=False)
    monkeypatch.setattr(engine, "inspect_device", lambda config: "cpu", raising=False)
    monkeypatch.setattr(gpus, "has_driver", lambda: True)
    assert "Install a CUDA build of torch" in warned(one(doctor.check_device(EngineConfig(model="m"))))
    monkeypatch.setattr(engine, "inspect_torch", lambda: replace(CPU_BUILD, rocm="7.0"), raising=False)
    assert "torch is built for ROCm 7.0" in warned(one(doctor.check_device(EngineConfig(model="m"))))
    assert next(doctor.check_torch(EngineConfig(model="m"))).found.endswith("built for ROCm 7.0")
    assert one(doctor.check_device(EngineConfig(model="m", device="cpu"))).verdict == "ok"


def test_a_gpu_of_several_that_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = replace(CPU_BUILD, version="2.13.0+cu130", cuda="13.0", gpus=("L4", "L4"))
    monkeypatch.setattr(engine, "inspect_torch", lambda: facts, raising=False)
    monkeypatch.setattr(engine, "inspect_device", lambda config: "cuda", raising=False)
    seen = engine.GpuFacts(chosen="cuda:0 (L4), one of 2", warnings=(("Others have it", "End them."),))
    monkeypatch.setattr(engine, "inspect_gpu", lambda config: seen, raising=False)
    device, kernels, gpu = doctor.check_device(EngineConfig(model="m"))
    assert (device.verdict, device.found) == ("ok", "cuda:0 (L4), one of 2")
    assert (kernels.check, kernels.verdict, kernels.found) == ("kernels", "ok", "Triton's")
    assert (gpu.check, warned(gpu)) == ("gpu", "Others have it -> End them.")


def test_a_gpu_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "inspect_device", lambda config: "cuda", raising=False)
    seen = engine.GpuFacts(chosen="cuda:0 (T4)", no_kernels=("compute capability 7.5 is below 8.0", "Use another."))
    monkeypatch.setattr(engine, "inspect_gpu", lambda config: seen, raising=False)
    device, kernels = doctor.check_device(EngineConfig(model="m"))
    assert (device.verdict, kernels.check) == ("ok", "kernels")
    assert warned(kernels) == "none: compute capability 7.5 is below 8.0 -> Use another."


def test_a_model_larger_than_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded; the device itself is right."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**16, 2**16))
    (model,) = doctor.check_model(EngineConfig(model=str(DEMO_MODEL), device="cuda"))
    text = failed(model)
    assert "but cuda has 0.1 MiB of 0.1 MiB free -> That is more than all of it. Use a smaller model, a 16-bit" in text


WRONG = "its results for 4 heads of 64 features over 2 differ from ours"


@pytest.mark.parametrize(
    ("facts", "asked", "verdict", "said"),
    [
        ({"layers": 28}, False, "ok", "off; torch's flash attention could compute long prompts in 28 of 28 layers"),
        ({"why": "attention has a bias"}, False, "ok", "in 0 of 28 layers (attention has a bias)"),
        ({"layers": 28}, True, "ok", "torch's flash attention in 28 of 28 layers"),
        ({"layers": 5, "why": "attention has a window"}, True, "ok", "in 5 of 28 layers (attention has a window)"),
        ({"layers": 5, "why": WRONG, "wrong": True}, True, "warn", f"in 5 of 28 layers ({WRONG})"),
        ({"why": WRONG, "wrong": True}, True, "warn", f"not used: {WRONG} -> Remove --flash-prefill"),
        ({"layers": 28, "too_short": "steps have 2048"}, True, "warn", "not used: steps have 2048 -> Raise it"),
        ({"layers": 28, "too_short": "steps have 2048"}, False, "ok", "in 28 of 28 layers"),
    ],
)
def test_torchs_flash_attention(
    facts: dict[str, Any], asked: bool, verdict: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = engine.FlashFacts(of=28, **facts)
    monkeypatch.setattr(engine, "inspect_flash", lambda config, path: found, raising=False)
    model = inspect_model(EngineConfig(model=str(DEMO_MODEL)))
    finding = doctor.check_flash(EngineConfig(model=str(DEMO_MODEL), flash_prefill=asked), model)
    assert (finding.check, finding.verdict) == ("flash prefill", verdict)
    assert said in f"{finding.found} -> {finding.fix}"
    assert bool(finding.fix) == (verdict == "warn")


def test_torchs_flash_attention_is_looked_at_where_it_may_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU always; on a CPU where it is asked for, to say that it is not used."""
    assert "flash prefill" not in examine(device="cpu")
    text = warned(examine(device="cpu", flash_prefill=True)["flash prefill"])
    assert "not used: attention is computed by the " in text
    model = inspect_model(EngineConfig(model=str(DEMO_MODEL)))
    monkeypatch.setattr(engine, "inspect_model", lambda config: replace(model, device="cuda"), raising=False)

    def out_of_memory(config: EngineConfig, path: Path) -> engine.FlashFacts:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB.")

    monkeypatch.setattr(engine, "inspect_flash", out_of_memory, raising=False)
    found = {finding.check: finding for finding in doctor.check_model(EngineConfig(model=str(DEMO_MODEL)))}
    assert "could not be tested: CUDA out of memory -> Tried to allocate" in warned(found["flash prefill"])


# ---------------------------------------------------------------- the model


def test_models_that_cannot_be_served(model: Path) -> None:
    config = model / "config.json"
    whole = json.loads(config.read_text())
    config.write_text(json.dumps(whole | {"architectures": ["MambaForCausalLM"]}))
    text = failed(examine(model)["model"])
    assert "'MambaForCausalLM' is not supported: no layer is attention" in text
    assert "-> No supported architecture can replace it. `octavo models` lists what is supported." in text
    config.write_text("{")
    assert "config.json cannot be read" in failed(examine(model)["model"])
    config.unlink()
    assert "has no config.json" in failed(examine(model)["model"])
    config.write_text(json.dumps(whole))
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    text = failed(examine(model)["model"])
    assert "a format that is not read (pytorch_model.bin)" in text
    assert "save_pretrained" in text


def test_a_model_on_the_hub_is_not_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    def download(*arguments: object, local_files_only: bool, **options: object) -> None:
        assert local_files_only
        raise huggingface_hub.errors.LocalEntryNotFoundError("not here")

    monkeypatch.setattr("engine.model.hub.snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    findings = examine("org/name")
    assert "org/name is not in the local cache yet -> octavo serve downloads it" in warned(findings["model"])
    assert "memory" not in findings
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in failed(examine("org/name")["model"])


def test_a_model_without_words(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    assert "/v1/chat/completions answers 400" in warned(examine(model)["chat template"])
    for file in model.glob("tokenizer*"):
        file.unlink()
    assert "prompts must be token ids" in warned(examine(model)["tokenizer"])
    assert examine(model, skip_tokenizer_init=True)["tokenizer"].verdict == "ok"
    (model / "tokenizer.json").write_text("{")
    assert "cannot be loaded" in failed(examine(model)["tokenizer"])
    assert "it was not checked" in warned(examine(model, tokenizer="org/name")["tokenizer"])
    other = model.parent / "other"
    hf_byte_tokenizer().save_pretrained(other)
    assert examine(model, tokenizer=str(other))["tokenizer"].verdict == "ok"


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = inspect_model(EngineConfig(model=str(DEMO_MODEL), device="cpu", dtype="float32", max_num_seqs=2))
    # 2 x 512 tokens of 2 layers x (K, V) x heads x dim floats, and page 0
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    width = config["num_key_value_heads"] * config.get(
        "head_dim", config["hidden_size"] // config["num_attention_heads"]
    )
    page = 16 * 2 * config["num_hidden_layers"] * width * 4
    assert facts.num_blocks == 2 * 512 // 16
    assert facts.pages == (facts.num_blocks + 1) * page
    stored = (DEMO_MODEL / "model.safetensors").stat().st_size
    assert facts.weights == pytest.approx(2 * stored, rel=0.02), "float32, stored in bfloat16"

    assert doctor.check_memory(replace(facts, free=facts.weights + facts.pages + 2**31)).verdict == "ok"
    assert "are left for everything else" in warned(
        doctor.check_memory(replace(facts, free=facts.weights + facts.pages))
    )
    text = failed(doctor.check_memory(replace(facts, free=facts.weights + facts.pages - 1)))
    assert "--kv-cache-memory" in text
    monkeypatch.setattr("engine.execution.kv_cache.available_memory", lambda: facts.weights)
    assert "No memory for the KV cache" in failed(examine(device="cpu")["model"])


@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_limit_of_memory(version: int, tmp_path: Path) -> None:
    inner = tmp_path / ("memory" if version == 1 else "") / "outer" / "inner"
    inner.mkdir(parents=True)
    limit, used, cached = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if version == 1
        else ("memory.max", "memory.current", "inactive_file")
    )
    own = tmp_path / "cgroup"
    own.write_text("4:cpu,memory:/outer/inner\n1:name=systemd:/\n" if version == 1 else "0::/outer/inner\n")
    free = available_memory(tmp_path, own)
    assert free > 2**22
    (inner / limit).write_text("9223372036854771712\n" if version == 1 else "max\n")
    (inner / used).write_text("1000\n")
    assert available_memory(tmp_path, own) == pytest.approx(free, rel=0.5)
    # The limit of the group around it holds, too; cached files count as free.
    (inner.parent / limit).write_text("1000000\n")
    (inner.parent / used).write_text("900000\n")
    (inner.parent / "memory.stat").write_text(f"anon 5\n{cached} 300000\n")
    assert available_memory(tmp_path, own) == 400000
    (inner / limit).write_text("1500\n")
    assert available_memory(tmp_path, own) == 500
    (inner / used).write_text("2000\n")
    assert available_memory(tmp_path, own) == 0


# ---------------------------------------------------------------- the address, and the keys


def test_where_it_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(
            "cli.healthcheck.ask.__kwdefaults__", {"key": "", "most": 300, "timeout": 0.2}
        )  # it is silent
        text = failed(examine(port=port)["port"])
    assert f"port {port}: Address already in use -> Choose another address with --host and --port" in text
    assert "No such file or directory" in failed(examine(uds=str(tmp_path / "absent" / "o"))["socket"])
    assert "cannot read" in failed(examine(ssl_certfile=str(tmp_path / "absent"))["certificate"])


@contextmanager
def octavo_serves(**settings: Any) -> Iterator[int]:
    """The port of Octavo's app, whose engine plays a part."""
    app = create_app(
        FakeClient(lambda name, source, params: say(name, ["hi"], params)),
        byte_tokenizer(),
        "mine",
        settings=ServerSettings(**settings),
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        service = uvicorn.Server(uvicorn.Config(app, log_config=None))
        thread = threading.Thread(target=lambda: asyncio.run(service.serve(sockets=[listener])), daemon=True)
        thread.start()
        wait_for(lambda: service.started, "the app did not start")
        try:
            yield listener.getsockname()[1]
        finally:
            service.should_exit = True
            thread.join(PATIENCE)


def test_beside_one_s_own_octavo() -> None:
    """That it serves there is no fault; to whom the key is missing, the model's name is not told."""
    with octavo_serves() as port:
        finding = examine(port=port)["port"]
    assert finding == Finding(
        "port", "warn", "Octavo already serves mine at this address",
        "Stop that server first, or set another --port (OCTAVO_PORT).",
    )  # fmt: skip
    with octavo_serves(api_key=("secret",)) as port:
        assert "Octavo already serves mine at this address" in warned(
            examine(port=port, api_key=("secret", "other"))["port"]
        )
        assert "Octavo already serves a model at this address" in warned(examine(port=port)["port"])


@pytest.mark.parametrize("body", [b"{}", b'{"data": [{"id": "m", "owned_by": "vllm"}]}', b'{"data": [7]}', b"<p>"])
def test_beside_another_server(body: bytes) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Nothing is to be said."""

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.handle_request, daemon=True).start()
        assert "Address already in use" in failed(examine(port=other.server_port)["port"])


def test_a_privileged_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(settings: ServerSettings) -> None:
        raise doctor.StartupError("cannot listen on 127.0.0.1, port 80: Permission denied. Choose another.")

    monkeypatch.setattr(doctor, "Listener", refuse)
    assert "Permission denied -> Ports below 1024 may need root" in failed(examine(port=80)["port"])


def test_who_gets_in(tmp_path: Path) -> None:
    assert "no API key is set" in warned(examine(host="0.0.0.0")["access"])
    assert examine(host="0.0.0.0", api_key="secret")["access"] == Finding("access", "ok", "an API key is required")
    keys = tmp_path / "keys"
    assert "cannot be read" in failed(examine(api_key_file=str(keys))["access"])
    keys.write_text("\n# none yet\n")
    assert "has no keys" in failed(examine(api_key_file=str(keys))["access"])
    keys.write_text("key-1\n")
    assert examine(api_key_file=str(keys))["access"].verdict == "ok"


def test_a_place_for_the_engines_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.process.launch._LONGEST_FOLDER", 3)
    assert "TMPDIR" in failed(examine()["engine socket"])


def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 300))
    text = warned(examine(max_num_queued_reqs=1000)["open files"])
    assert "300; running and waiting requests need up to 1192" in text, "the service raises the soft limit itself"
    assert "ulimit -n 1192 as root" in text
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert examine()["open files"].verdict == "ok"
