"""Charts and progress bars of notebooks, without a notebook."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from ragcache import Reuse
from ragcache.notebooks import NotebookBar, TokenChart, notebook_progress

SVG = "{http://www.w3.org/2000/svg}"
PROMPTS = {
    "<first> & second": Reuse(1000, 600, 300, shared_tokens=100),
    "half as long": Reuse(500, 0, 500),
}


def test_a_chart_has_a_bar_for_each_prompt() -> None:
    chart = ElementTree.fromstring(TokenChart(PROMPTS)._repr_svg_())
    legend = chart.findall(f"{SVG}rect")[:3]
    bars = chart.findall(f"{SVG}rect")[3:]
    assert [float(bar.attrib["width"]) for bar in bars] == [384.0, 64.0, 192.0, 0.0, 0.0, 320.0]
    assert [float(bar.attrib["x"]) for bar in bars[:3]] == [0.0, 384.0, 448.0]
    assert [bar.attrib["fill"] for bar in bars[3:]] == [each.attrib["fill"] for each in legend]
    texts = [each.text for each in chart.findall(f"{SVG}text")]
    assert "<first> & second" in texts
    assert "700 of 1,000 tokens not computed" in texts
    bottom = max(float(bar.attrib["y"]) + float(bar.attrib["height"]) for bar in bars)
    assert bottom <= float(chart.attrib["height"])


def test_a_chart_without_prompts_or_tokens_is_drawn() -> None:
    for chart in (TokenChart({}), TokenChart({"empty": Reuse(0, 0, 0)})):
        assert ElementTree.fromstring(chart._repr_svg_()).tag == f"{SVG}svg"
    assert "half" not in PROMPTS["half as long"]._repr_svg_()


class Display:
    """`IPython.display.display`, which notes what it shows and what replaces it."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []
        self.updates: list[dict[str, str]] = []

    def display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw
        assert display_id
        self.shown.append(data)
        return SimpleNamespace(update=self.update)

    def update(self, data: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.updates.append(data)


def test_a_bar_changes_in_place_and_ends_full() -> None:
    display = Display()
    bar = NotebookBar("encoding <modules>", display.display)
    for done in range(1, 1001):
        bar(done, 1000)
    assert len(display.shown) == 1
    assert len(display.updates) < 500, "not at each step"
    assert display.updates[-1]["text/plain"] == "encoding <modules>: 1,000 of 1,000"
    assert "encoding &lt;modules&gt;" in display.updates[-1]["text/html"]


def test_bars_appear_in_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    display = Display()
    shell = SimpleNamespace(kernel=object())
    python = SimpleNamespace(get_ipython=lambda: shell, display=display)
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert notebook_progress("encoding") is None
    monkeypatch.setitem(sys.modules, "IPython", python)  # type: ignore[arg-type]
    bar = notebook_progress("encoding")
    assert bar is not None
    bar(1, 2)
    assert display.shown[0]["text/plain"] == "encoding: 1 of 2"
    del shell.kernel
    assert notebook_progress("encoding") is None, "IPython in a terminal"
