"""Show pages in headless Chromium, wide, on a phone, in the dark and as for print; audit each with axe-core.

    .state/pages/bin/python tests/kit/look_at_pages.py OUT PAGE…

prints what was found as JSON; screenshots go to OUT/<number>-<view>.png.
"""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright  # type: ignore[import-not-found, unused-ignore]

VIEWS: dict[str, dict[str, Any]] = {
    "wide": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light", "has_touch": True, "is_mobile": True},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
}


def look(browser: Browser, page: Path, view: str, picture: Path) -> dict[str, Any]:
    """What the page does in one view."""
    context = browser.new_context(**VIEWS[view], bypass_csp=True)
    tab = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(page.as_uri())
    tab.screenshot(path=str(picture), full_page=True)
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    overflow = tab.evaluate("document.documentElement.scrollWidth - innerWidth")
    tab.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    opened = tab.evaluate("document.documentElement.scrollWidth - innerWidth")
    tab.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text())
    audit = tab.evaluate("axe.run()")
    small = "Math.min(...[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height))"
    answer = {
        "page": page.name,
        "view": view,
        "said": said,
        "other_requests": [url for url in asked if url != page.as_uri()],
        "overflow": max(overflow, opened),
        "background": background,
        "smallest_label": tab.evaluate(f"document.querySelector('svg text') ? {small} : null"),
        "rules_passed": len(audit["passes"]),
        "violations": [
            f"{broken['id']} ({broken['impact']}): {broken['nodes'][0]['html'][:200]}" for broken in audit["violations"]
        ],
    }
    context.close()
    return answer


def prints(browser: Browser, page: Path) -> int:
    """Bytes of the page as a PDF."""
    tab = browser.new_page()
    tab.goto(page.as_uri())
    size = len(tab.pdf(format="A4"))
    tab.close()
    return size


def main(out: Path, pages: list[Path]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    found = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for number, page in enumerate(path.resolve() for path in pages):
            found += [look(browser, page, view, out / f"{number}-{view}.png") for view in VIEWS]
            found[-1]["pdf_bytes"] = prints(browser, page)
        browser.close()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]])
