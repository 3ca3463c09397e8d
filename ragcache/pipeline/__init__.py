"""The two ways through ragcache: documents in, answers out."""

from ragcache.answers.policy import AnswerSpan
from ragcache.pipeline.answer import (
    Answer,
    AnswerStream,
    AsyncAnswerStream,
    Citation,
    PendingAnswer,
    Reuse,
    Timings,
)
from ragcache.pipeline.chat import ChatCall, Conversation, DocumentSearch
from ragcache.pipeline.chat_template import ChatTemplate, Message
from ragcache.pipeline.ingest import Ingestion
from ragcache.pipeline.keeper import Keeper
from ragcache.pipeline.modules import Modules
from ragcache.pipeline.namespace import Namespace, SharedServices, Stats
from ragcache.pipeline.observed import ObservedModule
from ragcache.pipeline.pins import Pin, Pins
from ragcache.pipeline.pml import generated_schema, members

__all__ = [
    "Answer",
    "AnswerSpan",
    "AnswerStream",
    "AsyncAnswerStream",
    "ChatCall",
    "ChatTemplate",
    "Citation",
    "Conversation",
    "DocumentSearch",
    "Ingestion",
    "Keeper",
    "Message",
    "Modules",
    "Namespace",
    "ObservedModule",
    "PendingAnswer",
    "Pin",
    "Pins",
    "Reuse",
    "SharedServices",
    "Stats",
    "Timings",
    "generated_schema",
    "members",
]
