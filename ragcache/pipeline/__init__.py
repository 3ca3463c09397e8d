"""The two ways through ragcache: documents in, answers out."""

from ragcache.pipeline.answer import Answer, Reuse, Source, Timings
from ragcache.pipeline.answering import Answerer
from ragcache.pipeline.encoding import ModuleEncoder, ModuleTokens
from ragcache.pipeline.ingestion import Ingestion, Ingestor
from ragcache.pipeline.modules import Modules
from ragcache.pipeline.prompting import PromptRunner
from ragcache.pipeline.schema import generated_schema, members
from ragcache.pipeline.scope_states import ScopeEncoder
from ragcache.pipeline.template_text import TemplateText

__all__ = [
    "Answer",
    "Answerer",
    "Ingestion",
    "Ingestor",
    "ModuleEncoder",
    "ModuleTokens",
    "Modules",
    "PromptRunner",
    "Reuse",
    "ScopeEncoder",
    "Source",
    "TemplateText",
    "Timings",
    "generated_schema",
    "members",
]
