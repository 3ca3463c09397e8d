"""The two ways through ragcache: documents in, answers out."""

from ragcache.answers.quotations import AnswerSpan
from ragcache.pipeline.answer import (
    Answer,
    AnswerStream,
    AsyncAnswerStream,
    Citation,
    DeferredReleases,
    PendingAnswer,
    Reuse,
    Timings,
)
from ragcache.pipeline.ask import AskPipeline
from ragcache.pipeline.chat import ChatCall, ChatPipeline, Conversation
from ragcache.pipeline.chat_template import ChatTemplate, Message
from ragcache.pipeline.ingest import Ingestion
from ragcache.pipeline.module_states import ModuleEncoder, ScopeEncoder
from ragcache.pipeline.modules import Modules
from ragcache.pipeline.namespace import Namespace, SharedServices, Stats
from ragcache.pipeline.pml import PmlPipeline, generated_schema, members
from ragcache.pipeline.prompt import AskedQuestion, Retrieved, TokenPrompt
from ragcache.pipeline.submit import Submitter

__all__ = [
    "Answer", "AnswerSpan", "AnswerStream", "AskPipeline", "AskedQuestion", "AsyncAnswerStream",
    "ChatCall", "ChatPipeline", "ChatTemplate", "Citation", "Conversation", "DeferredReleases",
    "Ingestion", "Message", "ModuleEncoder", "Modules", "Namespace", "PendingAnswer", "PmlPipeline",
    "Retrieved", "Reuse", "ScopeEncoder", "SharedServices", "Stats", "Submitter", "Timings",
    "TokenPrompt", "generated_schema", "members",
]  # fmt: skip
