"""Evaluation with known questions: data sets, metrics, and comparisons of modes."""

from ragcache.evaluation.datasets import Dataset, Question, load_dataset
from ragcache.evaluation.metrics import (
    Interval,
    bootstrap_interval,
    contains_answer,
    exact_match,
    f1,
    normalize,
    paired_bootstrap,
    rouge_l,
)
from ragcache.evaluation.runs import (
    PASTED,
    Comparison,
    Evaluation,
    EvaluationReport,
    MarkedAnswer,
    ask_questions,
    compare_reports,
    evaluate_modes,
)

__all__ = [
    "PASTED",
    "Comparison",
    "Dataset",
    "Evaluation",
    "EvaluationReport",
    "Interval",
    "MarkedAnswer",
    "Question",
    "ask_questions",
    "bootstrap_interval",
    "compare_reports",
    "contains_answer",
    "evaluate_modes",
    "exact_match",
    "f1",
    "load_dataset",
    "normalize",
    "paired_bootstrap",
    "rouge_l",
]
