"""Pictures of every view of a running service, light and dark, wide and narrow, to be looked at.

python -m tests.api.page.shots http://127.0.0.1:8000/admin/ FOLDER
"""

from __future__ import annotations

import argparse
import shutil
from itertools import product
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.keys import Keys

from tests.api.page.conftest import FLAGS, VIEWS, Page

SETTLED = "return !document.querySelector('.loading')"


def shoot(page: Page, view: str, question: str, collection: str) -> None:
    """Opens a view with something in it."""
    page.open(view)
    page.find(f".view.{view}")
    if view == "modules":
        page.find(".grid tr[data-id]")
    if view == "documents":
        page.click(f"[data-collection='{collection}']")
        page.find(".grid tr[data-id]")
    if view == "schemas":
        page.click(f"[data-schema='collection:{collection}']")
        page.find(".stage pre")
    if view == "ask" and question:
        page.click(f"[name=collection] option[value='{collection}']")
        page.find("[name=question]").send_keys(question, Keys.ENTER)
        page.find(".waterfall + p")
    page.until(lambda: page.window.execute_script(SETTLED))


def main() -> None:
    """One file for each view and appearance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--question", default="")
    parser.add_argument("--collection", default="notes")
    parser.add_argument("--views", nargs="+", default=VIEWS)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--widths", nargs="+", type=int, default=(1440, 390))
    parser.add_argument("--schemes", nargs="+", default=("light", "dark"))
    parser.add_argument("--whole", action="store_true", help="the whole height of each view")
    given = parser.parse_args()
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in (*FLAGS, "--hide-scrollbars"):
        options.add_argument(flag)
    window = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    given.folder.mkdir(parents=True, exist_ok=True)
    for scheme, width in product(given.schemes, given.widths):
        page = Page(window, given.address)
        page.prefer(scheme)
        page.resize(width, given.height)
        for view in given.views:
            shoot(page, view, given.question, given.collection)
            taken = page.picture(whole=given.whole)
            (given.folder / f"{view}-{width}-{scheme}.png").write_bytes(taken)
    window.quit()


if __name__ == "__main__":
    main()
