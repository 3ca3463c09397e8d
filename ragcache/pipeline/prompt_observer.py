"""The observer of a namespace's prompts, which finds the texts that recur in them.

The first prompt with a text leaves fingerprints of it. With the second one, the text recurs, and
waits for a pause between requests, in which it is encoded. All of this happens in the background.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

from ragcache.modes import ReuseMode
from ragcache.recurrence import RecurrenceTable, Span, gaps, natural_spans

MOST_CHARACTERS = 2**24
"""Most characters of the prompts that wait to be compared. Of more, the oldest leave nothing."""

MOST_WAITING = 2**20
"""Most characters of the texts of a namespace that wait to be encoded. Of more, further texts wait
for their next sight."""

MOST_TOGETHER = 32
"""Most texts that a turn of the background thread encodes. Other namespaces have theirs between."""

EncodeTexts: TypeAlias = Callable[[Mapping[str, ReuseMode], Callable[[], None]], None]
"""Encodes texts, each with the mode of its prompts, as `encode_texts(texts, pause)`. Calls `pause`,
which waits for a pause between requests, before each portion."""

_PAUSE_SECONDS = 0.05
"""Seconds after a prompt in which nothing is encoded: its request is on the way to the engine."""
_MOST_SECONDS = 1.0
"""Longest wait of a text for a pause. Under constant load it is then encoded beside requests."""
_POLL_SECONDS = 0.01
_LAUNCH_SECONDS = 0.005
"""Seconds after a prompt at which it is compared with others, so that its request goes first."""


class _Prompt(NamedTuple):
    """A prompt that is compared with earlier ones when its request is on the way."""

    text: str
    covered: Sequence[tuple[int, int]]
    """Parts of the text that are modules."""
    mode: ReuseMode


@dataclass(slots=True)
class _WaitingText:
    """A recurring text that waits to be encoded."""

    until: float
    """Time at which it waits no longer."""
    mode: ReuseMode
    sights: int = 1
    """Times that it has recurred. What recurs most is encoded first."""


class PromptObserver:
    """Compares the prompts of a namespace, and passes texts that recur on. Thread-safe.

    Only fingerprints of a text are kept until it recurs.

    Args:
        background: One thread, which compares prompts and encodes texts.
        is_idle: Tells whether no request is running.
        encode_texts: Encodes texts that recur.
    """

    def __init__(
        self, background: Executor, is_idle: Callable[[], bool], encode_texts: EncodeTexts
    ) -> None:
        self._background, self._is_idle = background, is_idle
        self._encode_texts = encode_texts
        self._recurrences = RecurrenceTable()
        self._prompts: deque[_Prompt] = deque()
        self._characters = 0  # of these prompts
        self._waiting: dict[str, _WaitingText] = {}
        self._waiting_characters = 0
        self._works = False  # whether a turn of the thread, which looks at both, has yet to begin
        self._prompted = -_PAUSE_SECONDS  # time of the last prompt
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Number of texts that wait to be encoded."""
        return len(self._waiting)

    def begin_prompt(self) -> None:
        """Note that a prompt is prepared: its request is on the way to the engine."""
        self._prompted = time.monotonic()

    def add_prompt(self, text: str, covered: Sequence[tuple[int, int]], mode: ReuseMode) -> None:
        """Compare a prompt in the background. Does nothing after the folder was closed.

        Args:
            text: The prompt.
            covered: Parts begin:end of the text that are modules.
            mode: The mode that the prompt is read in.
        """
        with self._lock:
            self._prompts.append(_Prompt(text, covered, mode))
            self._characters += len(text)
            while self._characters > MOST_CHARACTERS:
                self._take_prompt()
        self._work_later()

    def forget(self) -> None:
        """Forget all fingerprints, prompts and texts that wait."""
        with self._lock:
            self._recurrences = RecurrenceTable()
            self._prompts.clear()
            self._waiting = {}  # the background may go on with the old one
            self._characters = self._waiting_characters = 0

    def _work_later(self) -> None:
        """Ask for a turn of the background thread, unless one has yet to begin."""
        with self._lock:
            idle, self._works = not self._works, True
        if idle:
            with suppress(RuntimeError):
                self._background.submit(self._work)

    def _work(self) -> None:
        """Compare prompts, and encode texts that wait. Runs in the background.

        Later prompts have another turn, behind records of modules and other namespaces.
        """
        time.sleep(_LAUNCH_SECONDS)
        with self._lock:
            self._works = False
        self._compare()
        self._encode()
        if self._waiting:
            self._work_later()

    def _compare(self) -> None:
        """Queue the texts of new prompts that recur and are not modules yet."""
        while prompt := self._next_prompt():
            text, covered, mode = prompt
            for span in self._recurrences.observe(text):
                for own in _uncovered(span, covered):
                    for begin, end in natural_spans(text, own):
                        self._queue(text[begin:end], mode)

    def _next_prompt(self) -> _Prompt | None:
        with self._lock:
            return self._take_prompt() if self._prompts else None

    def _take_prompt(self) -> _Prompt:
        prompt = self._prompts.popleft()
        self._characters -= len(prompt.text)
        return prompt

    def _queue(self, text: str, mode: ReuseMode) -> None:
        if known := self._waiting.get(text):
            known.sights += 1
        elif self._waiting_characters < MOST_WAITING:
            self._waiting_characters += len(text)
            self._waiting[text] = _WaitingText(time.monotonic() + _MOST_SECONDS, mode)

    def _encode(self) -> None:
        """Encode texts that wait, in a pause or when the first waits no longer."""
        if not (every := self._waiting):
            return
        until = min(each.until for each in every.values())
        self._wait_for_pause(until)
        if every is not self._waiting:  # forgotten meanwhile
            return
        often = sorted(every, key=lambda text: -every[text].sights)[:MOST_TOGETHER]
        try:
            texts = {text: every[text].mode for text in often}
            self._encode_texts(texts, partial(self._wait_for_pause, until))
        finally:
            for text in often:
                del every[text]
            self._waiting_characters = sum(map(len, self._waiting))

    def _wait_for_pause(self, until: float) -> None:
        """Wait for a pause between requests, until a time at most.

        The engine is idle before the first request that finds a text, too: a prompt begins no
        pause until its request has reached the engine. Prompts are compared meanwhile.
        """
        self._compare()
        while (now := time.monotonic()) < until:
            if self._is_idle() and now - self._prompted >= _PAUSE_SECONDS:
                return
            time.sleep(_POLL_SECONDS)
            self._compare()


def _uncovered(span: Span, covered: Sequence[tuple[int, int]]) -> list[Span]:
    """Return the parts of a span between covered parts of the text, in order."""
    inside = [
        (max(begin, span.begin) - span.begin, min(end, span.end) - span.begin)
        for begin, end in covered
        if begin < span.end and end > span.begin
    ]
    return [
        Span(span.begin + begin, span.begin + end)
        for begin, end in gaps(span.end - span.begin, inside)
    ]
