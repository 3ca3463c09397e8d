"""Bodies of `/admin`, which show and change what a store holds: modules, states, tiers, memory."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from ragcache.db import HeldState
from ragcache.modes import ReuseMode
from ragcache.pipeline import ObservedModule
from ragcache.store.admin import StateChange, TierStatus
from ragcache.store.verify import Disagreement
from ragcache_api.http.bodies import CollectionName
from ragcache_api.http.protocol import RequestModel, ResponseModel, RowResponse

EXCERPT = 80
"""Characters of an observed text that operators see."""

TierName = Annotated[str, Field(min_length=1, max_length=20)]


class ModuleResponse(RowResponse):
    """A module."""

    name: str
    document: str
    """Id of its document."""
    collection: str
    tokens: int
    """Number of tokens of its longest states."""
    nbytes: int
    """Bytes of its largest states."""
    tiers: list[str]
    """Tiers that hold its states."""
    hits: int
    """Uses of its most used states."""
    used_at: float | None
    """Time of the last prompt that read its states, in Unix seconds."""
    pinned: bool
    """Whether its states are kept from eviction."""
    expires_at: float | None
    """Time at which the first of its states expire, in Unix seconds. Null for never."""


class ModuleTextResponse(ModuleResponse):
    """A module with its text and its states."""

    text: str
    uri: str
    """Address of its document, or the document's id where the address is a path of the server."""
    metadata: dict[str, Any]
    """Metadata of its document and of the module."""
    states: list[HeldState]


class ChangesResponse(ResponseModel):
    """Changes of states that were made or, with `dry_run`, would be made."""

    dry_run: bool
    changes: list[StateChange]
    bytes: int
    """Bytes of the changed states."""


class MoveRequest(RequestModel):
    """A target for states."""

    tier: TierName
    """Name of a tier, such as `disk`."""


class ExpireRequest(RequestModel):
    """A limit on how long states are kept."""

    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
    """Seconds from now. Null lifts the limit."""


class EvictRequest(RequestModel):
    """States to evict."""

    collection: CollectionName | None = None
    """Collection of the states. All collections by default."""
    documents: Annotated[list[str], Field(max_length=10_000)] | None = None
    """Ids of documents, at most 10,000. All documents by default."""
    tier: TierName | None = None
    """Tier to evict from. All tiers by default."""


class PlanRequest(RequestModel):
    """A corpus to plan for: either a collection or texts."""

    collection: CollectionName | None = None
    texts: Annotated[list[str], Field(min_length=1, max_length=1000)] | None = None
    """Texts of documents, at most 1,000."""
    host_bytes: int | str = "2GiB"
    """Budget of the host tier, in bytes or such as `8GiB`."""
    device_bytes: int | str | None = None
    """Budget of the device tier. By default the plan has no device tier."""
    disk_bytes: int | str | None = None
    """Budget of the disk tier. The free space of the disk by default."""
    sample: Annotated[int, Field(ge=1, le=16)] = 4
    """Number of modules to measure, 1 to 16."""


class EvictionResponse(RowResponse):
    """States that left a tier."""

    key: str
    """Key of the states."""
    module: str | None
    """Name of a module that they belong to. Null without one, and for states of a schema."""
    tier: str
    reason: str
    """`pressure`, `ttl`, `manual`, `superseded` or `corrupt`."""
    nbytes: int
    at: float
    """Unix seconds."""


class StatsResponse(ResponseModel):
    """Statistics of the caller's namespace since the service began."""

    model: str
    uptime: float
    """Seconds since the service began."""
    collections: dict[str, int]
    """Number of documents by collection."""
    requests: dict[str, int]
    """Number of requests: `running`, `waiting`, `finished`, `failed` and `cancelled`."""
    tokens: dict[str, int]
    """Number of prompt tokens by source: a tier, `encoded`, `shared` or `computed`."""
    ttft: dict[str, dict[str, float | int | None]]
    """`p50` and `p95` of the seconds to the first token, and `count`, for `hit` and `miss`."""
    engine: dict[str, float]
    """Figures of the engine for all namespaces. Empty unless the caller is an operator."""
    series: list[dict[str, Any]]
    """Points of the last hour, one for every five seconds in which anything was recorded."""
    evictions: dict[str, dict[str, int]]
    """Number of evictions by tier and reason. Empty unless the caller is an operator."""


class ProcessMemory(ResponseModel):
    """Memory of the service's process."""

    rss_bytes: int
    """Resident bytes."""
    mapped_bytes: int
    """Resident bytes of mapped files, such as blobs of the disk tier. The system can reclaim
    them."""


class HostMemory(ResponseModel):
    """Memory of the machine or of the process's control group."""

    total_bytes: int
    available_bytes: int


class DeviceMemory(ResponseModel):
    """Memory of a GPU."""

    name: str
    total_bytes: int
    free_bytes: int
    reserved_bytes: int
    """Bytes that the allocator of this process has taken."""


class MemoryResponse(ResponseModel):
    """Memory that the service uses and has left."""

    process: ProcessMemory
    host: HostMemory
    device: DeviceMemory | None
    """The model's GPU. Null if the model runs on the CPU."""
    tiers: list[TierStatus]


class SizeResponse(ResponseModel):
    """The distance of a mode from `exact` over prompts of one size."""

    documents: int
    """Number of modules of each prompt."""
    module_tokens: int
    """Number of tokens of each module, about."""
    prompts: int
    """Number of prompts that were measured."""
    kl_divergence: float
    """Mean Kullback-Leibler divergence over the tokens of the answers of `exact`, in nats."""
    equal_answers: float
    """Share of prompts whose greedy answers are the answers of `exact`, 0 to 1."""


class ModeResponse(ResponseModel):
    """The distance of a mode from `exact` on the model (`ragcache.pipeline.gate.GateResult`)."""

    mode: str
    prompts: int
    """Number of prompts that were measured."""
    kl_divergence: float
    """Mean Kullback-Leibler divergence of the first token, in nats."""
    agreement: float
    """Share of prompts with the same likeliest first token, 0 to 1."""
    limit: float
    """Divergence up to which the mode serves, in nats."""
    other_documents: float
    """Divergence of prompts with other documents, in nats. The limit follows from it."""
    equal_answers: float
    """Share of prompts whose greedy answers are the answers of `exact`, 0 to 1."""
    sizes: list[SizeResponse]
    """The distance by number and length of modules. Empty until `ragcache doctor` has measured
    it."""
    passes: bool
    """Whether the mode serves without being forced."""


class StateResponse(ResponseModel):
    """The model that the service has open."""

    model: str
    device: str
    """Device of the model, such as `cpu` or `cuda:0`."""
    dtype: str
    """Dtype in which the model computes."""
    states_dtype: str
    """Dtype of stored states."""
    window: int
    """Most tokens of a prompt and its answer."""
    default_mode: ReuseMode
    """Mode of questions and chats that name none."""
    force_modes: bool
    """Whether modes serve regardless of their measured distance."""
    modes: list[ModeResponse]
    """The modes that were measured."""


class VerifyResponse(ResponseModel):
    """The result of a verification."""

    states: int
    """Number of verified states."""
    modules: int
    found: tuple[Disagreement, ...]
    """Records that disagree."""
    interrupted: dict[str, int]
    """Number of states kept for each interrupted ingestion, by target."""
    clean: bool
    """Whether all disagreements are repaired."""


class ObservedResponse(ResponseModel):
    """A text that recurred in prompts, with the uses of its states."""

    id: str
    tokens: int
    nbytes: int
    hits: int
    """Prompts that read the states."""
    used_at: float
    """Unix seconds of the last use."""
    kept_until: float | None
    """Unix seconds until which a caller keeps the text. Null for a text that no caller keeps."""
    kept_by: str | None
    """The caller, such as `key 3`."""
    excerpt: str
    """The first characters of the text."""

    @classmethod
    def of(cls, module: ObservedModule) -> ObservedResponse:
        return cls(
            id=module.id,
            tokens=len(module.token_ids),
            nbytes=module.nbytes,
            hits=module.hits,
            used_at=module.used_at,
            kept_until=module.kept_until or None,
            kept_by=module.kept_by or None,
            excerpt=module.row.text[:EXCERPT],
        )


class ForgottenResponse(ResponseModel):
    """The number of observed texts that were forgotten."""

    forgotten: int


class FlushResponse(ResponseModel):
    """The result of writing the ledger."""

    flushed: bool
