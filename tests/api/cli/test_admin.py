"""`ragcache keys`, `modules`, `stats`, `verify` and `doctor`, and their settings."""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ragcache import RagCache, SourceDocument
from ragcache.db import ApiKeys, Database, Ledger
from ragcache.errors import ConfigurationError, NoState, UnknownKey
from ragcache.models import LoadedModel
from ragcache.pipeline import gate
from ragcache.pipeline.gate import GateResult
from ragcache.store import KVStore, RemoteTier, admin
from ragcache_api.cli.main import app
from tests.api.cli.conftest import QUESTION, Run, error_of, json_of
from tests.ragcache.conftest import make_key, make_states

runner = CliRunner()


def test_a_key_is_made_listed_and_revoked(tmp_path: Path) -> None:
    where = ["--state", str(tmp_path / "state")]
    made = runner.invoke(app, ["keys", "create", "page", "--role", "admin", "--json", *where])
    secret = json.loads(made.stdout)["secret"]
    plain = runner.invoke(app, ["keys", "create", "lab", "--namespace", "lab-1", *where])
    assert plain.stdout.splitlines()[0].startswith("rc-")
    database = Database.open(tmp_path / "state" / "ledger.sqlite")
    assert ApiKeys(database).check(secret).key is not None
    listed = runner.invoke(app, ["keys", "ls", *where]).output
    assert secret not in listed
    assert ["1", "page", "admin", "default"] in [line.split()[:4] for line in listed.splitlines()]
    assert runner.invoke(app, ["keys", "revoke", "1", *where]).exit_code == 0
    assert ApiKeys(database).check(secret).key is None
    rows = json.loads(runner.invoke(app, ["keys", "ls", "--json", *where]).stdout)
    assert [bool(row["revoked_at"]) for row in rows] == [True, False]
    assert rows[1]["namespace"] == "lab-1"
    database.close()


def test_key_errors_are_named(tmp_path: Path) -> None:
    where = ["--state", str(tmp_path / "state")]
    assert isinstance(runner.invoke(app, ["keys", "ls", *where]).exception, NoState)
    wrong = runner.invoke(app, ["keys", "create", "page", "--role", "root", *where])
    assert isinstance(wrong.exception, ConfigurationError)
    assert "no keys yet" in runner.invoke(app, ["keys", "ls", *where]).output
    assert isinstance(runner.invoke(app, ["keys", "revoke", "7", *where]).exception, UnknownKey)


@pytest.fixture
def state(tmp_path: Path, reader: LoadedModel) -> Path:
    with RagCache.open(tmp_path / "state", reader) as rag:
        rag.ingest("notes", [SourceDocument("kiln", "The kiln is in the yard.")])
    return tmp_path / "state"


def list_module(state: Path) -> dict[str, Any]:
    [row] = json.loads(
        runner.invoke(app, ["modules", "ls", "--state", str(state), "--json"]).stdout
    )
    return dict(row)


def expire(state: Path, *words: str) -> Any:
    return runner.invoke(app, ["modules", "expire", *words, "--state", str(state)])


def test_modules_expire_sets_and_lifts_a_limit(state: Path) -> None:
    number = str(list_module(state)["id"])
    dry = expire(state, number, "--after", "60", "--dry-run")
    assert "1 states would be kept for 60 s, unless they are pinned" in dry.output
    assert list_module(state)["expires_at"] is None
    assert "1 states are kept for 60 s" in expire(state, number, "--after", "60").output
    assert list_module(state)["expires_at"] == pytest.approx(time.time() + 60, abs=30)
    done = json.loads(expire(state, number, "--never", "--json").stdout)
    assert [(each["action"], each["tier"]) for each in done] == [("keep", "disk")]
    assert list_module(state)["expires_at"] is None


@pytest.mark.parametrize("words", [["1"], ["1", "--after", "1", "--never"], ["--never"]])
def test_modules_expire_needs_modules_and_one_limit(state: Path, words: list[str]) -> None:
    assert expire(state, *words).exit_code == 2


def test_modules_expire_names_an_unknown_module(state: Path) -> None:
    failed = expire(state, "999", "--never")
    assert failed.exit_code != 0
    assert "there is no module 999" in str(failed.exception)


@pytest.fixture
def pinned_and_evicted(reader: LoadedModel, notes: Path, tmp_path: Path) -> Path:
    """Three documents of which one is pinned, and another was evicted."""
    with RagCache.open(tmp_path / "state", reader) as rag:
        rag.ingest("notes", notes)
        rag.modules.pin("notes", ["boats.md"])
        rag.modules.evict("notes", ["keys.md"])
    return tmp_path / "state"


def test_stats_sum_up_collections_tiers_and_evictions(pinned_and_evicted: Path) -> None:
    shown = runner.invoke(app, ["stats", "--state", str(pinned_and_evicted)]).output.splitlines()
    assert ["notes", "3"] in [line.split() for line in shown]
    tiers = [line.split() for line in shown if line.startswith("disk")]
    assert tiers[0][:2] == ["disk", "3"], "two modules and the preamble"
    assert tiers[1] == ["disk", "1", "0"], "evicted by hand, not fetched again"
    plain = json.loads(
        runner.invoke(app, ["stats", "--state", str(pinned_and_evicted), "--json"]).stdout
    )
    assert plain["collections"] == {"notes": 3}
    assert plain["tiers"]["disk"]["states"] == 3
    assert plain["evictions"]["disk"]["manual"] == 1


def test_modules_are_listed_with_their_pins(pinned_and_evicted: Path) -> None:
    lines = runner.invoke(
        app, ["modules", "ls", "--state", str(pinned_and_evicted)]
    ).output.splitlines()
    rows = {line.split()[0]: line.split() for line in lines}
    assert rows["boats.md#1"][-1] == "pinned"
    assert rows["boats.md#1"][2] == "disk"
    assert rows["keys.md#1"][2:4] == ["none", "0"]
    assert "pinned" not in rows["leave.md#1"]


def test_an_empty_state_says_how_to_ingest(tmp_path: Path) -> None:
    Database.open(tmp_path / "ledger.sqlite").close()
    for command in (["stats"], ["modules", "ls"]):
        assert "ragcache ingest" in runner.invoke(app, [*command, "--state", str(tmp_path)]).output


@pytest.fixture
def unowned(tmp_path: Path) -> Path:
    """A store with one state that nothing needs."""
    database = Database.open(tmp_path / "ledger.sqlite")
    store = KVStore.open(tmp_path, database, 1 << 20)
    store.put_states(make_key(1), make_states(1))
    store.close()
    database.close()
    return tmp_path


def test_verify_prints_disagreements_and_repairs_on_request(unowned: Path) -> None:
    found = runner.invoke(app, ["verify", "--state", str(unowned)])
    assert found.exit_code == 1
    assert "unowned" in found.output
    assert "1 states, 0 modules: 1 disagreement, 0 mended" in found.output
    assert f"{str(make_key(1))[:12]}…" in found.output
    assert "--repair" in found.output
    mended = runner.invoke(app, ["verify", "--state", str(unowned), "--repair"])
    assert (mended.exit_code, "1 disagreement, 1 mended" in mended.output) == (0, True)
    clean = runner.invoke(app, ["verify", "--state", str(unowned)])
    assert (clean.exit_code, "0 states, 0 modules: nothing disagrees" in clean.output) == (0, True)


def test_verify_prints_json(unowned: Path) -> None:
    result = runner.invoke(app, ["verify", "--state", str(unowned), "--json"])
    report = json.loads(result.stdout)
    assert (report["clean"], report["states"], report["found"][0]["kind"]) == (False, 1, "unowned")


def test_verify_reads_a_remote_and_a_ledger_elsewhere(tmp_path: Path) -> None:
    url, far = f"sqlite:///{tmp_path / 'elsewhere.sqlite'}", f"file://{tmp_path / 'far'}"
    database = Database.open(url)
    store = KVStore.open(tmp_path, database, 1 << 20, remote=RemoteTier.open(far))
    store.put_states(make_key(1), make_states(1))
    admin.move(store, [make_key(1)], "remote")
    store.close()
    database.close()
    command = ["verify", "--state", str(tmp_path), "--ledger", url, "--json"]
    without = json.loads(runner.invoke(app, command).stdout)
    with_remote = json.loads(runner.invoke(app, [*command, "--remote", far]).stdout)
    assert (without["states"], with_remote["states"]) == (0, 1)
    assert {each["kind"] for each in with_remote["found"]} == {"unowned"}
    [blob] = (tmp_path / "far").rglob("*.safetensors")
    blob.write_bytes(blob.read_bytes()[:-1])
    broken = json.loads(runner.invoke(app, [*command, "--remote", far]).stdout)
    assert "corrupt" in {each["kind"] for each in broken["found"]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, with one state in `here` under a ledger elsewhere."""
    database = Database.open(f"sqlite:///{tmp_path / 'elsewhere.sqlite'}")
    store = KVStore.open(tmp_path / "here", database, 1 << 20)
    store.put_states(make_key(1), make_states(1))
    store.close()
    database.close()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def count_verified_states(*arguments: str) -> int:
    result = runner.invoke(app, ["verify", "--json", *arguments])
    return int(json.loads(result.stdout)["states"])


def test_the_settings_file_names_state_and_ledger(folder: Path) -> None:
    url = f"sqlite:///{folder / 'elsewhere.sqlite'}"
    (folder / "ragcache.toml").write_text(f'state = "here"\nledger = "{url}"\n', encoding="utf-8")
    assert count_verified_states() == 1


def test_an_option_comes_before_the_environment_and_that_before_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "ragcache.toml").write_text('ledger = "sqlite:///nowhere/a"\n', encoding="utf-8")
    monkeypatch.setenv("RAGCACHE_STATE", "here")
    monkeypatch.setenv("RAGCACHE_LEDGER", f"sqlite:///{folder / 'elsewhere.sqlite'}")
    assert count_verified_states() == 1
    empty = f"sqlite:///{folder / 'empty.sqlite'}"
    assert count_verified_states("--ledger", empty) == 0


@pytest.mark.parametrize(
    "name",
    [
        *("state", "model"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("host", "port", "dtype", "embedding", "instruction")
        ),
    ],
)
def test_a_setting_with_an_option_of_its_own_is_refused(folder: Path, name: str) -> None:
    result = runner.invoke(app, ["serve", "--set", f"{name}=x"])
    assert isinstance(result.exception, ConfigurationError)
    assert f"write --{name} x" in str(result.exception)


def test_an_unknown_setting_is_named(folder: Path) -> None:
    (folder / "ragcache.toml").write_text("stat = 1\n", encoding="utf-8")
    result = runner.invoke(app, ["verify"])
    assert result.exit_code != 0
    assert "stat" in str(result.exception)


def test_modules_ls_lists_sizes_and_tiers(run: Run, ingested: Path) -> None:
    listed = json_of(run("modules", "ls", "--json"))
    assert len(listed) == 3
    for row in listed:
        assert {"name", "collection", "tokens", "nbytes", "tiers", "hits"} <= set(row)
        assert row["collection"] == "notes"
        assert "disk" in row["tiers"]
    error_of(run("modules", "ls", "elsewhere", "--json"), "UnknownCollection")
    _, out, _ = run("modules", "ls", "notes")
    tokens = sum(row["tokens"] for row in listed)
    assert f"3 modules, {tokens} tokens" in out
    assert all(row["name"] in out for row in listed)


@pytest.mark.slow
def test_modules_ls_counts_hits(run: Run, ingested: Path) -> None:
    run("ask", QUESTION, "-c", "notes", "-k", 1)
    hits = {row["name"]: row["hits"] for row in json_of(run("modules", "ls", "--json"))}
    assert sorted(hits.values()) == [0, 0, 1]


def test_modules_ls_makes_no_folder(run: Run, tmp_path: Path) -> None:
    error_of(run("modules", "ls", "--json"), "NoState")
    assert not (tmp_path / "state").exists()


def test_doctor_checks_pass(run: Run, ingested: Path) -> None:
    checks = json_of(run("doctor", "--json"))
    names = {"machine", "attention backend", "embedded reader", "dtype", "retrieval"}
    names |= {"modes", "state folder"}
    assert set(checks) == names
    assert all(check["ok"] for check in checks.values())
    assert checks["state folder"]["detail"].startswith("3 modules in ")


@pytest.mark.parametrize(("divergence", "status"), [(0.05, 0), (4.5, 1)])
def test_doctor_tells_how_far_modes_are_from_exact(
    divergence: float, status: int, run: Run, ingested: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once measured, the ledger knows; where the default mode is refused, the doctor has failed."""
    forced = json_of(run("doctor", "--json"))["modes"]["detail"]
    assert forced == "all serve, as force_modes is set; nothing was measured"
    monkeypatch.setenv("RAGCACHE_FORCE_MODES", "0")

    def measure(_model: object, _engine: object, modes: list[str]) -> list[GateResult]:
        return [GateResult(mode, 24, divergence, 0.75, 2.0, 6.0, 1.0) for mode in modes]

    monkeypatch.setattr(gate, "measure_modes", measure)
    for _ in range(2):
        found, out, _ = run("doctor", "--json")
        assert found == status
        check = json.loads(out)["modes"]
        assert check["ok"] == (status == 0)
        assert f"{divergence:.2f} nats from exact (limit 2.00), 75% of 24 first" in check["detail"]
        monkeypatch.setattr(gate, "measure_modes", None)


def test_doctor_keeps_what_it_measures_in_the_ledger_of_the_settings(
    run: Run, ingested: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path / 'shared.sqlite'}"
    monkeypatch.setenv("RAGCACHE_LEDGER", url)
    monkeypatch.setenv("RAGCACHE_FORCE_MODES", "0")
    result = GateResult("rooted", 24, 0.05, 0.75, 2.0, 6.0, 1.0)
    monkeypatch.setattr(gate, "measure_modes", lambda *_: [result])
    assert json_of(run("doctor", "--json"))["modes"]["ok"]
    with closing(Database.open(url)) as database:
        assert len(Ledger(database).facts("gate/")) == 1


def test_doctor_tells_the_dtypes_of_the_model_and_why(
    run: Run, ingested: Path, float_reader: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGCACHE_STATES_DTYPE", "bfloat16")
    checks = json_of(run("doctor", "--model", float_reader, "--dtype", "bfloat16", "--json"))
    assert "embedded reader" not in checks
    assert checks["dtype"]["detail"] == "bfloat16, as set; states are kept in bfloat16"
    monkeypatch.setenv("RAGCACHE_DTYPE", "float32")
    assert json_of(run("doctor", "--json"))["dtype"]["detail"].startswith("float32, as set; ")
    status, out, _ = run("doctor", "--dtype", "int4", "--json")
    assert status == 1
    detail = json.loads(out)["dtype"]["detail"]
    assert detail.startswith("ConfigurationError: 'int4' is not a dtype of models; give auto, ")


def test_doctor_reports_a_damaged_state_folder(run: Run, tmp_path: Path) -> None:
    assert "does not exist yet" in json_of(run("doctor", "--json"))["state folder"]["detail"]
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "ledger.sqlite").write_bytes(b"not a database" * 100)
    status, out, _ = run("doctor", "--json")
    assert status == 1
    checks = json.loads(out)
    assert [name for name, check in checks.items() if not check["ok"]] == ["state folder"]
    assert "failed state folder" in run("doctor")[1]
