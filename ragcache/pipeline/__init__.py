"""The two ways through ragcache: documents in, answers out."""

from ragcache.pipeline.answer import Answer, Reuse, Source, Timings
from ragcache.pipeline.answering import Answerer
from ragcache.pipeline.asked import Asked, Returned
from ragcache.pipeline.chat_text import ChatText, Message
from ragcache.pipeline.chatting import ChatCall, ChatRunner, Conversation
from ragcache.pipeline.generation import GREEDY, Generation
from ragcache.pipeline.ingest import Ingestion, Ingestor
from ragcache.pipeline.module_states import ModuleEncoder, ModuleTokens, ScopeEncoder
from ragcache.pipeline.modules import Modules, Placed
from ragcache.pipeline.namespace import Namespace, SharedServices, Stats
from ragcache.pipeline.prompting import PromptRunner
from ragcache.pipeline.schema import generated_schema, members
from ragcache.pipeline.streams import AnswerStream, AsyncAnswerStream
from ragcache.pipeline.submitting import Submitter
from ragcache.pipeline.template_text import TemplateText

__all__ = [
    "GREEDY",
    "Answer",
    "AnswerStream",
    "Answerer",
    "Asked",
    "AsyncAnswerStream",
    "ChatCall",
    "ChatRunner",
    "ChatText",
    "Conversation",
    "Generation",
    "Ingestion",
    "Ingestor",
    "Message",
    "ModuleEncoder",
    "ModuleTokens",
    "Modules",
    "Namespace",
    "Placed",
    "PromptRunner",
    "Returned",
    "Reuse",
    "ScopeEncoder",
    "SharedServices",
    "Source",
    "Stats",
    "Submitter",
    "TemplateText",
    "Timings",
    "generated_schema",
    "members",
]
