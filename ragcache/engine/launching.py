"""When to launch a step behind the one that runs, so that later requests still join it, and which
questions have a step of their own."""

from __future__ import annotations

from collections import deque
from typing import Final

STEPS: Final = 8
"""Number of the last steps whose times are kept."""

SHARE: Final = 0.95
"""Share of the shortest of these steps for which the running one is expected to last."""

WAKING: Final = 0.0003
"""Seconds that a thread needs to wake up."""

FORGIVING: Final = 0.98
"""Factor by which the extra margin shrinks with each step."""

SLIGHT: Final = 0.0001
"""Seconds for which a device may stand idle between two steps without being late."""


MOST_ANSWERS: Final = 32
"""Most answers that wait for a step of questions alone."""

MOST_NEW_TOKENS: Final = 128
"""Most new tokens of questions that have a step of their own."""

PAUSE: Final = 0.01
"""Fewest seconds between two such steps, in which answers go on."""


class QuestionTurns:
    """Tells which questions are computed before the next tokens of answers, and not beside them.

    A step of one question alone is shorter than a step with all answers, which read documents of
    their own. The first token comes sooner for it, and each answer waits once for a question. Where
    many answers run or many questions come, shared steps take less time in all.
    """

    def __init__(self) -> None:
        self._last = -PAUSE

    def take(self, answers: int, new_tokens: int, now: float) -> bool:
        """Whether waiting questions get the next step for themselves. A turn counts as taken.

        Args:
            answers: Number of answers that would wait.
            new_tokens: New tokens of the questions.
            now: The time in seconds.
        """
        few = 0 < answers <= MOST_ANSWERS and 0 < new_tokens <= MOST_NEW_TOKENS
        if not few or now - self._last < PAUSE:
            return False
        self._last = now
        return True


class LaunchTimer:
    """Tells how long a launch may wait while a step runs.

    A device computes steps in the order of their launches. A request that arrives just after a
    launch therefore waits for two steps: the one that runs, and the one behind it. The later the
    launch, the fewer requests come too late for it. But the device must not stand idle: the step
    has to be prepared before the running one ends.

    The running step is expected to take nearly as long as the shortest of the last steps without
    prompts, and preparing the next one as long as the longest of the last preparations of its kind:
    a step with new text takes longer to prepare than one in which answers alone go on. An idle
    device makes the launches after it come earlier.

    Example:
        >>> timer = LaunchTimer()
        >>> for _ in range(8):
        ...     timer.observe_launch(0.001)
        ...     timer.observe_step(0.010)
        >>> round(timer.seconds_left(0.002), 4)  # 0.95 * 0.010 - 0.001 - 0.0003 - 0.002
        0.0062
    """

    def __init__(self) -> None:
        self._steps = deque[float](maxlen=STEPS)
        self._launches = (deque[float](maxlen=STEPS), deque[float](maxlen=STEPS))
        self._margin = 0.0

    def observe_launch(self, seconds: float, *, prompts: bool = False) -> None:
        """Take into account how long it took to plan a step and launch it.

        Args:
            seconds: The time.
            prompts: Whether the step computes more than the next tokens of answers.
        """
        self._launches[prompts].append(seconds)

    def observe_step(self, seconds: float) -> None:
        """Take into account the time of a step in which answers alone went on."""
        self._steps.append(seconds)

    def forget_steps(self) -> None:
        """Forget the times of steps: the next ones are over other requests."""
        self._steps.clear()

    def observe_idle(self, seconds: float) -> None:
        """Take into account for how long the device stood idle between two steps."""
        self._margin *= FORGIVING
        if seconds > SLIGHT:
            self._margin += 2 * seconds

    def seconds_left(self, running: float, *, prompts: bool = False) -> float:
        """Seconds that the next launch may wait.

        Args:
            running: Seconds for which the step before has run.
            prompts: Whether the next step is known to compute more than the next tokens of answers.
        """
        launches = self._launches[prompts] or self._launches[not prompts]
        if len(self._steps) < STEPS or not launches:
            return 0.0
        lead = max(launches) + WAKING + self._margin
        return max(0.0, SHARE * min(self._steps) - lead - running)
