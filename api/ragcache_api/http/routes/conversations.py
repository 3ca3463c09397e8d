"""Routes that list and delete the kept conversations of the caller's namespace."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from ragcache_api.http.protocol import Flag, ResponseModel, problems
from ragcache_api.http.service import ContextDep

router = APIRouter(prefix="/v1/conversations", tags=["conversations"], responses=problems(500, 507))
Name = Annotated[str, Path(min_length=1, max_length=200)]


class ConversationsResponse(ResponseModel):
    """The conversations of a namespace whose states are kept."""

    bytes: dict[str, int]
    """Bytes of states by tier, on all machines."""
    resumed_tokens: dict[str, int]
    """Tokens of earlier turns that the process has read since it began, by the states' tier."""


class DeletedConversations(ResponseModel):
    """Conversations that were deleted."""

    bytes: dict[str, int]
    """Bytes of their states by tier, on all machines."""
    dry_run: bool
    """Whether nothing was deleted."""
    conversations: int
    """Number of conversations."""


@router.get("")
def get_conversations(context: ContextDep) -> ConversationsResponse:
    """Return the bytes that conversations take, and how many tokens were read from them."""
    kept = context.rag.modules.conversations
    return ConversationsResponse(bytes=kept.sizes(), resumed_tokens=kept.resumed_tokens())


@router.delete("")
def delete_conversations(context: ContextDep, dry_run: Flag = False) -> DeletedConversations:
    """Delete all conversations from every tier. Texts are kept nowhere."""
    return _delete(context, None, dry_run)


@router.delete("/{name}")
def delete_conversation(
    name: Name, context: ContextDep, dry_run: Flag = False
) -> DeletedConversations:
    """Delete the conversation that requests named in `prompt_cache_key`, from every tier.

    States that other conversations have as well stay. An unknown name deletes nothing.
    """
    return _delete(context, name, dry_run)


def _delete(context: ContextDep, name: str | None, dry_run: bool) -> DeletedConversations:
    deleted = context.rag.modules.conversations.delete(name, dry_run=dry_run)
    return DeletedConversations(
        bytes=deleted.freed, dry_run=dry_run, conversations=deleted.conversations
    )
