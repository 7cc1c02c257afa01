"""Dashboard and alerts of a fleet name metrics that there are."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from inl.errors import DeviceError
from inl.fleet.client import FleetClient
from inl.fleet.dns_names import DnsNames
from inl.fleet.engine_link import EngineLink, State
from inl.fleet.metrics import FleetMetrics
from inl.serve.admission import Ticket
from inl.serve.metrics import Metrics
from inl.serve.settings import ServerConfig
from inl.workers.settings import SECRET_FILE, read_secret

DEPLOY = Path(__file__).parents[2] / "deploy"
NAME = re.compile(r"inl:\w+")
STATE = re.compile(r'state="(\w+)"')

COMMANDS = (DEPLOY.parent / "docs" / "cli.md").read_text()

ENGINES_OWN = {"inl:failed_steps_total"}
"""Exported by each engine's server, see ``tests/serve/test_operations.py``."""


@pytest.fixture(scope="module")
def exported():
    client = FleetClient(ServerConfig())
    client.engines.append(EngineLink("127.0.0.1:1", None, client))
    text = FleetMetrics(client, vllm_names=False).text().decode()
    names = {line.split("{")[0].split(" ")[0] for line in text.splitlines()}
    return names, text


def expressions(name):
    text = (DEPLOY / name).read_text()
    if name.endswith(".json"):
        panels = json.loads(text)["panels"]
        return [target["expr"] for panel in panels for target in panel["targets"]]
    found = re.findall(r"^ +expr: (.*)$", text, re.MULTILINE)
    assert len(found) == text.count("- alert: ")
    return found


@pytest.mark.parametrize("name", ["grafana-fleet.json", "alerts.yml"])
def test_expressions_name_metrics_and_states_that_there_are(name, exported):
    names, _ = exported
    found = expressions(name)
    assert len(found) > 8
    for text in found:
        assert text.count("(") == text.count(")")
        used = set(NAME.findall(text))
        assert used <= names | ENGINES_OWN, text
        assert used or text.startswith("up{"), text
        assert set(STATE.findall(text)) <= {state.value for state in State}


def test_kubernetes_has_options_and_metrics_that_there_are(exported):
    yaml = pytest.importorskip("yaml")
    text = (DEPLOY / "kubernetes.yml").read_text()
    parts = list(yaml.safe_load_all(text))
    assert set(NAME.findall(text)) <= exported[0]
    services = {p["metadata"]["name"] for p in parts if p["kind"] == "Service"}
    pods = [p["spec"]["template"]["spec"] for p in parts if p["kind"] == "Deployment"]
    kinds = {}
    for pod in pods:
        seconds = pod["terminationGracePeriodSeconds"]
        assert seconds > ServerConfig().drain_seconds
        (container,) = pod["containers"]
        args = container["args"]
        options = {each for each in args if each.startswith("--")}
        assert all(f"`{option}" in COMMANDS for option in options)
        kinds[container["name"]] = args
    name = next(each for each in kinds["server"] if each.startswith("dns:"))
    assert DnsNames([name])
    assert name.split(":")[1] in services
    port = kinds["engine"][kinds["engine"].index("--listen") + 1].rpartition(":")[2]
    assert name.endswith(f":{port}")


def pods_of(text):
    """Specs of the pods of all parts of a manifest."""
    yaml = pytest.importorskip("yaml")
    waiting = list(yaml.safe_load_all(text))
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if "containers" in part:
                yield part
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


def secret_in(container, pod, folder):
    """The secret of workers that a container finds, with its files as they are there.

    A pod with an fsGroup gives its group at least the right to read.
    """
    settings, stored = {}, {"secret": "5a" * 32, "keys": "a key"}
    for each in container.get("env", ()):
        source = each.get("valueFrom", {}).get("secretKeyRef")
        settings[each["name"]] = stored[source["key"]] if source else each.get("value")
    volumes = {each["name"]: each["secret"] for each in pod.get("volumes", ())}
    options = [w for arg in container.get("args", ()) for w in arg.split("=", 1)]
    if "--secret-file" in options:
        settings[SECRET_FILE] = options[options.index("--secret-file") + 1]
    for mount in container.get("volumeMounts", ()):
        volume = volumes[mount["name"]]
        mode = volume["defaultMode"]
        mode |= 0o440 if "fsGroup" in pod.get("securityContext", {}) else 0
        names = [each["key"] for each in volume.get("items", ())] or list(stored)
        for name in names:
            path = folder / f"{container['name']}-{name}"
            path.write_text(stored[name])
            path.chmod(mode)
            if settings.get(SECRET_FILE) == f"{mount['mountPath']}/{name}":
                settings[SECRET_FILE] = str(path)
    return read_secret({k: v for k, v in settings.items() if v is not None})


@pytest.mark.parametrize("name", ["kubernetes.yml", "leader-worker-set.yml"])
def test_every_container_can_read_the_secret(name, tmp_path):
    """As its file or its variable, which the command refuses if others may read it."""
    text = (DEPLOY / name).read_text()

    def secrets(text):
        return [secret_in(each, pod, tmp_path)
                for pod in pods_of(text) for each in pod["containers"]]  # fmt: skip

    found = secrets(text)
    assert found == [b"\x5a" * 32] * {"kubernetes.yml": 2}.get(name, 3)
    planted = text.replace('"dns:inl-engines:7000",', "--secret-file, /inl/keys,")
    planted = planted.replace("- --api-key=", "- --secret-file=").replace("@", "")
    planted = planted.replace("INL_WORKER_SECRET", "OTHER")
    with pytest.raises(DeviceError, match="other users may read the secret"):
        secrets(planted)


def test_keda_wants_as_many_engines_as_the_requests_fill():
    """The query is computed as PromQL does: samples with equal labels are added."""
    yaml = pytest.importorskip("yaml")
    parts = list(yaml.safe_load_all((DEPLOY / "kubernetes.yml").read_text()))
    (scaled,) = (p["spec"] for p in parts if p["kind"] == "ScaledObject")
    (trigger,) = (each["metadata"] for each in scaled["triggers"])
    one, two = re.fullmatch(r"sum\((\S+) \+ (\S+)\)", trigger["query"]).groups()
    places = int(trigger["threshold"])

    def wanted_engines(clients):
        total = 0.0
        for client in clients:
            text = FleetMetrics(client, vllm_names=False).text().decode()
            found = {family.name: {tuple(sorted(each.labels.items())): each.value
                                   for each in family.samples}
                     for family in text_string_to_metric_families(text)}  # fmt: skip
            same = found[one].keys() & found[two].keys()
            assert same, "without equal labels the sum is empty"
            total += sum(found[one][each] + found[two][each] for each in same)
        least, most = scaled["minReplicaCount"], scaled["maxReplicaCount"]
        return min(max(math.ceil(total / places), least), most)

    clients = [FleetClient(ServerConfig(max_queue=10_000)) for _ in range(2)]
    for client in clients:
        client.admission.max_running = 2 * places
    assert wanted_engines(clients) == 1, "no request is open"
    tickets = []
    for number in range(5 * places):
        admission = clients[number % 2].admission
        tickets.append((admission, Ticket("key", 1)))
        admission.enter(tickets[-1][1])
    assert sum(each.admission.waiting for each in clients) == places
    assert wanted_engines(clients) == 5, "those that wait count, too"
    for admission, ticket in tickets[places - 1 :]:
        admission.leave(ticket, finished=True)
    assert wanted_engines(clients) == 1
    for number in range(20 * places):
        clients[number % 2].admission.enter(Ticket("key", 1))
    assert wanted_engines(clients) == 8, "the most"


def test_the_names_of_engines_are_theirs():
    metrics = Metrics(vllm_names=False)
    metrics.total("failed_steps", {"model_name": "m", "engine": "0"}, lambda: 1)
    assert all(name in metrics.text().decode() for name in ENGINES_OWN)


def test_the_dashboard_shows_all_counts_of_the_fleet(exported):
    used = " ".join(expressions("grafana-fleet.json"))
    fleet = {name for name in exported[0] if name.startswith("inl:fleet_")}
    assert {name for name in fleet if name not in used} == set()
