"""Small talk: what counts, and what does not."""

from __future__ import annotations

import pytest

from ragcache.pipeline.ask import is_small_talk


@pytest.mark.parametrize(
    "message",
    [
        "Hello!",
        "hi there",
        "Hey, how are you today?",
        "Good morning, everyone!",
        "Thank you very much.",
        "What’s up?",
        "Vielen Dank!",
        "Bonjour à tout le monde",
        "你好！",
        "こんにちは。",
    ],
)
def test_greetings_and_thanks_are_small_talk(message: str) -> None:
    assert is_small_talk(message)


@pytest.mark.parametrize(
    "message",
    [
        "",
        "Hello, where does the key hang?",
        "What does hello mean?",
        "How are you supposed to dry sediment?",
        "Who are we?",
        "And why?",
        "yes",
        "the",
        "hello " * 20,
    ],
)
def test_questions_and_replies_are_not_small_talk(message: str) -> None:
    assert not is_small_talk(message)
