"""ragcache: RAG middleware in which the document is the unit of cache."""
