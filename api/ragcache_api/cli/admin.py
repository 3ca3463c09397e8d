"""The operator's commands: `serve`, `keys`, `modules`, `ledger`, `stats`, `verify`, `doctor`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from ragcache.config import LEDGER_FILE
from ragcache.errors import ConfigurationError, MissingExtra
from ragcache.params import KeyParams
from ragcache_api.cli import console as ui
from ragcache_api.cli.options import ENCODING, LEDGER, STORE, Offer, expand_options
from ragcache_api.cli.progress import progress_bar
from ragcache_api.service_options import ServiceOptions

if TYPE_CHECKING:
    from ragcache.db import ApiKeys
    from ragcache.models import LoadedModel
    from ragcache.store.verify import VerifyReport
    from ragcache_api.settings import ServiceSettings


keys_app = typer.Typer(help="The API keys of the service.", no_args_is_help=True)


@keys_app.command("create")
@expand_options
def create_key(
    name: Annotated[str, typer.Argument(help="The name of its holder.")],
    params: KeyParams,
    options: Annotated[ServiceOptions, LEDGER],
    secret_file: Annotated[
        Path | None,
        typer.Option(help="A file with a secret to use. A key that has it stays as it is."),
    ] = None,
    as_json: ui.JsonOption = False,
) -> None:
    """Make a key and print its secret, which is kept nowhere."""
    given = None if secret_file is None else _read_secret(secret_file)
    settings = ui.read_settings(options)
    if settings.ledger is None:  # keys may be created before the first document
        settings.state.mkdir(0o700, parents=True, exist_ok=True)
        settings = settings.replace(ledger=f"sqlite:///{settings.state / LEDGER_FILE}")
    with _keys(settings) as keys:
        if given is not None:
            row, secret = keys.register(name, given, **params.given()), None
        else:
            row, secret = keys.create(name, **params.given())
    if as_json:
        ui.print_json({**row.model_dump(), **({} if secret is None else {"secret": secret})})
        return
    holder = f"key {row.id} ({row.role}, namespace {row.namespace})"
    if secret is None:
        ui.errors.print(f"{holder} has the secret of {secret_file}")
        return
    typer.echo(secret)
    ui.errors.print(f"{holder}; the secret is not shown again")


def _read_secret(file: Path) -> str:
    """Read the secret of a key from a file. Raises `ConfigurationError`."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the file of the secret cannot be read: {error}") from None


@keys_app.command("ls")
@expand_options
def list_keys(
    options: Annotated[ServiceOptions, LEDGER],
    as_json: ui.JsonOption = False,
) -> None:
    """List keys, with the first characters of each secret."""
    with _keys(ui.read_settings(options)) as keys:
        rows = keys.list()
    if as_json:
        ui.print_json([row.model_dump() for row in rows])
    elif not rows:
        ui.console.print("no keys yet; `ragcache keys create` makes one")
    else:
        columns = ("id", "name", "role", "namespace", "secret", "made", "last used", "")
        table = ui.plain_table(*columns, left=8)
        for row in rows:
            table.add_row(
                str(row.id),
                escape(row.name),
                row.role,
                row.namespace,
                f"{row.prefix}…",
                _date(row.created_at),
                _date(row.last_used),
                "revoked" if row.revoked_at else "",
            )
        ui.console.print(table)


@keys_app.command("revoke")
@expand_options
def revoke_key(
    key: Annotated[int, typer.Argument(help="The id of the key, as `ragcache keys ls` shows it.")],
    options: Annotated[ServiceOptions, LEDGER],
) -> None:
    """Refuse a key from now on; a running service follows within ten seconds."""
    with _keys(ui.read_settings(options)) as keys:
        keys.revoke(key)
    ui.console.print(f"key {key} is revoked")


@contextmanager
def _keys(settings: ServiceSettings) -> Iterator[ApiKeys]:
    with ui.open_ledger(settings) as database:
        from ragcache.db import ApiKeys

        yield ApiKeys(database)


def _date(seconds: float | None) -> str:
    moment = None if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return "never" if moment is None else f"{moment:%Y-%m-%d %H:%M}"


modules_app = typer.Typer(help="The modules and their states.", no_args_is_help=True)


@modules_app.command("ls")
@expand_options
def list_all_modules(
    options: Annotated[ServiceOptions, LEDGER],
    collection: Annotated[str | None, typer.Argument(help="Only this collection.")] = None,
    as_json: ui.JsonOption = False,
) -> None:
    """List modules with the size, tiers and hits of their states."""
    with ui.open_ledger(ui.read_settings(options)) as database:
        from ragcache.db import list_modules

        rows = list_modules(database, collection)
    if as_json:
        ui.print_json(rows)
    elif not rows:
        ui.console.print("no modules yet; `ragcache ingest` makes them")
    else:
        table = ui.plain_table("module", "collection", "tiers", "tokens", "states", "hits", left=3)
        if any(row.pinned for row in rows):
            table.add_column("")
        for row in rows:
            table.add_row(
                escape(row.name),
                escape(row.collection),
                ", ".join(row.tiers) or "none",
                f"{row.tokens:,}",
                ui.format_bytes(row.nbytes),
                f"{row.hits:,}",
                *(["pinned"] if row.pinned else []),
            )
        ui.console.print(table)
        ui.console.print(
            f"{len(rows):,} modules, {sum(row.tokens for row in rows):,} tokens, "
            f"{ui.format_bytes(sum(row.nbytes for row in rows))}"
        )


@modules_app.command("expire")
@expand_options
def expire_modules(
    modules: Annotated[list[int], typer.Argument(help="Ids, as in `ls --json`.", min=1)],
    options: Annotated[ServiceOptions, STORE],
    after: Annotated[
        float | None, typer.Option(min=0, help="Seconds from now until the states expire.")
    ] = None,
    never: Annotated[bool, typer.Option("--never", help="Lift the limit.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would change.")] = False,
    as_json: ui.JsonOption = False,
) -> None:
    """Limit how long the states of modules are kept; the documents stay."""
    if never == (after is not None):
        raise typer.BadParameter("give either --after SECONDS or --never")
    settings = ui.read_settings(options)
    ui.check_state(settings)
    from ragcache.db import held_keys
    from ragcache.db.tables import DEFAULT_NAMESPACE
    from ragcache.store import admin

    with ui.inspect_store(settings) as (database, store):
        keys = held_keys(database, modules, DEFAULT_NAMESPACE)
        done = admin.expire(store, keys, after, dry_run=dry_run)
    if as_json:
        ui.print_json(list(map(asdict, done)))
        return
    would = "would be" if dry_run else "are"
    until = "without a limit" if after is None else f"for {after:,g} s, unless they are pinned"
    ui.console.print(f"{len(done):,} states {would} kept {until}")


ledger_app = typer.Typer(help="Show the ledger's tables and who has it open.", no_args_is_help=True)


@ledger_app.command("status")
@expand_options
def ledger_status(
    options: Annotated[ServiceOptions, LEDGER],
    as_json: ui.JsonOption = False,
) -> None:
    """Show the revision of the ledger and who has it open; nothing is changed."""
    from ragcache.db import ledger_status

    settings = ui.read_settings(options)
    ui.check_state(settings)
    found = ledger_status(settings.ledger or settings.state / LEDGER_FILE)
    if as_json:
        ui.print_json(asdict(found))
        return
    ui.console.print(
        f"revision {found.revision or 'none'}, this ragcache reads and writes {found.head}"
    )
    if not found.sessions:
        ui.console.print("no process has it open")
        return
    table = ui.plain_table("machine", "process", "silent", left=1)
    for each in found.sessions:
        table.add_row(escape(each.machine.split()[0]), str(each.pid), f"{each.silent:.0f} s")
    ui.console.print(table)


_EVICTION_REASONS = ("pressure", "ttl", "manual", "superseded", "corrupt")


@expand_options
def stats(
    options: Annotated[ServiceOptions, LEDGER],
    as_json: ui.JsonOption = False,
) -> None:
    """Sum up collections, tiers and evictions of a state folder."""
    settings = ui.read_settings(options)
    with ui.open_ledger(settings) as database:
        from ragcache.db import Catalog, Ledger

        states = Ledger.of_folder(database, settings.state, reads=True)
        collections = Catalog(database, "", None).collections()
        tiers, evictions = states.totals(), states.evictions()
    if as_json:
        ui.print_json({"collections": collections, "tiers": tiers, "evictions": evictions})
        return
    sizes = [(escape(name), f"{documents:,}") for name, documents in collections.items()]
    table = ui.plain_table("collection", "documents", rows=sizes)
    ui.console.print(table if collections else "no collections yet; `ragcache ingest` makes one")
    if tiers:
        table = ui.plain_table("tier", "states", "size", "tokens", "hits")
        for tier, sums in tiers.items():
            size, counts = ui.format_bytes(sums.nbytes), (f"{sums.tokens:,}", f"{sums.hits:,}")
            table.add_row(tier, f"{sums.states:,}", size, *counts)
        ui.console.print("", table, sep="\n")
    if evictions:
        table = ui.plain_table("evicted from", *_EVICTION_REASONS)
        for tier, numbers in evictions.items():
            cells = [f"{numbers[r]:,}" if r in numbers else "" for r in _EVICTION_REASONS]
            table.add_row(tier, *cells)
        ui.console.print("", table, sep="\n")


_KEY = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")  # printed whole in JSON only


@expand_options
def verify(
    options: Annotated[ServiceOptions, STORE],
    repair: Annotated[bool, typer.Option("--repair", help="Repair as much as possible.")] = False,
    as_json: ui.JsonOption = False,
) -> None:
    """Check every row of the ledger against every blob; print what disagrees."""
    settings = ui.read_settings(options)
    ui.check_state(settings)
    from ragcache.store.verify import verify as verify_store

    opened, bar = ui.inspect_store(settings), progress_bar("verifying")
    with bar as progress, opened as (_, store):
        report = verify_store(store, repair=repair, progress=progress)
    if as_json:
        ui.print_json({**asdict(report), "clean": report.clean})
    else:
        _print_verification(report, repair)
    if not report.clean:
        raise typer.Exit(1)


def _print_verification(report: VerifyReport, repair: bool) -> None:
    found = report.found
    table = ui.plain_table("kind", "subject", "what is wrong", "", left=4)
    for each in found:
        subject = escape(_KEY.sub(r"\1…", each.subject))
        table.add_row(each.kind, subject, escape(each.detail), "repaired" if each.repaired else "")
    if found:
        ui.console.print(table)
    for target, states in report.interrupted.items():
        ui.console.print(
            f"an ingestion was interrupted: {escape(target)} keeps {states} states for the next "
            "one; --repair forgets them"
        )
    verdict = "nothing disagrees"
    if found:
        repaired = sum(each.repaired for each in found)
        verdict = (
            f"{len(found):,} disagreement{'s' if len(found) > 1 else ''}, {repaired:,} repaired"
        )
    ui.console.print(f"{report.states:,} states, {report.modules:,} modules: {verdict}")
    if found and not repair:
        ui.console.print("`ragcache verify --repair` repairs as much as possible")


@expand_options
def doctor(
    options: Annotated[ServiceOptions, Offer(("model", "dtype", "state"))],
    compare_modes: Annotated[
        bool,
        typer.Option(
            help="Compare modes over prompts of several sizes, too, which takes minutes on a CPU."
        ),
    ] = False,
    as_json: ui.JsonOption = False,
) -> None:
    """Check the installation, the model with its dtypes, and the state folder.

    Failed checks come first, then what the answers depend on most. The state folder keeps the
    measurements.
    """
    settings = ui.read_settings(options)

    @cache
    def loaded() -> LoadedModel:
        from ragcache.models import load_model

        return load_model(
            settings.model,
            device=settings.device,
            dtype=settings.dtype,
            states_dtype=settings.states_dtype,
            long_context=settings.long_context,
            quantization=settings.quantization,
        )

    checks = {
        "embedded reader" if settings.model is None else "model": lambda: _check_model(loaded()),
        "state folder": lambda: _check_state(settings),
        "retrieval": lambda: _check_retrieval(settings.embedding),
        "modes": lambda: _check_modes(loaded(), settings, sizes=compare_modes),
        "dtype": lambda: _check_dtype(loaded()),
        "machine": _check_machine,
        "attention backend": _check_backend,
    }
    results = {}
    with ui.errors.status("checking") as status:
        for name, check in checks.items():
            status.update(f"checking: {name}")
            results[name] = _run_check(check)
    if as_json:
        found = {name: {"ok": ok, "detail": detail} for name, (ok, detail) in results.items()}
        ui.print_json(found)
    else:
        from importlib.metadata import version

        ui.console.print(f"ragcache {version('ragcache')}")
        for name, (ok, detail) in sorted(results.items(), key=lambda each: each[1][0]):
            mark = "[green]ok[/]" if ok else "[red]failed[/]"
            ui.console.print(f"{mark} {name}: {escape(detail)}")
    if not all(ok for ok, _ in results.values()):
        raise typer.Exit(1)


def _run_check(check: Callable[[], str]) -> tuple[bool, str]:
    try:
        return True, check()
    except Exception as error:  # any error is a finding
        return False, f"{type(error).__name__}: {error}"


def _check_machine() -> str:
    from ragcache.machine import describe_machine

    facts = describe_machine()
    return (
        f"{facts['processor']}, {facts['cores']} cores, torch {facts['torch']}, "
        f"transformers {facts['transformers']}, GPU {facts['gpu'] or 'none'}"
    )


def _check_backend() -> str:
    import torch

    from ragcache.attention import backend_for

    return type(backend_for(torch.device("cpu"))).__name__


def _check_retrieval(embedding: str) -> str:
    from ragcache.retrieval import embedder_name
    from ragcache.retrieval.resolve import WORDS_ONLY, resolve_embedder

    embedder = resolve_embedder(embedding)
    if embedder is None:
        return "by words only, as it is set" if embedding == "none" else WORDS_ONLY
    numbers = len(embedder.embed_query("a question"))
    return f"by words (BM25) and by meaning ({embedder_name(embedder)}, {numbers} numbers)"


def _check_model(model: LoadedModel) -> str:
    from ragcache.engine import EngineConfig

    causal = model.causal
    rows = min(EngineConfig().prefill_tokens, causal.window)
    most = causal.pass_bytes(rows, causal.window, logit_rows=1) / 2**20
    return (
        f"{causal.model.config.num_hidden_layers} layers, window {causal.window} tokens, "
        f"{causal.bytes_per_token:,} bytes of states a token; a pass of {rows:,} tokens takes at "
        f"most {most:,.0f} MiB in addition to weights and states"
    )


def _check_dtype(model: LoadedModel) -> str:
    from ragcache.models import dtype_name

    assert model.dtypes is not None
    return f"{model.dtypes.reason}; states are kept in {dtype_name(model.dtypes.states)}"


def _check_modes(model: LoadedModel, settings: ServiceSettings, *, sizes: bool) -> str:
    """Return the verdicts of the gate on the modes, from the ledger or measured now.

    Args:
        model: The model.
        settings: Settings of the folder.
        sizes: Whether to measure over prompts of several sizes.

    Raises:
        ModeRefused: The default mode is refused.
    """
    from ragcache.db import Ledger
    from ragcache.engine import LLMEngine
    from ragcache.errors import ModeRefused, StoreError
    from ragcache.pipeline.gate import ModeGate, propose_mode
    from ragcache.pipeline.observed import OTHER_MODE

    if settings.force_modes:
        return "all serve, as force_modes is set; nothing was measured"
    if not model.causal.composes:
        return (
            "every question is answered in exact: recurrent layers that are not known to be affine "
            "read no states of documents"
        )
    with ExitStack() as stack:
        ledger = None
        with suppress(StoreError):  # reported by the check of the state folder
            ledger = Ledger(stack.enter_context(ui.open_ledger(settings)))
        engine = stack.enter_context(LLMEngine(model.causal))
        gate = ModeGate(model, engine, ledger, compose=settings.compose)
        results = [each for each in gate.measure() if each is not None]
        sized = {each.mode: each for each in (gate.measure_sizes() if sizes else gate.results())}
        results = [sized.get(each.mode, each) for each in results]
    if not results:
        return f"not measured: a window of {model.causal.window} tokens is too small"
    proposed = propose_mode(results)
    advice = (
        "proposed as the default: exact, as no mode that reads states gives 9 of 10 of its answers"
        if proposed is None
        else f"proposed as the default: {proposed.mode}"
    )
    said = "; ".join([advice, *map(str, results)])
    serving = {each.mode for each in results if each.passes}
    default = settings.default_mode or model.default_mode
    said = f"default: {default}; {said}"
    if default.reads_states and str(default.measured) not in serving:
        other = OTHER_MODE.get(default)
        recurring = f"read in {other}" if str(other) in serving else "computed, too"
        raise ModeRefused(f"{said}; texts that recur in chats are {recurring}")
    return said


def _check_state(settings: ServiceSettings) -> str:
    from ragcache.db import list_modules

    if settings.ledger is None and not (settings.state / LEDGER_FILE).exists():
        return f"{settings.state} does not exist yet; `ragcache ingest` makes it"
    with ui.open_ledger(settings) as database:
        return f"{len(list_modules(database))} modules in {settings.state}"


SERVING = Offer(
    (
        *(*ENCODING.names, "embedding", "conversation_storage", "tensor_parallel"),
        *("host", "port", "replicas"),
    )
)


@expand_options
def serve(
    options: Annotated[ServiceOptions, SERVING],
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any other setting; repeatable."),
    ] = None,
) -> None:
    """Serve a state folder over HTTP: OpenAI's interface, answers, documents, and the operator's.

    Settings also come from RAGCACHE_NAME in the environment and from ragcache.toml.
    """
    from ragcache.machine import share_arena
    from ragcache_api.http.server import check_address
    from ragcache_api.http.server import serve as serve_app

    settings = ui.read_settings(options, **_parse_settings(setting or []))
    if settings.replicas is not None or settings.autoscale is not None:
        _serve_cluster(settings)
        return
    check_address(settings)
    if not settings.device.startswith("cuda"):
        share_arena()  # before the status begins a thread
    with ui.loading_model():
        from ragcache import RagCache

        rag = RagCache.open(settings.state, **settings.open_options() | {"warm_up": True})
    with rag:
        serve_app(rag, settings)


def _serve_cluster(settings: ServiceSettings) -> None:
    settings.cluster_ledger()
    if find_spec("ray") is None:
        raise MissingExtra("replicas run on Ray: pip install 'ragcache[ray]'")
    from ragcache_api.cluster.app import serve_cluster

    serve_cluster(settings)


def _parse_settings(texts: list[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigurationError(f"--set takes NAME=VALUE, not {text!r}")
        name = name.replace("-", "_")
        if name in SERVING.names:
            raise ConfigurationError(f"{name} has an option of its own: write --{name} {value}")
        pairs[name] = value
    return pairs
