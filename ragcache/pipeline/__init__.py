"""The two ways through ragcache: documents in, answers out."""

from ragcache.pipeline.answer import Answer, Reuse, Source, Timings
from ragcache.pipeline.answering import Answerer
from ragcache.pipeline.asked import Asked, Returned
from ragcache.pipeline.chat_text import ChatText, Message
from ragcache.pipeline.chatting import ChatOptions, ChatRunner, Conversation
from ragcache.pipeline.generation import GREEDY, Generation
from ragcache.pipeline.ingestion import Ingestion, Ingestor
from ragcache.pipeline.module_states import ModuleEncoder, ModuleTokens, ScopeEncoder
from ragcache.pipeline.modules import Modules, Placed
from ragcache.pipeline.prompting import PromptRunner
from ragcache.pipeline.schema import generated_schema, members
from ragcache.pipeline.stats import Stats
from ragcache.pipeline.streams import AnswerStream, AsyncAnswerStream
from ragcache.pipeline.submitting import Submitter
from ragcache.pipeline.template_text import TemplateText
from ragcache.pipeline.wiring import Parts

__all__ = [
    "GREEDY",
    "Answer",
    "AnswerStream",
    "Answerer",
    "Asked",
    "AsyncAnswerStream",
    "ChatOptions",
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
    "Parts",
    "Placed",
    "PromptRunner",
    "Returned",
    "Reuse",
    "ScopeEncoder",
    "Source",
    "Stats",
    "Submitter",
    "TemplateText",
    "Timings",
    "generated_schema",
    "members",
]
