"""Settings: one list, from options, the environment and a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragcache.errors import ConfigurationError, MissingExtra
from ragcache_api.cli import admin
from ragcache_api.cli.main import app
from ragcache_api.http import ServiceSettings
from tests.conftest import REPOSITORY


def test_options_come_before_environment_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = 'port = 1\ngrace = 2\nhost = "127.0.0.2"\nallowed_hosts = ["a"]\n'
    (tmp_path / "ragcache.toml").write_text(text, encoding="utf-8")
    monkeypatch.setenv("RAGCACHE_PORT", "3")
    monkeypatch.setenv("RAGCACHE_GRACE", "4")
    settings = ServiceSettings.read(port=5, grace=None)
    assert (settings.port, settings.grace, settings.host) == (5, 4, "127.0.0.2")
    assert settings.allowed_hosts == ["a"]


@pytest.mark.parametrize(
    ("given", "name"),
    [({"port": 70000}, "port"), ({"surprise": 1}, "surprise"), ({"rate": "often"}, "rate"),
     ({"deadline": 0}, "deadline"), ({"kv_dtype": "int3"}, "kv_dtype"),
     ({"trusted_proxies": "nginx"}, "trusted_proxies")],
)  # fmt: skip
def test_what_cannot_be_used_is_named(given: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        ServiceSettings.read(**given)


def test_an_unknown_line_of_the_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ragcache.toml").write_text("prot = 8001\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="prot"):
        ServiceSettings.read()


def test_lists_are_split_at_commas_outside_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGCACHE_ALLOWED_HOSTS", "localhost, reader.local,")
    monkeypatch.setenv("RAGCACHE_TRUSTED_PROXIES", "")
    settings = ServiceSettings.read()
    assert settings.allowed_hosts == ["localhost", "reader.local"]
    assert settings.trusted_proxies == []
    assert ServiceSettings.read(trusted_proxies="10.0.0.0/8,::1").trusted_proxies == [
        "10.0.0.0/8", "::1",
    ]  # fmt: skip


def test_an_error_says_where_the_value_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ragcache.toml").write_text('port = "many"\n', encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"'port' \(ragcache.toml\)"):
        ServiceSettings.read()
    monkeypatch.setenv("RAGCACHE_PORT", "more")
    with pytest.raises(ConfigurationError, match=r"'port' \(the variable RAGCACHE_PORT\)"):
        ServiceSettings.read()
    with pytest.raises(ConfigurationError, match=r"'port' \(an option\)"):
        ServiceSettings.read(port="most")


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"port = \n", "is no TOML.*line 1"), (b"port", "is no TOML"),
     (b'host = "\xff"\n', "cannot be read")],
)  # fmt: skip
def test_a_broken_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ragcache.toml").write_bytes(content)
    with pytest.raises(ConfigurationError, match=f"ragcache.toml {told}"):
        ServiceSettings.read()


def test_only_what_was_given_reaches_the_opening() -> None:
    opening = ServiceSettings.read(host_bytes="1GiB").open_options()
    assert opening["host_bytes"] == "1GiB"
    assert "device_bytes" not in opening
    assert "instruction" not in opening, "the default is that of `RagCache.open`"
    assert ServiceSettings.read(instruction="Be kind.").open_options()["instruction"] == "Be kind."


def test_every_setting_has_a_text_below_its_field() -> None:
    texts = {name: field.description for name, field in ServiceSettings.model_fields.items()}
    assert [name for name, text in texts.items() if not text] == []


def test_settings_in_the_guide_exist() -> None:
    page = (REPOSITORY / "docs/guides/operate.md").read_text(encoding="utf-8")
    section = page.partition("## Settings")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+`) \|", section, re.MULTILINE)
    listed = re.findall(r"`(\w+)`", " ".join(rows))
    assert len(listed) > 10
    assert set(listed) <= ServiceSettings.model_fields.keys() - ServiceSettings.withheld.keys()


LEDGER, REMOTE = "postgresql://ragcache@localhost/ragcache", "file:///states"


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"remote": REMOTE}, "ledger.*not set"),
        ({"remote": REMOTE, "ledger": "sqlite:///a.sqlite"}, "SQLite is for one process"),
        ({"ledger": LEDGER}, "remote"),
    ],
)
def test_replicas_need_a_ledger_and_a_remote_that_they_share(
    given: dict[str, str], missing: str
) -> None:
    with pytest.raises(ConfigurationError, match=missing):
        ServiceSettings.read(**given).cluster_ledger()
    options = [text for name, value in given.items() for text in ("--set", f"{name}={value}")]
    done = CliRunner().invoke(app, ["serve", "--replicas", "2", *options])
    assert isinstance(done.exception, ConfigurationError)


def test_replicas_without_ray_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "find_spec", lambda _: None)
    options = ["--set", f"ledger={LEDGER}", "--set", f"remote={REMOTE}", "--set", "autoscale=1-8"]
    done = CliRunner().invoke(app, ["serve", *options])
    assert isinstance(done.exception, MissingExtra)
    assert "ragcache[ray]" in str(done.exception)


@pytest.mark.parametrize(("text", "bounds"), [("1-8", (1, 8)), ("4-2", (2, 4)), ("3-3", (3, 3))])
def test_bounds_of_a_scale(text: str, bounds: tuple[int, int]) -> None:
    assert ServiceSettings.read(autoscale=text).autoscale_bounds == bounds
    assert ServiceSettings.read().autoscale_bounds is None
    with pytest.raises(ConfigurationError, match="autoscale"):
        ServiceSettings.read(autoscale=text.replace("-", ":"))
