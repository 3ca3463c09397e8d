"""How a view looks, measured in the browser: axe's rules, contrast, and what does not fit."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from tests.api.page.conftest import Page

# Text whose contrast with what is painted behind it is less than WCAG 2.2 AA asks for. Colors are
# read back from a canvas, which knows every notation.
_PALE = """
const canvas = new OffscreenCanvas(1, 1);
const pen = canvas.getContext('2d', { willReadFrequently: true });
const painted = (colors) => {
  pen.fillStyle = getComputedStyle(document.documentElement).backgroundColor;
  pen.fillRect(0, 0, 1, 1);
  for (const color of colors) { pen.fillStyle = color; pen.fillRect(0, 0, 1, 1); }
  return pen.getImageData(0, 0, 1, 1).data;
};
const luminance = ([...rgb]) => {
  const [r, g, b] = rgb.slice(0, 3).map((each) => {
    const share = each / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let text = walker.nextNode(); text; text = walker.nextNode()) {
  const node = text.parentElement;
  const style = getComputedStyle(node);
  if (!text.data.trim() || !node.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true }))
    continue;
  if (node.closest(':disabled, [aria-hidden=true], title, noscript, option, .unseen, .skip'))
    continue;
  const behind = [];
  for (let each = node; each; each = each.parentElement)
    behind.unshift(getComputedStyle(each).backgroundColor);
  const color = node instanceof SVGElement ? style.fill : style.color;
  const [back, front] = [painted(behind), painted([...behind, color])].map(luminance);
  const ratio = (Math.max(back, front) + 0.05) / (Math.min(back, front) + 0.05);
  const size = parseFloat(style.fontSize);
  const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
  if (ratio < (large ? 3 : 4.5))
    found.push(`${text.data.trim().slice(0, 40)}: ${ratio.toFixed(2)}`);
}
return found;
"""

# Text that is cut off where nothing shows all of it: rows of a grid open, other places do not.
_CUT = """
return [...document.querySelectorAll('main *, dialog *')].filter((node) => {
  const style = getComputedStyle(node);
  const cut = node.scrollWidth > node.clientWidth + 1 && node.clientWidth > 1;
  if (!cut || style.overflowX !== 'hidden' || node.matches('select, .unseen')) return false;
  return node.textContent.trim();
}).map((node) => `${node.tagName}.${node.className}: ${node.textContent.slice(0, 60)}`);
"""

_UNNAMED = """
const nodes = document.querySelectorAll('button, input, select, textarea, a, dialog, [role=img]');
return [...nodes].filter((node) => {
  const labels = [...(node.labels ?? [])].map((each) => each.textContent).join('');
  const named = node.getAttribute('aria-label') || node.textContent.trim() || labels;
  return !named && node.checkVisibility();
}).map((node) => node.outerHTML.slice(0, 120));
"""


_AXE = """
const done = arguments[arguments.length - 1];
// `_PALE` measures contrast, which is two fifths of the work of all rules.
const rules = { 'color-contrast': { enabled: false } };
axe.run(document, { resultTypes: ['violations'], rules }).then(({ violations }) => done(
  violations.flatMap(({ id, nodes }) =>
    nodes.map(({ target, html }) => `${id}: ${target.join(' ')} ${html.slice(0, 120)}`))));
"""


@cache
def _axe() -> str:
    return (Path(__file__).parent / "vendor" / "axe.min.js").read_text(encoding="utf-8")


def axe_violations(page: Page) -> list[str]:
    """Violations of all rules of axe-core, best practices included."""
    if page.window.execute_script("return typeof axe") == "undefined":
        page.window.execute_script(_axe())
    found: Any = page.window.execute_async_script(_AXE)
    return list(found)


def pale_texts(page: Page) -> list[str]:
    """Texts with too little contrast, each with its ratio."""
    return _run(page, _PALE)


def cut_texts(page: Page) -> list[str]:
    """Elements that hide a part of their text for good."""
    return _run(page, _CUT)


def unnamed_controls(page: Page) -> list[str]:
    """Controls that a screen reader has no name for."""
    return _run(page, _UNNAMED)


def overflow(page: Page) -> int:
    """Pixels by which the page is wider than the window."""
    width = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    return int(page.window.execute_script(f"return {width}"))


def _run(page: Page, script: str) -> list[str]:
    found: Any = page.window.execute_script(script)
    return list(found)
