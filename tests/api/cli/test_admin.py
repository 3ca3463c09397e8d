"""`ragcache keys`, `modules`, `ledger`, `stats`, `verify` and `doctor`, and their settings."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import text

from ragcache import RagCache
from ragcache.db import ApiKeys, Database, Ledger
from ragcache.db.migrations import HEAD
from ragcache.db.sessions import Sessions
from ragcache.db.state_rows import StateMetadata, StateRow
from ragcache.models import LoadedModel
from ragcache.modes import ReuseMode
from ragcache.pipeline import gate
from ragcache.pipeline.gate_measurement import GateResult, SizeResult
from ragcache.store import KVStore, RemoteTier, admin
from tests.api.cli.conftest import QUESTION, Run, error_of, json_of
from tests.ragcache.conftest import make_key, make_states, postgres_schema, record_row


def test_a_key_is_made_listed_and_revoked(run: Run, tmp_path: Path) -> None:
    secret = json_of(run("keys", "create", "page", "--role", "admin", "--json"))["secret"]
    assert run("keys", "create", "lab", "--namespace", "lab-1")[1].startswith("rc-")
    with closing(Database.open(tmp_path / "state" / "ledger.sqlite")) as database:
        assert ApiKeys(database).check(secret).key is not None
        listed = run("keys", "ls")[1]
        assert secret not in listed
        rows = [line.split()[:4] for line in listed.splitlines()]
        assert ["1", "page", "admin", "default"] in rows
        assert run("keys", "revoke", "1")[0] == 0
        assert ApiKeys(database).check(secret).key is None
    found = json_of(run("keys", "ls", "--json"))
    assert [(bool(row["revoked_at"]), row["namespace"]) for row in found] == [
        (True, "default"), (False, "lab-1"),
    ]  # fmt: skip


def test_a_key_takes_its_secret_from_a_file(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "operator-key"
    file.write_text(f"rc-{'Ab1_' * 10}\n", encoding="utf-8")
    command = ("keys", "create", "operator", "--role", "admin", "--secret-file", str(file))
    for _ in range(2):
        code, out, err = run(*command)
        assert (code, out) == (0, "")
        assert "key 1 (admin, namespace default) has the secret" in err
    with closing(Database.open(tmp_path / "state" / "ledger.sqlite")) as database:
        found = ApiKeys(database).check(file.read_text(encoding="utf-8").strip()).key
    assert found is not None
    assert (found.id, found.role) == (1, "admin")
    error_of(run(*command[:-1], str(tmp_path / "absent")), "ConfigurationError")
    file.write_text("rc-short", encoding="utf-8")
    assert "rc-short" not in error_of(run(*command), "ConfigurationError")


def test_key_errors_are_named(run: Run) -> None:
    error_of(run("keys", "ls"), "NoState")
    error_of(run("keys", "create", "page", "--role", "root"), "ConfigurationError")
    error_of(run("keys", "ls"), "NoState")
    error_of(run("keys", "create", " "), "ConfigurationError")
    assert "no keys yet" in run("keys", "ls")[1]
    error_of(run("keys", "revoke", "7"), "UnknownKey")


def test_modules_expire_sets_and_lifts_a_limit(run: Run, ingested: Path) -> None:
    def limit() -> float | None:
        return json_of(run("modules", "ls", "--json"))[0]["expires_at"]

    command = ("modules", "expire", json_of(run("modules", "ls", "--json"))[0]["id"])
    dry = run(*command, "--after", "60", "--dry-run")[1]
    assert "1 states would be kept for 60 s, unless they are pinned" in dry
    assert limit() is None
    assert "1 states are kept for 60 s" in run(*command, "--after", "60")[1]
    assert limit() == pytest.approx(time.time() + 60, abs=30)
    done = json_of(run(*command, "--never", "--json"))
    assert [(each["action"], each["tier"]) for each in done] == [("keep", "disk")]
    assert limit() is None
    for words in (("1",), ("1", "--after", "1", "--never"), ("--never",)):
        assert run("modules", "expire", *words)[0] == 2, "it takes modules and one limit"
    assert "there is no module 999" in run("modules", "expire", "999", "--never")[2]


def test_pins_and_evictions_are_shown(run: Run, ingested: Path, quick_reader: LoadedModel) -> None:
    """The folder holds three documents: one is pinned, another was evicted."""
    with RagCache.open(ingested, quick_reader) as rag:
        rag.modules.pin("notes", ["boats.md"])
        rag.modules.evict("notes", ["keys.md"])
    shown = [line.split() for line in run("stats")[1].splitlines()]
    assert ["notes", "3"] in shown
    tiers = [line for line in shown if line[:1] == ["disk"]]
    assert tiers[0][:2] == ["disk", "3"], "two modules and the preamble"
    assert tiers[1] == ["disk", "1"], "evicted by hand"
    plain = json_of(run("stats", "--json"))
    assert plain["collections"] == {"notes": 3}
    assert plain["tiers"]["disk"]["states"] == 3
    assert plain["evictions"]["disk"]["manual"] == 1
    rows = {line.split()[0]: line.split() for line in run("modules", "ls")[1].splitlines()}
    assert rows["boats.md#1"][2:3] + rows["boats.md#1"][-1:] == ["disk", "pinned"]
    assert rows["keys.md#1"][2:4] == ["none", "0"]
    assert "pinned" not in rows["leave.md#1"]


@pytest.fixture
def unowned(tmp_path: Path) -> str:
    """The ledger, elsewhere, of a state folder with one state that nothing needs."""
    url = f"sqlite:///{tmp_path / 'elsewhere.sqlite'}"
    with (
        closing(Database.open(url)) as database,
        closing(KVStore.open(tmp_path / "state", database, 1 << 20)) as store,
    ):
        store.put_states(make_key(1), make_states(1))
    return url


def test_verify_prints_disagreements_and_repairs_on_request(run: Run, unowned: str) -> None:
    command = ("verify", "--ledger", unowned)
    status, out, _ = run(*command)
    assert status == 1
    assert "1 states, 0 modules: 1 disagreement, 0 repaired" in out
    for word in ("unowned", f"{make_key(1)[:12]}…", "--repair"):
        assert word in out
    status, out, _ = run(*command, "--json")
    report = json.loads(out)
    assert (report["clean"], report["states"], report["found"][0]["kind"]) == (False, 1, "unowned")
    status, out, _ = run(*command, "--repair")
    assert (status, "1 disagreement, 1 repaired" in out) == (0, True)
    status, out, _ = run(*command)
    assert (status, "0 states, 0 modules: nothing disagrees" in out) == (0, True)


def test_verify_reads_a_remote(run: Run, tmp_path: Path) -> None:
    url, far = f"sqlite:///{tmp_path / 'elsewhere.sqlite'}", f"file://{tmp_path / 'far'}"
    with (
        closing(Database.open(url)) as database,
        closing(KVStore.open(tmp_path, database, 1 << 20, tiers=[RemoteTier.open(far)])) as store,
    ):
        store.put_states(make_key(1), make_states(1))
        admin.move(store, [make_key(1)], "remote")

    def verified(*options: str) -> tuple[int, set[str]]:
        report = json.loads(run("verify", "--ledger", url, "--json", *options)[1])
        return report["states"], {each["kind"] for each in report["found"]}

    assert verified()[0] == 0
    assert verified("--remote", far) == (1, {"unowned"})
    [blob] = (tmp_path / "far").rglob("*.safetensors")
    blob.write_bytes(blob.read_bytes()[:-1])
    assert "corrupt" in verified("--remote", far)[1]


def test_options_come_before_environment_and_file(
    run: Run, unowned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verified(*options: str) -> int:
        return int(json.loads(run("verify", "--json", *options)[1])["states"])

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAGCACHE_STATE")
    settings = tmp_path / "ragcache.toml"
    settings.write_text(f'state = "state"\nledger = "{unowned}"\n', encoding="utf-8")
    assert verified() == 1
    settings.write_text('state = "state"\nledger = "sqlite:///nowhere/a"\n', encoding="utf-8")
    monkeypatch.setenv("RAGCACHE_LEDGER", unowned)
    assert verified() == 1
    assert verified("--ledger", f"sqlite:///{tmp_path / 'empty.sqlite'}") == 0
    settings.write_text("stat = 1\n", encoding="utf-8")
    assert "stat" in error_of(run("verify"), "ConfigurationError")


@pytest.mark.parametrize(
    "name", ["state", "host", "port", "model", "dtype", "embedding", "instruction"]
)
def test_a_setting_with_an_option_of_its_own_is_refused(run: Run, name: str) -> None:
    refused = error_of(run("serve", "--set", f"{name}=x"), "ConfigurationError")
    assert f"write --{name} x" in refused


@pytest.mark.enable_socket
def test_an_address_in_use_is_named_before_a_model_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RagCache, "open", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = error_of(run("serve", "--port", port), "ConfigurationError")
    assert f"127.0.0.1, port {port}: Address already in use" in refused
    assert "choose another address with --host and --port" in refused


@pytest.mark.slow
@pytest.mark.enable_socket
def test_stats_of_a_shared_ledger_count_the_folders_disk(run: Run, tmp_path: Path) -> None:
    with postgres_schema() as url, closing(Database.open(url)) as database:
        for folder, tokens in (("here", 3), ("there", 4)):
            ledger = Ledger.of_folder(database, tmp_path / folder)
            ledger.begin()
            row = (make_key(tokens), "disk", 10, 0, 0, False, math.inf, "model")
            record_row(ledger, StateRow(*row, StateMetadata(tokens)))
            ledger.end()
        shown, elsewhere = (
            json_of(run("stats", "--json", "--state", tmp_path / folder, "--ledger", url))["tiers"]
            for folder in ("here", "nowhere")
        )
    assert (shown["disk"]["states"], shown["disk"]["tokens"], elsewhere) == (1, 3, {})
    assert not (tmp_path / "nowhere").exists(), "looking writes nothing"


def test_a_ledger_is_shown(run: Run, tmp_path: Path) -> None:
    command = ("ledger", "status")
    error_of(run(*command), "NoState")
    (tmp_path / "state").mkdir()
    with closing(Database.open(tmp_path / "state" / "ledger.sqlite")) as database:
        unused = run(*command)[1]
        assert f"revision {HEAD}" in unused
        assert "no process has it open" in unused
        for name in ("stats", "modules ls"):
            assert "ragcache ingest" in run(*name.split())[1], "of an empty one, how to fill it"
        Sessions(database).begin()
        assert str(os.getpid()) in run(*command)[1]
        told = json_of(run(*command, "--json"))
        assert (told["revision"], told["head"], len(told["sessions"])) == (HEAD, HEAD, 1)
        with database.transaction() as session:
            session.execute(text("UPDATE alembic_version SET version_num = '0003'"))
    error_of(run("stats"), "LedgerOfOtherVersion")


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


def test_doctor_checks_pass(run: Run, ingested: Path) -> None:
    checks = json_of(run("doctor", "--json"))
    names = {"machine", "attention backend", "embedded reader", "dtype", "retrieval"}
    names |= {"modes", "state folder"}
    assert set(checks) == names
    assert list(checks)[:2] == ["embedded reader", "state folder"], "what matters most comes first"
    assert all(check["ok"] for check in checks.values())
    assert checks["state folder"]["detail"].startswith("3 modules in ")


def sized(
    _model: object, _engine: object, modes: list[ReuseMode], _seconds: float
) -> dict[ReuseMode, tuple[SizeResult, ...]]:
    """Results of `measure_sizes`, which takes long."""
    return {mode: (SizeResult(4, 100, 8, 0.1, 0.5),) for mode in modes}


@pytest.mark.parametrize(
    ("divergence", "status"), [pytest.param(0.05, 0, marks=pytest.mark.slow), (4.5, 1)]
)
def test_doctor_tells_how_far_modes_are_from_exact(
    divergence: float, status: int, run: Run, ingested: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once measured, the ledger knows; where the default mode is refused, the doctor has failed."""
    forced = json_of(run("doctor", "--json"))["modes"]["detail"]
    assert forced == "all serve, as force_modes is set; nothing was measured"
    monkeypatch.setenv("RAGCACHE_FORCE_MODES", "0")

    def measure(_model: object, _engine: object, modes: list[object]) -> list[GateResult]:
        return [GateResult(str(mode), 24, divergence, 0.75, 2.0, 6.0, 1.0, 0.75) for mode in modes]

    monkeypatch.setattr(gate, "measure_modes", measure)
    monkeypatch.setattr(gate, "measure_sizes", sized)
    for option in ("--compare-modes", "--no-compare-modes"):
        found, out, _ = run("doctor", option, "--json")
        assert found == status
        check = json.loads(out)["modes"]
        assert check["ok"] == (status == 0)
        assert f"{divergence:.2f} nats from exact (limit 2.00), 75% of 24 first" in check["detail"]
        assert "proposed as the default: exact, as no mode that reads states" in check["detail"]
        sizes = "those of exact (modules x tokens: 4 x 100: 50%)"
        assert (sizes in check["detail"]) == (status == 0), "refused modes have none"
        monkeypatch.setattr(gate, "measure_modes", None)
        monkeypatch.setattr(gate, "measure_sizes", None)


@pytest.mark.parametrize(
    ("default", "near", "read"),
    [
        ("rooted", "primed", "read in primed"),
        ("primed", "rooted", "read in rooted"),
        ("rooted", "none", "computed, too"),
    ],
)
def test_doctor_tells_how_recurring_texts_are_read(
    default: str, near: str, read: str, run: Run, ingested: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGCACHE_FORCE_MODES", "0")
    monkeypatch.setenv("RAGCACHE_DEFAULT_MODE", default)

    def measure(_model: object, _engine: object, modes: list[object]) -> list[GateResult]:
        far = {str(mode): 0.05 if str(mode) == near else 4.5 for mode in modes}
        return [GateResult(mode, 24, n, 0.75, 2.0, 6.0, 1.0, 0.75) for mode, n in far.items()]

    monkeypatch.setattr(gate, "measure_modes", measure)
    detail = json.loads(run("doctor", "--json")[1])["modes"]["detail"]
    assert detail.endswith(f"texts that recur in chats are {read}")


def test_doctor_keeps_its_measurements_in_the_set_ledger(
    run: Run, ingested: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path / 'shared.sqlite'}"
    monkeypatch.setenv("RAGCACHE_LEDGER", url)
    monkeypatch.setenv("RAGCACHE_FORCE_MODES", "0")
    result = GateResult("rooted", 24, 0.05, 0.75, 2.0, 6.0, 1.0, 0.75)
    monkeypatch.setattr(gate, "measure_modes", lambda *_: [result])
    monkeypatch.setattr(gate, "measure_sizes", sized)
    assert json_of(run("doctor", "--compare-modes", "--json"))["modes"]["ok"]
    with closing(Database.open(url)) as database:
        assert len(Ledger(database).facts("gate/")) == 1
        assert len(Ledger(database).facts("sizes/gate/")) == 1


def test_doctor_tells_the_dtypes_of_the_model_and_why(
    run: Run, ingested: Path, float_reader: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGCACHE_STATES_DTYPE", "bfloat16")
    checks = json_of(run("doctor", "--model", float_reader, "--dtype", "bfloat16", "--json"))
    assert "embedded reader" not in checks
    assert checks["dtype"]["detail"] == "bfloat16, as set; states are kept in bfloat16"
    monkeypatch.setenv("RAGCACHE_DTYPE", "float32")
    assert json_of(run("doctor", "--json"))["dtype"]["detail"].startswith("float32, as set; ")
    status, _, said = run("doctor", "--dtype", "int4", "--json")
    assert status
    assert "dtype is 'int4'; it must be 'auto', " in said


def test_doctor_reports_a_damaged_state_folder(run: Run, tmp_path: Path) -> None:
    assert "does not exist yet" in json_of(run("doctor", "--json"))["state folder"]["detail"]
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "ledger.sqlite").write_bytes(b"not a database" * 100)
    status, out, _ = run("doctor", "--json")
    assert status == 1
    checks = json.loads(out)
    assert [name for name, check in checks.items() if not check["ok"]] == ["state folder"]
    lines = run("doctor")[1].splitlines()
    assert lines[1].startswith("failed state folder"), "what has failed comes first"
    assert lines[2].startswith("ok embedded reader")
