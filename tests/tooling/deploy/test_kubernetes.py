"""The manifests of deploy/kubernetes: they fit together, fit the image and the service, and Kubernetes' own schemas.

The schemas are those of kubernetes-validate, and overlays are built with kubectl; what needs either is skipped where it
is missing.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from fake_client import byte_tokenizer
from test_container import COMPOSE, of_kind
from test_dashboards import Exposition, selectors
from test_http_api import MODEL, Api

from engine import EngineConfig
from server.app import create_app
from server.config.settings import ServerSettings, Settings, variable

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy" / "kubernetes"
COMPONENTS = sorted(path.name for path in (FOLDER / "components").iterdir())
OVERLAYS = ("cpu", "gpu")
# Of the names that an image or a chart brings, not kustomize.
NO_MANIFESTS = {"prometheus-adapter.yaml", "picker-config.yaml"}
SERVER = {"app.kubernetes.io/name": "octavo", "app.kubernetes.io/component": "server"}
PICKER = SERVER | {"app.kubernetes.io/component": "endpoint-picker"}
BUILT_IN = re.compile(r"v1|apps/v1|policy/v1|autoscaling/v2|(networking|rbac\.authorization)\.k8s\.io/v1")


@cache
def manifests() -> dict[tuple[str, str], Any]:
    """Every object by kind and name, as its file has it."""
    found: dict[tuple[str, str], Any] = {}
    for path in sorted(FOLDER.rglob("*.yaml")):
        if path.name != "kustomization.yaml" and path.name not in NO_MANIFESTS:
            for document in yaml.safe_load_all(path.read_text()):
                key = document["kind"], document["metadata"]["name"]
                assert key not in found, f"{key} is there twice"
                found[key] = document
    return found


def pods() -> dict[str, Any]:
    spec: dict[str, Any] = manifests()["Deployment", "octavo"]["spec"]["template"]["spec"]
    return spec


def container() -> dict[str, Any]:
    (only,) = pods()["containers"]
    return dict(only)


def kustomization(folder: str) -> dict[str, Any]:
    return dict(yaml.safe_load((FOLDER / folder / "kustomization.yaml").read_text()))


def settings() -> dict[str, str]:
    """The OCTAVO_* variables of the base."""
    (generated,) = kustomization("base")["configMapGenerator"]
    literals = dict(literal.split("=", 1) for literal in generated["literals"])
    own = {entry["name"]: entry["value"] for entry in container()["env"] if "value" in entry}
    return literals | own


def patched() -> Iterator[dict[str, Any]]:
    """What components and overlays put into Octavo's pods."""
    for path in sorted(FOLDER.rglob("kustomization.yaml")):
        for patch in yaml.safe_load(path.read_text()).get("patches", ()):
            content = yaml.safe_load(patch["patch"])
            if isinstance(content, dict):
                yield content["spec"]["template"]["spec"]


def image_variables() -> dict[str, str]:
    return dict(word.split("=", 1) for words in of_kind("ENV") for word in words)


# ---------------------------------------------------------------- the files among themselves


def test_every_file_is_named_once() -> None:
    for path in FOLDER.rglob("kustomization.yaml"):
        content = yaml.safe_load(path.read_text())
        kind = "Component" if path.parent.parent.name == "components" else "Kustomization"
        assert content["kind"] == kind, path
        named = {name for name in content.get("resources", ()) if name.endswith(".yaml")}
        others = {file.name for file in path.parent.glob("*.yaml")} - {"kustomization.yaml"} - NO_MANIFESTS
        assert named == others, path
        for folder in [*content.get("components", ()), *(set(content.get("resources", ())) - named)]:
            assert (path.parent / folder / "kustomization.yaml").is_file()


def test_selectors_find_octavos_pods() -> None:
    found = manifests()
    template = found["Deployment", "octavo"]["spec"]["template"]["metadata"]["labels"]
    assert template.items() >= SERVER.items()
    assert template["llm-d.ai/engine-type"] == "vllm"
    for kind, name, *path in (
        ("Deployment", "octavo", "selector", "matchLabels"),
        ("Service", "octavo-api", "selector"),
        ("PodDisruptionBudget", "octavo", "selector", "matchLabels"),
        ("NetworkPolicy", "octavo", "podSelector", "matchLabels"),
        ("NetworkPolicy", "octavo-kv-events", "podSelector", "matchLabels"),
        ("InferencePool", "octavo", "selector", "matchLabels"),
        ("ServiceMonitor", "octavo", "selector", "matchLabels"),
    ):
        selector = found[kind, name]["spec"]
        for part in path:
            selector = selector[part]
        assert selector == SERVER, (kind, name)
    assert found["Service", "octavo-api"]["metadata"]["labels"] == SERVER  # which ServiceMonitor selects by
    (spread,) = pods()["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == SERVER


def test_what_is_referred_to_is_there() -> None:
    found = manifests()
    pool, route = found["InferencePool", "octavo"], found["HTTPRoute", "octavo"]
    reference = pool["spec"]["endpointPickerRef"]
    picker = found["Service", reference["name"]]
    assert picker["spec"]["selector"] == PICKER
    (port,) = picker["spec"]["ports"]
    assert port["port"] == reference["port"]["number"] == 9002
    deployment = found["Deployment", "octavo-picker"]["spec"]
    assert deployment["selector"]["matchLabels"] == deployment["template"]["metadata"]["labels"] == PICKER
    spec = deployment["template"]["spec"]
    (main,) = spec["containers"]
    ports = {port["name"]: port["containerPort"] for port in main["ports"]}
    flags = dict(argument.removeprefix("--").split("=", 1) for argument in main["args"])
    assert flags["pool-name"] == pool["metadata"]["name"]
    assert pool["apiVersion"].startswith(flags["pool-group"] + "/")
    assert (int(flags["grpc-port"]), int(flags["grpc-health-port"])) == (
        ports[port["targetPort"]],
        ports["grpc-health"],
    )
    (generated,) = kustomization("components/inference-gateway")["configMapGenerator"]
    (mount,) = [mount for mount in main["volumeMounts"] if mount["name"] == "config"]
    assert flags["config-file"] == f"{mount['mountPath']}/{generated['files'][0]}"
    assert spec["volumes"][0]["configMap"]["name"] == generated["name"]
    for objective in [document for (kind, _), document in found.items() if kind == "InferenceObjective"]:
        assert objective["spec"]["poolRef"]["name"] == pool["metadata"]["name"]
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    assert pool["apiVersion"].startswith(backend["group"] + "/")
    binding = found["RoleBinding", "octavo-picker"]
    assert ("Role", binding["roleRef"]["name"]) in found
    for subject in binding["subjects"]:
        assert ("ServiceAccount", subject["name"]) in found
    assert ("ServiceAccount", spec["serviceAccountName"]) in found
    assert ("ServiceAccount", pods()["serviceAccountName"]) in found
    for name in ("HorizontalPodAutoscaler", "ScaledObject"):
        target = found[name, "octavo"]["spec"]["scaleTargetRef"]
        assert ("Deployment", target["name"]) in found
    rules = found["NetworkPolicy", "octavo-kv-events"]["spec"]["ingress"]
    assert rules[0]["from"] == [{"podSelector": {"matchLabels": PICKER}}]


def test_the_pickers_plugins_are_each_used() -> None:
    config = yaml.safe_load((FOLDER / "components/inference-gateway/picker-config.yaml").read_text())
    (profile,) = config["schedulingProfiles"]
    used = {plugin["pluginRef"] for plugin in profile["plugins"]} | {"single-profile-handler"}
    assert used == {plugin["type"] for plugin in config["plugins"]}


def test_mounts_have_volumes() -> None:
    volumes = {volume["name"] for volume in pods()["volumes"]}
    for mount in container()["volumeMounts"]:
        assert mount["name"] in volumes
    for spec in patched():
        own = {volume["name"] for volume in spec.get("volumes", ())}
        for added in spec.get("containers", ()):
            assert added["name"] == container()["name"]
            for mount in added.get("volumeMounts", ()):
                assert mount["name"] in own | volumes


# ---------------------------------------------------------------- the image


def test_the_image_is_run_as_it_was_made() -> None:
    picker = manifests()["Deployment", "octavo-picker"]["spec"]["template"]["spec"]
    for spec in (pods(), picker):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["containers"][0]["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    security = pods()["securityContext"]
    assert f"{security['runAsUser']}:{security['runAsGroup']}" == of_kind("USER")[-1][0]
    assert security["fsGroup"] == security["runAsGroup"]
    assert pods()["automountServiceAccountToken"] is False
    assert pods()["enableServiceLinks"] is False
    assert container()["args"] == re.findall(r"[a-z]+", str(of_kind("CMD")[0]))
    composes = {"cpu": COMPOSE, "gpu": yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())}
    for overlay in OVERLAYS:
        (image,) = kustomization(f"overlays/{overlay}")["images"]
        assert image["name"] == container()["image"]
        assert f"{image['newName']}:{image['newTag']}" == composes[overlay]["services"]["octavo"]["image"]


def test_what_the_service_writes_can_be_written() -> None:
    """The root file system is read-only: what the image's variables name lies in a volume."""
    writable = [mount["mountPath"] for mount in container()["volumeMounts"]]
    gpu = [
        mount["mountPath"]
        for spec in patched()
        for own in spec.get("containers", ())
        for mount in own.get("volumeMounts", ())
    ]
    variables = image_variables()
    for name in ("HOME", "HF_HOME", "OCTAVO_QUANTIZATION_CACHE"):
        assert any(Path(variables[name]).is_relative_to(path) for path in writable), name
    assert "TRITON_CACHE_DIR" not in writable
    assert variables["TRITON_CACHE_DIR"] in gpu
    tmpfs = COMPOSE["services"]["octavo"]["tmpfs"]
    assert set(tmpfs) <= set(writable)


def test_ports() -> None:
    (port,) = [port["containerPort"] for port in container()["ports"]]
    assert [str(port)] == of_kind("EXPOSE")[0]
    assert port == ServerSettings().port
    assert manifests()["Service", "octavo-api"]["spec"]["ports"][0]["targetPort"] == container()["ports"][0]["name"]
    assert manifests()["InferencePool", "octavo"]["spec"]["targetPorts"] == [{"number": port}]
    (endpoint,) = manifests()["ServiceMonitor", "octavo"]["spec"]["endpoints"]
    assert endpoint["port"] == manifests()["Service", "octavo-api"]["spec"]["ports"][0]["name"]
    (rule,) = manifests()["NetworkPolicy", "octavo"]["spec"]["ingress"]
    assert [entry["port"] for entry in rule["ports"]] == ["http"]


# ---------------------------------------------------------------- the service


def test_variables_are_settings() -> None:
    known = {variable(name) for name in Settings.model_fields}
    added = [entry["name"] for spec in patched() for own in spec.get("containers", ()) for entry in own.get("env", ())]
    names = [name for name in [*settings(), *added] if name.startswith("OCTAVO_")]
    assert {"OCTAVO_MODEL", "OCTAVO_API_KEY_FILE", "OCTAVO_KV_EVENTS_CONFIG"} <= set(names)
    assert set(names) <= known


def test_a_pod_is_given_time_to_drain() -> None:
    before = container()["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = int(settings()["OCTAVO_SHUTDOWN_TIMEOUT"])
    compose = int(COMPOSE["services"]["octavo"]["stop_grace_period"].removesuffix("s"))
    margin = compose - ServerSettings().shutdown_timeout
    assert pods()["terminationGracePeriodSeconds"] >= before + drain + margin
    picker = manifests()["Deployment", "octavo-picker"]["spec"]["template"]["spec"]
    assert picker["terminationGracePeriodSeconds"] >= pods()["terminationGracePeriodSeconds"]


def app(**given: Any) -> Api:
    api = Api()
    api.app = create_app(api.client, byte_tokenizer(), MODEL, settings=ServerSettings(**given))
    return api


def test_probes_and_scrapes_ask_what_the_service_answers() -> None:
    api = app(public_metrics=settings()["OCTAVO_PUBLIC_METRICS"] == "true", api_key=("secret",))
    probes = {kind: container()[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")}
    assert {probe["port"] for probe in probes.values()} == {"http"}
    assert probes["liveness"]["path"] == "/health/live"
    assert probes["startup"]["path"] == probes["readiness"]["path"] == "/health/ready"
    (endpoint,) = manifests()["ServiceMonitor", "octavo"]["spec"]["endpoints"]
    for path in [*(probe["path"] for probe in probes.values()), endpoint["path"]]:
        assert api.request("GET", path, headers={"Host": "10.1.2.3:8000"}).status_code == 200, path


def test_clients_may_use_the_services_names() -> None:
    given = settings()["OCTAVO_ALLOWED_HOSTS"].replace("$(POD_NAMESPACE)", "prod")
    api = app(allowed_hosts=given)
    name = manifests()["Service", "octavo-api"]["metadata"]["name"]
    for host in (name, f"{name}:8000", f"{name}.prod", f"{name}.prod.svc", f"{name}.prod.svc.cluster.local:8000"):
        assert api.request("GET", "/v1/models", headers={"Host": host}).status_code == 200, host
    assert api.request("GET", "/v1/models", headers={"Host": "evil.example"}).status_code == 403


def test_events_are_published_where_the_picker_may_listen() -> None:
    (added,) = [
        own
        for spec in patched()
        for own in spec.get("containers", ())
        if any("KV_EVENTS" in e["name"] for e in own.get("env", ()))
    ]
    config = EngineConfig(model="m", kv_events_config=added["env"][0]["value"]).kv_events
    assert config is not None
    ports = {port["name"]: port["containerPort"] for port in added["ports"]}
    assert config.endpoint == f"tcp://*:{ports['kv-events']}"
    assert config.replay_endpoint == f"tcp://*:{ports['kv-replay']}"
    (rule,) = manifests()["NetworkPolicy", "octavo-kv-events"]["spec"]["ingress"]
    assert {entry["port"] for entry in rule["ports"]} == set(ports)


# ---------------------------------------------------------------- metrics


@pytest.fixture(scope="module")
def exposition() -> Exposition:
    return Exposition()


def check_query(query: str, exposition: Exposition) -> None:
    names = [selector.name for selector in selectors(promql.parse(query))]
    assert names, query
    for name in names:
        assert name in exposition.values, name


def test_the_autoscaler_asks_for_what_the_adapter_makes(exposition: Exposition) -> None:
    rules = yaml.safe_load((FOLDER / "components/autoscaling/prometheus-adapter.yaml").read_text())["rules"]["custom"]
    made = set()
    for rule in rules:
        series = rule["seriesQuery"].partition("{")[0]
        check_query(rule["seriesQuery"], exposition)
        name = rule.get("name", {"matches": f"^{series}$", "as": series})
        assert re.fullmatch(name["matches"], series)
        made.add(name["as"])
        query = rule["metricsQuery"].replace("<<.GroupBy>>", "pod").replace("<<.LabelMatchers>>", 'namespace="n"')
        check_query(query.replace("<<.Series>>", series), exposition)
    asked = {
        entry["pods"]["metric"]["name"] for entry in manifests()["HorizontalPodAutoscaler", "octavo"]["spec"]["metrics"]
    }
    assert asked == made


def test_keda_asks_for_what_is_there(exposition: Exposition) -> None:
    triggers = manifests()["ScaledObject", "octavo"]["spec"]["triggers"]
    for trigger in triggers:
        check_query(trigger["metadata"]["query"], exposition)
        assert 'job="octavo-api"' in trigger["metadata"]["query"]  # the Service's name, by ServiceMonitor
        assert float(trigger["metadata"]["threshold"]) > 0
    assert len(triggers) == 2


def test_the_picker_reads_metrics_that_are_there(exposition: Exposition) -> None:
    """By the names of the model server protocol."""
    names = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info")
    for name in (*names, "lora_requests_info"):
        assert f"vllm:{name}" in exposition.values
    assert exposition.values["vllm:cache_config_info"].keys() >= {"block_size", "num_gpu_blocks"}


# ---------------------------------------------------------------- built, and held against the schemas


def built(folder: Path, overlay: str, components: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """What kubectl makes of an overlay and some components."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    # kustomize takes relative paths alone.
    place = {part: os.path.relpath(FOLDER / part, folder) for part in (f"overlays/{overlay}", "components")}
    (folder / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "apiVersion": "kustomize.config.k8s.io/v1beta1",
                "kind": "Kustomization",
                "resources": [place[f"overlays/{overlay}"]],
                "components": [f"{place['components']}/{name}" for name in components],
            }
        )
    )
    ran = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return list(yaml.safe_load_all(ran.stdout))


CHOICES = [
    *itertools.product(OVERLAYS, [()]),
    *((overlay, tuple(name for name in COMPONENTS if name not in ("autoscaling", "keda"))) for overlay in OVERLAYS),
]


@pytest.mark.parametrize(("overlay", "components"), CHOICES, ids=lambda value: "+".join(value) or "alone")
def test_kubernetes_schemas_have_nothing_against_it(overlay: str, components: tuple[str, ...], tmp_path: Path) -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    documents = built(tmp_path, overlay, components)
    checked = 0
    for document in documents:
        if BUILT_IN.fullmatch(document["apiVersion"]):
            schemas.validate(document, schemas.latest_version(), strict=True)
            checked += 1
    assert checked >= 7


def test_the_schemas_would_find_something() -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    wrong = json.loads(json.dumps(manifests()["Deployment", "octavo"]))
    wrong["spec"]["template"]["spec"]["terminationGracePeriod"] = 1
    with pytest.raises(schemas.ValidationError):
        schemas.validate(wrong, schemas.latest_version(), strict=True)


@pytest.mark.parametrize(("overlay", "components"), CHOICES, ids=lambda value: "+".join(value) or "alone")
def test_an_overlay_as_built(overlay: str, components: tuple[str, ...], tmp_path: Path) -> None:
    found = {
        (document["kind"], document["metadata"]["name"]): document for document in built(tmp_path, overlay, components)
    }
    deployment = found["Deployment", "octavo"]["spec"]
    assert "replicas" not in deployment, "the autoscaler's"
    spec = deployment["template"]["spec"]
    (main,) = spec["containers"]
    assert main["image"] == {"cpu": "octavo:latest", "gpu": "octavo:cuda"}[overlay]
    assert main["resources"]["limits"]["memory"]
    assert ("nvidia.com/gpu" in main["resources"]["limits"]) == (overlay == "gpu")
    (source,) = main["envFrom"]
    assert ("ConfigMap", source["configMapRef"]["name"]) in found
    volumes = {volume.pop("name"): volume for volume in spec["volumes"]}
    assert {mount["name"] for mount in main["volumeMounts"]} == set(volumes)
    assert all(len(volume) == 1 for volume in volumes.values()), "a volume is of one kind"
    environment = {entry["name"]: entry.get("value") for entry in main["env"]}
    if not components:
        assert list(volumes["models"]) == ["emptyDir"]
        return
    assert volumes["models"]["persistentVolumeClaim"]["claimName"] == "octavo-models"
    assert ("PersistentVolumeClaim", "octavo-models") in found
    assert environment["OCTAVO_API_KEY_FILE"] == "/etc/octavo/keys"
    assert len(main["ports"]) == 3
    picker = found["Deployment", "octavo-picker"]["spec"]["template"]["spec"]
    assert re.fullmatch(r".+:v\d+\.\d+\.\d+", picker["containers"][0]["image"])
    assert ("ConfigMap", picker["volumes"][0]["configMap"]["name"]) in found


def test_keda_instead_of_the_adapter(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    (tmp_path / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "resources": [os.path.relpath(FOLDER / "base", tmp_path)],
                "components": [os.path.relpath(FOLDER / "components/keda", tmp_path)],
            }
        )
    )
    ran = subprocess.run(["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = {document["kind"]: document for document in yaml.safe_load_all(ran.stdout)}
    assert "replicas" not in found["Deployment"]["spec"]
    assert "HorizontalPodAutoscaler" not in found
    assert "ScaledObject" in found
