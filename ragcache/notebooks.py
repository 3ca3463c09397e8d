"""Progress of long calls, and charts of the tokens of prompts, as notebooks show them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol

_WIDTH, _BAR, _ROW = 640, 18, 46  # of a chart, in pixels
_TEXT = 'font-family="sans-serif" font-size="12" fill="#808080"'
_PARTS = (
    ("cached_tokens", "read from states", "#0f9d76"),
    ("shared_tokens", "shared with other requests", "#e3a72f"),
    ("computed_tokens", "computed", "#c8445a"),
)
_UPDATE_SECONDS = 0.1


class PromptCounts(Protocol):
    """Numbers of tokens of a prompt, such as `Reuse`."""

    @property
    def cached_tokens(self) -> int: ...
    @property
    def shared_tokens(self) -> int: ...
    @property
    def computed_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class TokenChart:
    """A bar for each prompt: how many of its tokens were read from states, and how many computed.

    Notebooks draw the chart; `_repr_svg_` returns it as SVG.

    Example:
        >>> from ragcache import Reuse
        >>> chart = TokenChart({"first question": Reuse(640, 620, 20)})
        >>> "620 of 640 tokens not computed" in chart._repr_svg_()
        True
    """

    prompts: Mapping[str, PromptCounts]
    """Numbers of tokens by the name of the prompt."""

    def _repr_svg_(self) -> str:
        """Return the chart as SVG."""
        totals = [sum(_counts(each)) for each in self.prompts.values()]
        scale = _WIDTH / (max(totals, default=0) or 1)
        shown = "".join(_legend())
        for row, (name, counts) in enumerate(self.prompts.items()):
            shown += _row(20 + row * _ROW, name, _counts(counts), scale)
        height = 24 + len(totals) * _ROW
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}" role="img">{shown}</svg>'
        )


def _counts(prompt: PromptCounts) -> list[int]:
    return [getattr(prompt, name) for name, _, _ in _PARTS]


def _legend() -> list[str]:
    return [
        f'<rect x="{at}" y="2" width="10" height="10" rx="2" fill="{color}"/>'
        f'<text x="{at + 15}" y="11" {_TEXT}>{title}</text>'
        for at, (_, title, color) in zip((0, 130, 320), _PARTS, strict=True)
    ]


def _row(top: int, name: str, counts: list[int], scale: float) -> str:
    """Draw one prompt: its name and numbers, and its bar below them."""
    total, computed = sum(counts), counts[-1]
    told = f"{total - computed:,} of {total:,} tokens not computed"
    shown = f'<text x="0" y="{top + 16}" {_TEXT}>{escape(name)}</text>'
    shown += f'<text x="{_WIDTH}" y="{top + 16}" text-anchor="end" {_TEXT}>{told}</text>'
    at = 0.0
    for count, (_, _, color) in zip(counts, _PARTS, strict=True):
        width = count * scale
        shown += (
            f'<rect x="{at:.1f}" y="{top + 22}" width="{width:.1f}" height="{_BAR}" '
            f'fill="{color}"/>'
        )
        at += width
    return shown


def notebook_progress(label: str) -> Callable[[int, int], None] | None:
    """Return a progress bar if this process is the kernel of a notebook, or else None.

    Args:
        label: The task, such as `encoding`.

    Returns:
        A function that is called with the number of finished parts and of all parts.
    """
    python = sys.modules.get("IPython")
    if python is None or getattr(python.get_ipython(), "kernel", None) is None:
        return None
    return NotebookBar(label, python.display.display)


class NotebookBar:
    """A progress bar in the output of a notebook's cell. It changes in place and stays at its end.

    Args:
        label: The task.
        display: `IPython.display.display`.
    """

    def __init__(self, label: str, display: Callable[..., Any]) -> None:
        self._label, self._display = label, display
        self._handle: Any = None
        self._shown_at = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Show that a number of parts out of a total is finished."""
        now = time.monotonic()
        if self._handle is not None and done < total and now - self._shown_at < _UPDATE_SECONDS:
            return
        self._shown_at = now
        text = f"{self._label}: {done:,} of {total:,}"
        bar = f'<progress max="{total}" value="{done}" style="width: 20em"></progress>'
        shown = {"text/plain": text, "text/html": f"<div>{bar} {escape(text)}</div>"}
        if self._handle is None:
            self._handle = self._display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)
