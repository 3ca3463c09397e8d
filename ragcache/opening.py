"""Opening a state folder: its database, the model, and a store with tiers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from ragcache.config import LEDGER_FILE, parse_bytes, parse_optional_bytes
from ragcache.db import Database, Ledger
from ragcache.errors import ConfigurationError, InvalidRequest, StoreUnwritable
from ragcache.machine import host_memory, share_arena
from ragcache.models import LoadedModel, load_model
from ragcache.params import OpenConfig
from ragcache.pipeline import SharedServices
from ragcache.pipeline.chat_template import resolve_instruction, template_kwargs
from ragcache.retrieval.resolve import resolve_embedder, resolve_reranker
from ragcache.store import KVStore, open_tiers

logger = logging.getLogger(__name__)

P = ParamSpec("P")
Opened_co = TypeVar("Opened_co", covariant=True)


class Opener(Protocol[P, Opened_co]):
    """Type of `RagCache.open`: a folder, a model, and the fields of `OpenConfig` as keywords."""

    def __call__(
        self,
        state: str | Path,
        model: str | Path | LoadedModel | None = None,
        /,
        *args: P.args,
        **options: P.kwargs,
    ) -> Opened_co:
        """Open a state folder; see `OpenConfig` for the options."""


def typed_by(
    config: Callable[P, OpenConfig],  # noqa: ARG001
    method: Callable[..., Opened_co],
) -> Opener[P, Opened_co]:
    """Give a method the keyword options of `config`, which type checkers read from it."""
    return cast("Opener[P, Opened_co]", method)


def open_folder(
    folder: Path, model: str | Path | LoadedModel | None, config: OpenConfig
) -> SharedServices:
    """Open a state folder, and create it unless it exists.

    Args:
        folder: The folder.
        model: A folder, a hub name or a loaded model. Defaults to the embedded reader.
        config: The options.

    Returns:
        The services that all namespaces of the folder share.

    Raises:
        ConfigurationError: An option has a value that cannot be used.
        ModelError: The model cannot be loaded or is not supported.
        StoreError: The folder cannot be opened.
    """
    _check_ranks(config)
    _check_memory(config)
    embedder, reranker = resolve_embedder(config.embedding), resolve_reranker(config.reranker)
    _create_folder(folder)
    with ExitStack() as opened:
        database = opened.enter_context(
            closing(Database.open(config.ledger or folder / LEDGER_FILE))
        )
        loaded = model if isinstance(model, LoadedModel) else _load(model, config, database)
        if loaded.causal.device.type == "cpu":
            share_arena()  # before this process begins threads
        variables = _template_kwargs(loaded, config.chat_template_kwargs)
        preamble = resolve_instruction(loaded, config.instruction)
        if config.tensor_parallel > 1:
            loaded = _split(loaded, config)
            opened.callback(loaded.causal.close)
        tiers = open_tiers(config, loaded.causal.device, ranks=loaded.causal.copies)
        store = KVStore.open(
            folder,
            database,
            parse_bytes(config.host_bytes),
            disk_bytes=parse_optional_bytes(config.disk_bytes),
            kv_dtype=config.kv_dtype,
            tiers=tiers,
            claim_patience=config.claim_patience,
            reserve=loaded.causal.host_memory,
            ranks=loaded.causal.copies,
        )
        opened.callback(store.close)
        services = SharedServices.start(
            database,
            store,
            loaded,
            config,
            embedder=embedder,
            reranker=reranker,
            template_kwargs=variables,
            instruction=preamble,
        )
        opened.pop_all()
    return services


def _create_folder(folder: Path) -> None:
    """Create a state folder that only its owner can read, unless it exists."""
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise StoreUnwritable(f"cannot make the state folder {folder}: {reason}") from error


def _load(model: str | Path | None, config: OpenConfig, database: Database) -> LoadedModel:
    """Load a model by the times that the ledger keeps."""
    return load_model(
        model,
        device=config.device,
        dtype=config.dtype,
        states_dtype=config.states_dtype,
        long_context=config.long_context,
        quantization=config.quantization,
        tensor_parallel=config.tensor_parallel,
        recall=Ledger(database).recall_fact,
    )


def _split(loaded: LoadedModel, config: OpenConfig) -> LoadedModel:
    from ragcache.models.parallel.leader import split_model  # transformers

    split = split_model(loaded.causal, config.tensor_parallel, config.device)
    return replace(loaded, causal=split)


def _check_ranks(config: OpenConfig) -> None:
    """Raise `ConfigurationError` for options that several devices do not serve."""
    if config.tensor_parallel == 1 or not config.device.startswith("cuda"):
        return
    for name in ("kv_dtype", "device_kv_dtype"):
        if (value := getattr(config, name)) != "model":
            raise ConfigurationError(
                f"tensor_parallel={config.tensor_parallel}: {name}={value!r} is not served on "
                f"several GPUs; leave {name} out"
            )


def _check_memory(config: OpenConfig) -> None:
    """Warn of a host tier for which the machine has too little memory."""
    wanted, total = parse_bytes(config.host_bytes), host_memory()["total_bytes"]
    if wanted > total:
        logger.warning(
            "host_bytes allows %s bytes of states, but this machine or container has %s bytes of "
            "memory, and the system ends a process that takes more; lower host_bytes",
            f"{wanted:,}",
            f"{total:,}",
        )


def _template_kwargs(model: LoadedModel, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    try:
        return template_kwargs(model.tokenizer, kwargs)
    except InvalidRequest as error:
        raise ConfigurationError(str(error)) from error
