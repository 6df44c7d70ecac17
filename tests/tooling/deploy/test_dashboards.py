"""What `deploy/` shows and alerts on exists in /metrics; and the files fit together."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from test_http_api import MODEL, Api

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
RULES = [rule for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
SCRAPED = {"instance", "job"}  # labels that Prometheus adds
OVER_TIME = {"rate", "increase", "irate"}


def panels(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["panels"]
    return found


def targets() -> Iterator[tuple[str, str, str]]:
    """Every query of every dashboard: what shows it, the query, and the legend."""
    for path in DASHBOARDS:
        for panel in panels(path):
            for target in panel.get("targets", ()):
                yield f"{path.stem}: {panel['title']}", target["expr"], target["legendFormat"]


QUERIES = [*((where, query) for where, query, _ in targets()), *((rule["alert"], rule["expr"]) for rule in RULES)]


class Exposition:
    """What a scrape of an app that has served some requests holds."""

    def __init__(self) -> None:
        api = Api()
        api.complete(prompt=["a", "bc"], n=2)
        api.stream(prompt="d")
        self.types = {"up": "gauge"}  # made by Prometheus itself
        self.values: dict[str, dict[str, set[str]]] = {"up": {}}
        for family in text_string_to_metric_families(api.request("GET", "/metrics").text):
            for sample in family.samples:
                self.types[sample.name] = family.type
                labels = self.values.setdefault(sample.name, {})
                for name, value in sample.labels.items():
                    labels.setdefault(name, set()).add(value)

    def labels(self, name: str) -> set[str]:
        return set(self.values[name]) | SCRAPED


@pytest.fixture(scope="module")
def scraped() -> Exposition:
    return Exposition()


def parse(query: str) -> promql.Expr:
    """The query as Prometheus would read it; Grafana's variables are filled in."""
    query = re.sub(r"\$__(rate_interval|interval|range)\b", "5m", query)
    return promql.parse(re.sub(r"\$\w+", ".*", query))


def children(node: promql.Expr) -> list[promql.Expr]:
    names = {
        promql.AggregateExpr: ("expr", "param"),
        promql.BinaryExpr: ("lhs", "rhs"),
        promql.MatrixSelector: ("vector_selector",),
        promql.SubqueryExpr: ("expr",),
        promql.ParenExpr: ("expr",),
        promql.UnaryExpr: ("expr",),
    }
    if isinstance(node, promql.Call):
        return list(node.args)
    return [child for name in names.get(type(node), ()) if (child := getattr(node, name)) is not None]


def nodes(node: promql.Expr) -> Iterator[promql.Expr]:
    yield node
    for child in children(node):
        yield from nodes(child)


def selectors(node: promql.Expr) -> list[Any]:
    return [item for item in nodes(node) if isinstance(item, promql.VectorSelector)]


def check(query: str, scraped: Exposition) -> None:
    """Every metric and label exists, histograms and counters are used as such, and gauges as such."""
    tree = parse(query)
    assert selectors(tree), "it asks for nothing"
    over_time: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, promql.Call) and node.func.name in OVER_TIME:
            over_time |= {str(selector) for selector in selectors(node)}
        if isinstance(node, promql.Call) and node.func.name == "histogram_quantile":
            assert all(selector.name.endswith("_bucket") for selector in selectors(node))
            grouped = [item for item in nodes(node) if isinstance(item, promql.AggregateExpr)]
            assert all(item.modifier is not None and "le" in item.modifier.labels for item in grouped)
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            for selector in selectors(node):
                assert set(node.modifier.labels) <= scraped.labels(selector.name), selector.name
        if isinstance(node, promql.BinaryExpr) and node.modifier is not None and node.modifier.matching is not None:
            for selector in selectors(node):
                assert set(node.modifier.matching.labels) <= scraped.labels(selector.name), selector.name
            assert set(node.modifier.group_labels or ()) <= set().union(
                *(scraped.labels(selector.name) for selector in selectors(node.rhs))
            )
    for selector in selectors(tree):
        assert selector.name in scraped.types, f"{selector.name} is not in /metrics"
        counts = scraped.types[selector.name] in ("counter", "histogram")
        assert counts == (str(selector) in over_time), f"{selector.name} is a {scraped.types[selector.name]}"
        for matcher in selector.matchers.matchers:
            assert matcher.name in scraped.labels(selector.name), f"{selector.name} has no label {matcher.name}"
            if matcher.name not in SCRAPED and matcher.value != ".*":
                assert set(matcher.value.split("|")) <= scraped.values[selector.name][matcher.name]


@pytest.mark.parametrize(("where", "query"), QUERIES, ids=[where for where, _ in QUERIES])
def test_every_query_finds_its_metrics(where: str, query: str, scraped: Exposition) -> None:
    check(query, scraped)


@pytest.mark.parametrize(
    "query",
    [
        "octavo_no_such_metric",
        "octavo_engine_up{color='red'}",
        "octavo_prompt_tokens_total",
        "rate(octavo_num_requests_running[5m])",
        "sum by (reason) (rate(octavo_steps_total[5m]))",
        "histogram_quantile(0.5, sum(rate(octavo_step_seconds_bucket[5m])))",
        "histogram_quantile(0.5, rate(octavo_step_seconds_sum[5m]))",
        "rate(octavo_requests_aborted_total{reason='boredom'}[5m])",
        "octavo_engine_up * on (color) octavo_build_info",
        "octavo_engine_up * on (instance) group_left (color) octavo_build_info",
        "1 + 1",
    ],
)
def test_the_check_finds_what_is_wrong(query: str, scraped: Exposition) -> None:
    with pytest.raises(AssertionError):
        check(query, scraped)


def vllm_queries() -> Iterator[str]:
    """As dashboards made for vLLM ask, whose only selector is the model's name."""
    model = f'{{model_name="{MODEL}"}}'
    for name in (
        "e2e_request_latency_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds",
        "request_time_per_output_token_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens", "iteration_tokens_total",
    ):  # fmt: skip
        buckets = f"rate(vllm:{name}_bucket{model}[$__rate_interval])"
        yield f"histogram_quantile(0.99, sum by(le) ({buckets}))"
        yield f"histogram_quantile(0.99, sum by(le, engine) ({buckets}))"
        yield f"rate(vllm:{name}_sum{model}[5m]) / rate(vllm:{name}_count{model}[5m])"
        yield f"sum by(le) (increase(vllm:{name}_bucket{model}[$__rate_interval]))"
    for name in ("prompt_tokens", "prompt_tokens_cached", "generation_tokens", "num_preemptions"):
        yield f"rate(vllm:{name}_total{model}[$__rate_interval])"
    yield f"sum by(finished_reason) (increase(vllm:request_success_total{model}[$__rate_interval]))"
    yield f'rate(vllm:request_success_total{{model_name="{MODEL}", finished_reason="stop"}}[5m])'
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        yield f"vllm:{name}{model}"
        yield f"avg by(model_name) (vllm:{name})"
    yield f"rate(vllm:prefix_cache_hits_total{model}[5m]) / rate(vllm:prefix_cache_queries_total{model}[5m])"
    # What routers read.
    yield 'vllm:cache_config_info{block_size="16", cache_dtype="int8", num_gpu_blocks="10"}'
    yield 'vllm:lora_requests_info{max_lora="0", running_lora_adapters="", waiting_lora_adapters=""}'


@pytest.mark.parametrize("query", list(vllm_queries()))
def test_dashboards_made_for_vllm_find_their_metrics(query: str, scraped: Exposition) -> None:
    check(query, scraped)


# ---------------------------------------------------------------- the files fit together


@pytest.mark.parametrize(("where", "query", "legend"), list(targets()))
def test_legends_name_labels_that_the_query_keeps(where: str, query: str, legend: str, scraped: Exposition) -> None:
    tree = parse(query)
    grouped = [node for node in nodes(tree) if isinstance(node, promql.AggregateExpr)]
    kept = set().union(*(scraped.labels(selector.name) for selector in selectors(tree)))
    for node in grouped:
        kept &= set(node.modifier.labels) if node.modifier is not None else set()
    assert set(re.findall(r"{{(\w+)}}", legend)) <= kept


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alerts_say_which_instance(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
    for node in nodes(parse(rule["expr"])):
        if isinstance(node, promql.AggregateExpr):
            assert node.modifier is not None
            assert "instance" in node.modifier.labels
    for text in rule["annotations"].values():
        assert set(re.findall(r"{{ *\$(\w+)", text)) <= {"labels", "value"}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_are_well_formed(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    assert dashboard["uid"]
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {"datasource", "instance"}
    shown = panels(path)
    assert [panel["id"] for panel in shown] == list(range(1, len(shown) + 1))
    assert [panel["title"] for panel in shown if panel["type"] == "row"] == [
        "Now", "Traffic", "Latency", "Engine", "Errors", "Process"
    ]  # fmt: skip
    for one, other in itertools.combinations((panel["gridPos"] for panel in shown), 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, (one, other)
    for panel in shown:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert panel["type"] == "row" or panel["targets"]
        for target in panel.get("targets", ()):
            assert 'instance=~"$instance"' in target["expr"], "the variable does nothing here"
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def mounts(service: str) -> dict[str, Path]:
    """Where a service of the compose file finds which file of the repository, all read-only."""
    found = {}
    for volume in COMPOSE["services"][service]["volumes"]:
        volume = re.sub(r"\${\w+:-([^}]*)}", r"\1", volume)
        if volume.startswith("./deploy"):
            source, target, mode = volume.split(":")
            assert mode == "ro"
            found[target] = ROOT / source
        else:
            assert volume.split(":")[0] in COMPOSE["volumes"]
    return found


def inside(service: str, path: str) -> Path:
    """A path in the service's container as a path of the repository."""
    for target, source in mounts(service).items():
        if path == target or path.startswith(f"{target}/"):
            return source / path.removeprefix(target).lstrip("/")
    raise AssertionError(f"{path} is not mounted into {service}")


@pytest.mark.parametrize("service", ["prometheus", "grafana"])
def test_the_monitoring_services_are_closed(service: str) -> None:
    settings = COMPOSE["services"][service]
    assert settings["profiles"] == ["monitoring"]
    assert all(port.startswith("127.0.0.1:") for port in settings["ports"])
    assert re.fullmatch(r"[\w/.-]+:v?\d+\.\d+\.\d+@sha256:[0-9a-f]{64}", settings["image"])
    assert settings["read_only"] is True
    assert settings["cap_drop"] == ["ALL"]
    assert settings["security_opt"] == ["no-new-privileges:true"]
    assert all(source.exists() for source in mounts(service).values())


def test_prometheus_finds_its_files_and_the_service() -> None:
    command = COMPOSE["services"]["prometheus"]["command"]
    (config_path,) = (word.removeprefix("--config.file=") for word in command if word.startswith("--config.file="))
    config = yaml.safe_load(inside("prometheus", config_path).read_text())
    assert [inside("prometheus", path) for path in config["rule_files"]] == [DEPLOY / "alerts.yml"]
    (job,) = (job for job in config["scrape_configs"] if job["job_name"] == "octavo")
    assert inside("prometheus", job["authorization"]["credentials_file"]).read_text() == ""
    (target,) = job["static_configs"][0]["targets"]
    name, _, port = target.partition(":")
    assert any(str(published).endswith(f":{port}") for published in COMPOSE["services"][name]["ports"])
    assert job.get("metrics_path", "/metrics") == "/metrics"


def test_grafana_finds_its_files_and_prometheus() -> None:
    provisioning = inside("grafana", "/etc/grafana/provisioning")
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    name, _, port = source["url"].removeprefix("http://").partition(":")
    assert any(published.endswith(f":{port}") for published in COMPOSE["services"][name]["ports"])
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "octavo.yml").read_text())["providers"]
    assert sorted(inside("grafana", provider["options"]["path"]).glob("*.json")) == DASHBOARDS
    home = COMPOSE["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert inside("grafana", home) in DASHBOARDS
    for path in DASHBOARDS:
        variables = json.loads(path.read_text())["templating"]["list"]
        (chosen,) = (variable for variable in variables if variable["name"] == "datasource")
        assert chosen["current"]["value"] == source["uid"]
        assert chosen["query"] == source["type"] == "prometheus"
        assert (
            source["jsonData"]["timeInterval"]
            == yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["global"]["scrape_interval"]
        )
