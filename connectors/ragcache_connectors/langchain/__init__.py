"""LangChain: schemas from its prompt templates."""

from ragcache_connectors.langchain.templates import TemplateSchema, template_schema

__all__ = ["TemplateSchema", "template_schema"]
