"""Routes that list and delete namespaces. They concern all namespaces."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Path

from ragcache_api.http.protocol import Flag, PageOf, PageQuery, ResponseModel, problems
from ragcache_api.http.service import ContextDep

router = APIRouter(prefix="/admin/namespaces", tags=["namespaces"], responses=problems(500, 507))
Name = Annotated[str, Path(min_length=1, max_length=64)]


class NamespaceResponse(ResponseModel):
    """A namespace."""

    name: str


class NamespaceDeletedResponse(NamespaceResponse):
    """The contents of a deleted namespace, as numbers. With `dry_run`, nothing is deleted."""

    dry_run: bool
    """Whether nothing was deleted."""
    collections: int
    documents: int
    modules: int
    schemas: int
    """PML schemas."""
    conversations: int
    """Kept conversations."""
    observed: int
    """Texts that recurred in prompts, without texts in the memory of other processes."""
    objects: dict[str, int]
    """Files, responses, pins and other objects of interfaces, by kind."""
    records: int
    """Records of indexings."""
    jobs: int
    """Ingestions, ended ones included."""
    api_keys: int
    """API keys, revoked ones included. 0 for `default`, whose keys stay."""
    states: int
    """States that nothing outside of the namespace needs."""
    tiers: dict[str, int]
    """Bytes of these states by tier, on all machines."""


@router.get("")
def list_namespaces(context: ContextDep, page: PageQuery) -> PageOf[NamespaceResponse]:
    """List all namespaces by name."""
    context.caller.require_operator()
    listed = [NamespaceResponse(name=name) for name in context.rag.namespaces.names()]
    return page.cut(listed, lambda each: each.name)


@router.delete("/{name}")
def delete_namespace(
    name: Name, context: ContextDep, dry_run: Flag = False
) -> NamespaceDeletedResponse:
    """Delete a namespace with everything in it, its API keys included.

    Its ingestions are canceled, and its running requests end with `namespace-deleted`. Other
    processes follow within seconds, and can store nothing in it until then. `default` keeps its
    API keys, which operators use. A namespace with the service's only keys is not deleted.
    """
    context.caller.require_operator()
    deleted = context.rag.namespaces.delete(name, dry_run=dry_run)
    return NamespaceDeletedResponse(name=name, dry_run=dry_run, **asdict(deleted))
