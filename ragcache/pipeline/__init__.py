"""The two ways through ragcache: documents in, answers out."""

from ragcache.pipeline.answer import Answer, Reuse, Source, Timings
from ragcache.pipeline.answering import Answerer
from ragcache.pipeline.encoding import ModuleEncoder, ModuleTokens
from ragcache.pipeline.ingestion import Ingestion, Ingestor
from ragcache.pipeline.schema import generated_schema, members

__all__ = [
    "Answer",
    "Answerer",
    "Ingestion",
    "Ingestor",
    "ModuleEncoder",
    "ModuleTokens",
    "Reuse",
    "Source",
    "Timings",
    "generated_schema",
    "members",
]
