"""What caching a corpus takes and brings: sizes, budgets, times on a sample, and advice."""

from ragcache.planning.measure import Cut, SampleTimes, drop_pages, fill_pages, median_seconds
from ragcache.planning.plan import (
    Budgets,
    CachePlan,
    Corpus,
    TierSize,
    advise,
    break_even_bandwidth,
    break_even_tokens,
    corpus_of_collection,
    corpus_of_sources,
    format_bandwidth,
    format_budget,
    format_seconds,
    format_share,
    make_plan,
)

__all__ = [
    "Budgets",
    "CachePlan",
    "Corpus",
    "Cut",
    "SampleTimes",
    "TierSize",
    "advise",
    "break_even_bandwidth",
    "break_even_tokens",
    "corpus_of_collection",
    "corpus_of_sources",
    "drop_pages",
    "fill_pages",
    "format_bandwidth",
    "format_budget",
    "format_seconds",
    "format_share",
    "make_plan",
    "median_seconds",
]
