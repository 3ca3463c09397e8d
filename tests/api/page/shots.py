"""Pictures of every view of a running service, light and dark, to be looked at.

python -m tests.api.page.shots http://127.0.0.1:8000/admin/ FOLDER
"""

from __future__ import annotations

import argparse
import shutil
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
        page.click(".grid tr[data-id] .name")
        page.find(".drawer pre")
    if view == "schemas":
        page.click(f"[data-schema='collection:{collection}']")
        page.click(".tree [role=treeitem]", "union")
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
    given = parser.parse_args()
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in (*FLAGS, "--hide-scrollbars"):
        options.add_argument(flag)
    window = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    window.set_window_size(1440, given.height)
    given.folder.mkdir(parents=True, exist_ok=True)
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        window.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        for view in given.views:
            shoot(Page(window, given.address), view, given.question, given.collection)
            window.save_screenshot(str(given.folder / f"{view}-{scheme}.png"))
    window.quit()


if __name__ == "__main__":
    main()
