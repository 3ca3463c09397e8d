"""`python tools/entered.py` counts the files of a question."""

import pytest

from tools.entered import trace_question

MOST_FILES = 40


@pytest.mark.slow
def test_a_question_enters_at_most_forty_files() -> None:
    calls = trace_question()
    assert {"ragcache/rag.py", "ragcache/engine/core.py"} <= calls.keys()
    assert len(calls) <= MOST_FILES, sorted(calls)
    assert not any(file.startswith("ragcache/answers/") for file in calls)
