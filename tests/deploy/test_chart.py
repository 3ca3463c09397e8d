"""The Helm chart: each file of values in `ci/` is rendered by Helm, and what comes out is checked.

The schemas of Kubernetes' kinds are a package's. The operators' kinds have no schema that is
published as a package: the fields that the chart uses are written down in `operator_schemas.py`.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from ragcache_api.cli.main import app
from ragcache_api.settings import ServiceSettings
from tests.conftest import REPOSITORY
from tests.deploy.operator_schemas import OPERATOR_SCHEMAS
from tools import chart as chart_tool

helm = pytest.importorskip("helm_python", reason="Helm's library has wheels for Linux on x86-64")

CHART = REPOSITORY / "deploy" / "helm" / "ragcache"
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
VALUES = sorted(path.name for path in (CHART / "ci").glob("*-values.yaml"))
VERSION = kubernetes_validate.latest_version()
USER = 10001
OPTIONAL_KINDS = {
    "Ingress", "HorizontalPodAutoscaler", "NetworkPolicy", "PodDisruptionBudget", "ServiceMonitor",
    "ConfigMap",
}  # fmt: skip
Resources = dict[str, dict[str, Any]]


def values_of(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((CHART / "ci" / name).read_text(encoding="utf-8")))


def render(values: dict[str, Any], release: str = "demo") -> Resources:
    """The resources by kind. The chart makes one of each."""
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name=release, namespace="answers")
    parts = [yaml.safe_load(text) for name, text in files.items() if name.endswith(".yaml")]
    made = [part for part in parts if part]
    resources = {part["kind"]: part for part in made}
    assert len(resources) == len(made)
    return resources


@pytest.fixture(params=VALUES)
def rendered(request: pytest.FixtureRequest) -> tuple[dict[str, Any], Resources]:
    """The values of a file, with the chart's own, and what they render."""
    values = values_of(request.param)
    with helm.Chart.load(CHART) as chart:
        merged = chart.merge_values(values)
    return merged, render(values)


def pods_of(resources: Resources) -> dict[str, dict[str, Any]]:
    """The templates of pods, by their part."""
    if "StatefulSet" in resources:
        return {"service": resources["StatefulSet"]["spec"]["template"]}
    ray = resources["RayService"]["spec"]["rayClusterConfig"]
    [workers] = ray["workerGroupSpecs"]
    return {"head": ray["headGroupSpec"]["template"], "worker": workers["template"]}


def containers_of(pod: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from pod["spec"].get("initContainers", [])
    yield from pod["spec"]["containers"]


def settings_of(resources: Resources) -> dict[str, Any]:
    """The settings that the service reads, with made-up secrets."""
    if "StatefulSet" in resources:
        [container] = pods_of(resources)["service"]["spec"]["containers"]
        pairs = {each["name"]: each.get("value") for each in container["env"]}
        given = {name: value for name, value in pairs.items() if name.startswith("RAGCACHE_")}
        given = {name.removeprefix("RAGCACHE_").lower(): value for name, value in given.items()}
    else:
        served = yaml.safe_load(resources["RayService"]["spec"]["serveConfigV2"])
        given = served["applications"][0]["args"] | {"ledger": None}
    if "ledger" in given:
        given["ledger"] = "postgresql://user@host/name"
    return given


@pytest.mark.parametrize("name", VALUES)
def test_helm_finds_nothing_to_warn_of(name: str) -> None:
    found = helm.lint(CHART, values_of(name), strict=True)
    serious = [each for each in found["messages"] if each["severity"] > 1]
    assert (serious, found["errors"]) == ([], [])


def test_examples_use_all_that_the_chart_has() -> None:
    assert len(VALUES) >= 6
    kinds = set().union(*(render(values_of(name)) for name in VALUES))
    templates = list((CHART / "templates").glob("*.yaml"))
    assert len(kinds) == len(templates)
    assert kinds > OPTIONAL_KINDS
    assert not OPTIONAL_KINDS & render({}).keys(), "they are options"


def test_resources_keep_to_their_schemas(rendered: tuple[dict[str, Any], Resources]) -> None:
    _, resources = rendered
    for kind, resource in resources.items():
        if kind in OPERATOR_SCHEMAS:
            jsonschema.validate(resource, OPERATOR_SCHEMAS[kind])
        else:
            kubernetes_validate.validate(resource, VERSION, strict=True)
    for template in pods_of(resources).values():
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        kubernetes_validate.validate(pod, VERSION, strict=True)
        wrong = copy.deepcopy(pod)
        wrong["spec"]["containers"][0]["readinessProbes"] = {}
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(wrong, VERSION, strict=True)


def test_settings_are_read_by_the_service(rendered: tuple[dict[str, Any], Resources]) -> None:
    values, resources = rendered
    given = settings_of(resources)
    settings = ServiceSettings(**given)
    assert settings.host == "0.0.0.0"
    assert settings.device.startswith("cuda") is (values["gpu"]["count"] > 0)
    ports = [port for pod in pods_of(resources).values() for each in containers_of(pod)
             for port in each.get("ports", [])]  # fmt: skip
    assert settings.port in {port["containerPort"] for port in ports}
    expected = ServiceSettings(**values["settings"])
    assert {name: getattr(settings, name) for name in values["settings"]} == {
        name: getattr(expected, name) for name in values["settings"]
    }
    several = values["mode"] == "ray" or values["autoscaling"]["enabled"]
    if several:
        assert settings.cluster_ledger()
    if values["mode"] == "ray":
        bounds = values["ray"]["minReplicas"], values["ray"]["maxReplicas"]
        assert settings.autoscale_bounds == bounds


def test_pods_are_locked_down(rendered: tuple[dict[str, Any], Resources]) -> None:
    """Pods have what the level `restricted` of Pod Security asks for, and a read-only root."""
    _, resources = rendered
    home = re.search(r"^VOLUME (\S+)$", DOCKERFILE, re.MULTILINE)
    assert home
    assert f"USER {USER}:{USER}" in DOCKERFILE
    for name, pod in pods_of(resources).items():
        assert pod["spec"]["enableServiceLinks"] is False, "they would set RAGCACHE_PORT"
        if name != "head":  # whose account KubeRay makes, for its autoscaler
            assert pod["spec"]["automountServiceAccountToken"] is False
        context = pod["spec"]["securityContext"]
        assert context["runAsNonRoot"]
        assert {context[key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {USER}
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        volumes = {each["name"] for each in pod["spec"]["volumes"]}
        claims = resources.get("StatefulSet", {}).get("spec", {}).get("volumeClaimTemplates", [])
        volumes |= {each["metadata"]["name"] for each in claims}
        for container in containers_of(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
            assert {home[1], "/tmp"} <= mounts.keys()
            assert set(mounts.values()) <= volumes


def test_secrets_are_made_or_exist(rendered: tuple[dict[str, Any], Resources]) -> None:
    values, resources = rendered
    made = resources.get("Secret", {"metadata": {"name": ""}, "stringData": {}})
    sources = [values[part]["existingSecret"]["name"]
               for part in ("operatorKey", "ledger", "remote", "huggingFace")]  # fmt: skip
    asked = []
    for pod in pods_of(resources).values():
        for container in containers_of(pod):
            found = [each.get("valueFrom", {}) for each in container.get("env", [])]
            asked += [each["secretKeyRef"] for each in found if each]
        for volume in pod["spec"]["volumes"]:
            if "secret" in volume:
                [item] = volume["secret"]["items"]
                asked.append({"name": volume["secret"]["secretName"], "key": item["key"]})
    if "ServiceMonitor" in resources:
        [endpoint] = resources["ServiceMonitor"]["spec"]["endpoints"]
        asked.append(endpoint["authorization"]["credentials"])
    assert asked
    for each in asked:
        here = each["name"] == made["metadata"]["name"] and each["key"] in made["stringData"]
        assert here or each["name"] in sources
    used = {each["key"] for each in asked if each["name"] == made["metadata"]["name"]}
    assert used == made["stringData"].keys()


def test_selectors_find_the_pods(rendered: tuple[dict[str, Any], Resources]) -> None:
    _, resources = rendered
    pods = pods_of(resources)
    labels = [pod["metadata"]["labels"] for pod in pods.values()]
    kinds = resources.keys() & {"StatefulSet", "PodDisruptionBudget"}
    selectors = [resources[kind]["spec"]["selector"]["matchLabels"] for kind in kinds]
    if "NetworkPolicy" in resources:
        selectors.append(resources["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"])
    if "Service" in resources:
        service = resources["Service"]
        selectors.append(service["spec"]["selector"])
        target = service["spec"]["ports"][0]["targetPort"]
    else:
        service = resources["RayService"]["spec"]["serveService"]
        target = "serve"
    for selector in selectors:
        assert all(selector.items() <= each.items() for each in labels)
    [container] = (pods.get("service") or pods["head"])["spec"]["containers"]
    assert target in {port["name"] for port in container["ports"]}
    port_names = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    if "ServiceMonitor" in resources:
        monitor = resources["ServiceMonitor"]["spec"]
        assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        assert monitor["endpoints"][0]["port"] in port_names
    if "Ingress" in resources:
        [rule] = resources["Ingress"]["spec"]["rules"]
        backend = rule["http"]["paths"][0]["backend"]["service"]
        assert backend["name"] == service["metadata"]["name"]
        assert backend["port"]["number"] in port_names.values()
    if "HorizontalPodAutoscaler" in resources:
        target = resources["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
        assert target["name"] == resources["StatefulSet"]["metadata"]["name"]
        assert "replicas" not in resources["StatefulSet"]["spec"], "they are the autoscaler's"


def test_ray_serves_the_application() -> None:
    from ray.serve.schema import ServeDeploySchema

    for name in (name for name in VALUES if name.startswith("ray")):
        ray = render(values_of(name))["RayService"]["spec"]
        served = ServeDeploySchema.model_validate(yaml.safe_load(ray["serveConfigV2"]))
        [application] = served.applications
        module, _, function = application.import_path.partition(":")
        source = REPOSITORY / "api" / f"{module.replace('.', '/')}.py"
        assert f"def {function}(args" in source.read_text("utf-8")
        groups = ray["rayClusterConfig"]
        constraints = (REPOSITORY / "constraints.txt").read_text("utf-8").split()
        assert f"ray=={groups['rayVersion']}" in constraints
        [workers] = groups["workerGroupSpecs"]
        bounds = f"{workers['minReplicas']}-{workers['maxReplicas']}"
        assert application.args["autoscale"] == bounds
        for pod in pods_of({"RayService": {"spec": ray}}).values():
            [container] = pod["spec"]["containers"]
            assert container["readinessProbe"]["httpGet"]["port"] == 52365, (
                "KubeRay's own probe needs wget, and a proxy on each worker"
            )


def test_the_chart_and_the_package_have_one_version() -> None:
    with helm.Chart.load(CHART) as chart:
        metadata = chart.metadata
    project = (REPOSITORY / "pyproject.toml").read_text("utf-8")
    assert f'\nversion = "{metadata["version"]}"\n' in project
    assert metadata["version"] == metadata["appVersion"]
    [container] = render({})["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"ragcache:{metadata['appVersion']}"


def test_the_first_key_is_made_from_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resources = render({})
    pod = pods_of(resources)["service"]
    [container] = pod["spec"]["initContainers"]
    program, *arguments = container["command"]
    [mounted] = [each for each in container["volumeMounts"] if each["name"] == "operator-key"]
    file = tmp_path / "operator-key"
    file.write_text(resources["Secret"]["stringData"]["operator-key"], encoding="utf-8")
    arguments = [each.replace(mounted["mountPath"], str(tmp_path)) for each in arguments]
    monkeypatch.setenv("RAGCACHE_STATE", str(tmp_path / "state"))
    assert program == "ragcache"
    for _ in range(2):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
    assert "key 1 (admin, namespace default)" in done.output


def test_the_notes_print_the_key() -> None:
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values_of("gpu-values.yaml"), name="demo", namespace="answers")
    notes = files["ragcache/templates/NOTES.txt"].replace("\\\n", " ")
    [command] = [line for line in notes.splitlines() if " get secret " in line]
    words = shlex.split(command)
    assert words[words.index("secret") + 1] == "ragcache-operator"
    assert words[-1] == 'go-template={{index .data "key" | base64decode}}'


@pytest.mark.parametrize("name", VALUES)
def test_the_notes_name_what_the_chart_made(name: str) -> None:
    values = values_of(name)
    with helm.Chart.load(CHART) as chart:
        notes = chart.render(values, name="demo", namespace="answers")[
            "ragcache/templates/NOTES.txt"
        ]
    resources = render(values)
    [(kind, waited)] = re.findall(r" (statefulset|rayservice)/(\S+)$", notes, re.MULTILINE)
    made = {each.lower(): resource["metadata"]["name"] for each, resource in resources.items()}
    assert made[kind] == waited
    [forwarded] = re.findall(r"port-forward service/(\S+) ", notes)
    served = resources["Service" if kind == "statefulset" else "RayService"]
    assert forwarded == served["metadata"]["name"]
    hosts = [
        rule["host"] for rule in resources.get("Ingress", {"spec": {"rules": []}})["spec"]["rules"]
    ]
    assert re.findall(r"^From outside: https://(.+)/$", notes, re.MULTILINE) == hosts


REFUSED: dict[str, dict[str, Any]] = {
    "additional properties 'setings' not allowed": {"setings": {}},
    "value must be one of": {"settings": {"hosts_bytes": "4GiB"}},
    "operatorKey": {"operatorKey": {"value": "secret"}},
    "set ledger.url": {"replicas": 2},
    "remote.url": {"mode": "ray", "ledger": {"url": "postgresql://host/name"}},
    "existingClaim is for a single": {
        "replicas": 2, "ledger": {"url": "postgresql://host/name"}, "remote": {"url": "s3://b/p"},
        "persistence": {"existingClaim": "mine"},
    },
    "ingress.host": {"ingress": {"enabled": True}},
    "needs remote.secretAccessKey": {"remote": {"accessKeyId": "id"}},
}  # fmt: skip


@pytest.mark.parametrize("told", REFUSED)
def test_wrong_values_are_refused_with_what_to_do(told: str) -> None:
    with pytest.raises(helm.HelmError) as caught:
        render(REFUSED[told])
    assert told in str(caught.value)


def test_the_schema_names_the_settings_of_the_service() -> None:
    stored = chart_tool.SCHEMA.read_text(encoding="utf-8")
    assert stored == chart_tool.written_schema(), "python -m tools.chart --write"


def test_each_value_is_in_the_schema() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    schema = json.loads(chart_tool.SCHEMA.read_text(encoding="utf-8"))

    def compare(values: dict[str, Any], schema: dict[str, Any], place: str) -> None:
        if "properties" not in schema:
            return
        optional = {"claims", "global"}
        assert schema["properties"].keys() - optional == values.keys(), place
        for name, value in values.items():
            if isinstance(value, dict):
                compare(value, schema["properties"][name], f"{place}.{name}")

    compare(values, schema, "")
