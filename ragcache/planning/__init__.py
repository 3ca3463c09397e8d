"""What caching a corpus will take and bring: sizes, budgets, times on a sample, and advice."""

from ragcache.planning.break_even import break_even_bandwidth, break_even_tokens
from ragcache.planning.corpus import Corpus, corpus_of_collection, corpus_of_sources
from ragcache.planning.plan import Budgets, Plan, make_plan

__all__ = [
    "Budgets",
    "Corpus",
    "Plan",
    "break_even_bandwidth",
    "break_even_tokens",
    "corpus_of_collection",
    "corpus_of_sources",
    "make_plan",
]
