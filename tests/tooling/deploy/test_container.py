"""The container's files: linted by the tools made for them, and checked for what an operator relies on.

Building and running the image is deploy/test-image.sh's part.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from gpu_parts import ahead, shapes

from engine import EngineConfig
from server.config.settings import ServerSettings

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
OCTAVO = COMPOSE["services"]["octavo"]
# What is passed on to the container but is no setting of Octavo's own.
FOREIGN = {"HF_TOKEN", "OMP_NUM_THREADS"}


def tool(name: str) -> str:
    """A program that pip installed into this environment, or one on the PATH."""
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if found is None:
        pytest.skip(f"{name} is not installed (what pip can install of these comes with the test extra)")
    return found


def instructions() -> list[list[str]]:
    """The Dockerfile's instructions in words, without comments; continued lines are joined."""
    lines = [line for line in DOCKERFILE.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [shlex.split(line) for line in joined.splitlines() if line.strip()]


def of_kind(kind: str) -> list[list[str]]:
    return [words[1:] for words in instructions() if words[0] == kind]


def stages() -> dict[str, str]:
    """Each stage's name, in order, and what it is made from."""
    return {words[2]: words[0] for words in of_kind("FROM")}


# ---------------------------------------------------------------- Dockerfile


def test_hadolint_finds_nothing() -> None:
    ran = subprocess.run([tool("hadolint"), "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_hadolint_would_find_something(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN cd /tmp && sudo true\n")
    ran = subprocess.run([tool("hadolint"), "Dockerfile"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "DL3004" in ran.stdout


def test_targets() -> None:
    """Both are the same image but for the libraries, and a build without --target makes the one for a CPU."""
    found = stages()
    assert list(found)[-1] == "cpu"
    assert found["cpu"] == found["cuda"] == "runtime"
    assert found["runtime"] == found["builder"] == "${BASE_IMAGE}"
    defaults = dict(words[0].partition("=")[::2] for words in of_kind("ARG"))
    assert "slim" in defaults["BASE_IMAGE"]
    torch_indexes = [words[0].partition("=")[2] for words in of_kind("ARG") if words[0].startswith("TORCH_INDEX=")]
    assert len(torch_indexes) == 2
    assert torch_indexes[0].endswith("/whl/cpu")
    assert not torch_indexes[1].endswith("cpu")


def test_runs_as_a_numeric_user_that_is_not_root() -> None:
    user, installing, again = of_kind("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user[0]), user
    assert DOCKERFILE.index("AS runtime") < DOCKERFILE.index("\nUSER") < DOCKERFILE.index("AS cuda")
    # The target for GPUs installs a compiler, and gives root up again.
    assert (installing, again) == (["0:0"], user)
    assert DOCKERFILE.index("AS cuda") < DOCKERFILE.index("USER 0:0") < DOCKERFILE.rindex("\nUSER")
    assert DOCKERFILE.rindex("\nUSER") < DOCKERFILE.index("AS cpu")


def test_starts_the_service_for_the_outside_and_stops_it_by_sigterm() -> None:
    assert of_kind("ENTRYPOINT") == [["[octavo]"], ["[/app/start]"]]
    assert of_kind("CMD") == [["[serve]"]] * 2
    assert of_kind("STOPSIGNAL") == [["SIGTERM"]]
    assert ["8000"] in of_kind("EXPOSE")
    assert ServerSettings().port == 8000
    environment = dict(word.partition("=")[::2] for words in of_kind("ENV") for word in words)
    assert environment["OCTAVO_HOST"] == "0.0.0.0"


def test_kernels_are_compiled_for_the_folder_that_is_used() -> None:
    """Unless told otherwise for the demo, and for all models and GPUs that the benchmark knows; the user adds to the
    folder."""
    (chosen,) = [words[0].removeprefix("KERNELS=") for words in of_kind("ARG") if words[0].startswith("KERNELS=")]
    told = dict(re.findall(r"--(\S+) ((?:(?!--)\S+ ?)+)", chosen))
    assert set(told["models"].split()) == set(shapes.MODELS)
    assert set(map(int, told["capabilities"].split())) == set(ahead.GPUS)
    stage = DOCKERFILE[DOCKERFILE.index("AS kernels") : DOCKERFILE.index("AS runtime")]
    assert f"COPY server/demo/chat/config.json {told['config'].strip()}\n" in stage
    assert not is_ignored("server/demo/chat/config.json")
    (program, folder, home) = re.findall(r"python3 (\S+) --cache (\S+) --home (\S+) \$KERNELS", stage)[0]
    assert (ROOT / program).is_file()
    assert not is_ignored(program)
    environment = dict(word.partition("=")[::2] for words in of_kind("ENV") for word in words)
    assert environment["TRITON_CACHE_DIR"] == home
    assert ["--from=kernels", folder, folder] in of_kind("COPY")
    assert f"mkdir {home} && chown {of_kind('USER')[0][0]} {home}" in DOCKERFILE


def test_the_start_brings_the_images_kernels_to_a_volume(tmp_path: Path) -> None:
    """What is there stays, and what cannot be copied keeps nothing from starting."""
    image, volume, programs = (tmp_path / name for name in ("kernels", "triton", "bin"))
    for folder in (image / "one", image / "two", volume / "two", programs):
        folder.mkdir(parents=True)
    for folder in ("one", "two"):
        (image / folder / "decode.cubin").write_text(folder)
    (volume / "two" / "decode.cubin").write_text("newer")
    (programs / "octavo").write_text('#!/bin/sh\necho "octavo $*"\n')
    (programs / "octavo").chmod(0o755)
    script = tmp_path / "start"
    script.write_text((ROOT / "deploy" / "start-cuda.sh").read_text().replace("/kernels", str(image)))
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "TRITON_CACHE_DIR": str(volume)}
    command = ["sh", str(script), "serve", "a model"]
    for _ in range(2):
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert (ran.stdout, ran.stderr) == ("octavo serve a model\n", "")
        assert {file.parent.name: file.read_text() for file in volume.glob("*/*")} == {"one": "one", "two": "newer"}
    ran = subprocess.run(
        command, env=environment | {"TRITON_CACHE_DIR": "/dev/null"}, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "octavo serve a model\n"
    assert "Not all kernels of the image are in /dev/null." in ran.stderr


def health_command() -> list[str]:
    (check,) = re.findall(r"^HEALTHCHECK[^\[]*CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    return json.loads(check)


def test_health_check_is_pythons_own() -> None:
    assert health_command() == ["python3", "-I", "-m", "octavo.cli.healthcheck"]
    assert (ROOT / "cli/healthcheck.py").is_file()
    assert not re.search(r"\b(curl|wget)\b", DOCKERFILE)
    common = DOCKERFILE[DOCKERFILE.index("AS runtime") : DOCKERFILE.index("AS cuda")]
    common += DOCKERFILE[DOCKERFILE.index("AS cpu") :]
    assert "apt-get" not in common


def is_ignored(path: str) -> bool:
    """What .dockerignore's last matching line says of a path, or of a folder above it."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    parts = path.split("/")
    above = ["/".join(parts[: index + 1]) for index in range(len(parts))]
    ignored = False
    for line in lines:
        if not line.strip() or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        names = parts if pattern.startswith("**/") else above
        if any(fnmatch(name, pattern.removeprefix("**/")) for name in names):
            ignored = not line.startswith("!")
    return ignored


def test_all_that_is_copied_exists_and_is_sent_to_the_build() -> None:
    sources = [word for words in of_kind("COPY") if not words[0].startswith("--from") for word in words[:-1]]
    assert {"pyproject.toml", "constraints.txt", "setup.py", "octavo", "engine", "server", "cli"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not is_ignored(source), f"{source} is copied, but .dockerignore keeps it from the build"
    for source in ("tests", "docs/architecture.md", ".git", "benchmarks", "server/__pycache__", "engine/x.pyc", ".env"):
        assert is_ignored(source), source


def test_all_that_the_package_is_made_of_is_copied() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks", "tools"}
    needed = {"setup.py", *packages, project["readme"], *project["license-files"]}
    assert needed <= {word for words in of_kind("COPY") for word in words}


# ---------------------------------------------------------------- docker-compose.yml


def compose_config(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """What podman-compose makes of the files. It insists on a podman that tells its version; `config` asks for no
    more, so that one which can do only that is enough."""
    podman = tmp_path / "podman"
    podman.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "podman version 5.0.0"\n')
    podman.chmod(0o755)
    command = [tool("podman-compose"), "--podman-path", str(podman), *arguments, "config"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert not re.search("warn|error", ran.stderr, re.IGNORECASE), ran.stderr
    return yaml.safe_load(ran.stdout)["services"]


def test_compose_file_is_understood(tmp_path: Path) -> None:
    service = compose_config(tmp_path)["octavo"]
    assert service["build"]["target"] == "cpu"
    assert service["ports"] == ["127.0.0.1:8000:8000"]


def test_gpu_override_changes_the_target_and_asks_for_devices(tmp_path: Path) -> None:
    service = compose_config(tmp_path, "-f", "docker-compose.yml", "-f", "docker-compose.gpu.yml")["octavo"]
    assert service["build"]["target"] == "cuda"
    assert service["image"] != OCTAVO["image"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]
    plain = compose_config(tmp_path)["octavo"]
    assert {name for name in service if service[name] != plain.get(name)} == {"build", "image", "deploy", "volumes"}
    assert set(service["volumes"]) - set(plain["volumes"]) == {"triton:/triton"}
    assert set(plain["volumes"]) < set(service["volumes"])


def test_every_profile_is_understood(tmp_path: Path) -> None:
    profiles = {name for service in COMPOSE["services"].values() for name in service.get("profiles", [])}
    for profile in profiles:
        wanted = {name for name, service in COMPOSE["services"].items() if profile in service.get("profiles", [])}
        assert {"octavo", *wanted} <= set(compose_config(tmp_path, "--profile", profile))


@pytest.mark.parametrize("name", sorted(COMPOSE["services"]))
def test_only_this_machine_reaches_a_service(name: str) -> None:
    for port in COMPOSE["services"][name].get("ports", []):
        address = port["host_ip"] if isinstance(port, dict) else port.partition(":")[0]
        assert address == "127.0.0.1", f"{name} publishes {port}"


def test_the_service_is_confined() -> None:
    assert OCTAVO["init"] is True
    assert OCTAVO["read_only"] is True
    assert "/tmp" in OCTAVO["tmpfs"]
    assert OCTAVO["cap_drop"] == ["ALL"]
    assert "cap_add" not in OCTAVO
    assert "no-new-privileges:true" in OCTAVO["security_opt"]
    assert not OCTAVO.get("privileged")
    assert OCTAVO.get("network_mode") != "host"


@pytest.mark.parametrize("name", sorted(COMPOSE["services"]))
def test_a_service_is_limited_and_started_again(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["restart"] == "unless-stopped"
    assert service["mem_limit"]
    assert 0 < service["pids_limit"] <= 4096
    assert "deploy" not in service, "limits have one place"


def test_the_limits_are_understood(tmp_path: Path) -> None:
    service = compose_config(tmp_path)["octavo"]
    assert (service["mem_limit"], service["memswap_limit"]) == ("8g", "8g")
    compose = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    assert len(set(re.findall(r"\$\{OCTAVO_MEMORY_LIMIT[^}]*\}", compose))) == 1, "then swap would be allowed"


def test_models_are_kept_and_those_of_the_host_are_not_written_to() -> None:
    assert "models:/models" in OCTAVO["volumes"]
    assert "models" in COMPOSE["volumes"]
    (mounted,) = [volume for volume in OCTAVO["volumes"] if volume.startswith("./")]
    assert mounted.endswith(":ro")


def test_running_requests_can_finish_before_the_container_is_killed() -> None:
    grace = re.fullmatch(r"(\d+)s", OCTAVO["stop_grace_period"])
    assert grace
    assert int(grace[1]) >= ServerSettings().shutdown_timeout + 5
    assert "OCTAVO_SHUTDOWN_TIMEOUT" not in OCTAVO["environment"], "then the grace would have to follow it"


def test_health_check_is_the_images() -> None:
    assert OCTAVO["healthcheck"]["test"] == ["CMD", *health_command()]
    options = dict(re.findall(r"--(\S+)=(\S+)", DOCKERFILE[DOCKERFILE.index("\nHEALTHCHECK") :]))
    for name in ("interval", "timeout", "start_period", "retries"):
        assert str(OCTAVO["healthcheck"][name]) == options[name.replace("_", "-")], name


def settings_names(cls: type) -> set[str]:
    """Whether it is a dataclass or a pydantic model."""
    return set(getattr(cls, "model_fields", None) or {field.name for field in fields(cls)})


def test_variables_that_are_passed_on_are_settings_and_hold_no_secret() -> None:
    known = {f"OCTAVO_{name.upper()}" for name in settings_names(ServerSettings) | settings_names(EngineConfig)}
    assert "OCTAVO_MODEL" in known
    for name, value in OCTAVO["environment"].items():
        assert value is None, f"{name} has a value in the file"
        assert name in known | FOREIGN, f"{name} is no setting"
    assert "OCTAVO_API_KEY" in OCTAVO["environment"]


def test_prometheus_asks_under_a_name_that_is_answered() -> None:
    """Without a key the service answers to its machine's own name, and to no other that is no address."""
    scraped = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())["scrape_configs"][0]["static_configs"]
    assert [target.partition(":")[0] for item in scraped for target in item["targets"]] == [OCTAVO["hostname"]]


# ---------------------------------------------------------------- deploy/


def test_slimming_keeps_what_runs(tmp_path: Path) -> None:
    packages = tmp_path / "lib/python3.12/site-packages"
    kept = {
        "torch/__init__.py", "torch/bin/torch_shm_manager", "torch/lib/libtorch_cpu.so", "torch/testing/__init__.py",
        "numpy/__init__.py", "numpy/testing/__init__.py", "sympy/core/basic.py", "nvidia/cublas/lib/libcublas.so.12",
        "transformers/models/x/tests/y.py",
    }  # fmt: skip
    removed = {
        "torch/bin/test_api", "torch/bin/protoc", "torch/include/ATen/A.h", "torch/share/cmake/T.cmake",
        "torch/test/a", "torch/lib/libjitbackend_test.so", "torch/lib/libx.a", "nvidia/cublas/include/cublas.h",
        "numpy/tests/test_a.py", "sympy/core/tests/test_basic.py", "networkx/tests/test_all.py",
        "setuptools/__init__.py", "setuptools-80.0.dist-info/METADATA", "pkg_resources/__init__.py",
    }  # fmt: skip
    for name in kept | removed:
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text("x")
    subprocess.run(["sh", str(ROOT / "deploy/slim-venv.sh"), str(tmp_path)], check=True)
    left = {str(path.relative_to(packages)) for path in packages.rglob("*") if path.is_file()}
    assert left == kept


UNIT = (ROOT / "deploy/systemd/octavo.service").read_text(encoding="utf-8")


@pytest.mark.parametrize(("wrong", "said"), [("", ""), ("TasksMaxx=1\n", "TasksMaxx")])
def test_systemd_understands_the_unit(wrong: str, said: str, tmp_path: Path) -> None:
    unit = tmp_path / "octavo.service"
    there = re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", UNIT, flags=re.MULTILINE)
    unit.write_text(there.replace("[Service]\n", f"[Service]\n{wrong}"))
    command = [tool("systemd-analyze"), "verify", str(unit)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    # It also reads the units of the machine, which are not ours.
    found = [line for line in (ran.stdout + ran.stderr).splitlines() if "octavo.service" in line]
    assert len(found) == bool(said), found
    assert all(said in line for line in found)


def test_the_unit_is_limited_and_started_again() -> None:
    unit = dict(re.findall(r"^(\w+)=(.*)$", UNIT, re.MULTILINE))
    assert unit["Restart"] == "on-failure"
    assert unit["RestartPreventExitStatus"] == "2"
    assert unit["OOMPolicy"] == "continue"
    assert {"MemoryMax", "TasksMax", "LimitNOFILE"} <= unit.keys()
    assert int(unit["TimeoutStopSec"]) >= ServerSettings().shutdown_timeout + 5
    assert " serve " in unit["ExecStart"]


@pytest.mark.parametrize("name", ["deploy/slim-venv.sh", "deploy/test-image.sh"])
def test_scripts_parse(name: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / name)], check=True)


def test_image_test_says_what_it_lacks(tmp_path: Path) -> None:
    for name in ("dirname", "readlink", "uname", "id"):
        found = shutil.which(name)
        assert found
        (tmp_path / name).symlink_to(found)
    bash = shutil.which("bash")
    assert bash
    command = [bash, str(ROOT / "deploy/test-image.sh")]
    ran = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert ran.returncode == 77, ran.stderr
    assert re.search(r"skipped: (buildah is not installed|this needs (root|Linux))", ran.stderr)


def test_recorded_image_is_within_its_limit() -> None:
    recorded = json.loads((ROOT / "benchmarks/results/image-cpu.json").read_text(encoding="utf-8"))
    assert sum(recorded["layers_bytes"]) == recorded["size_bytes"] <= recorded["size_limit_bytes"] == 1_300_000_000
