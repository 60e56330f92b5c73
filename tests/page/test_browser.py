"""The page as a reader meets it, in headless Chromium: counts, filters, slider, keyboard, and who cannot see it."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphfuse.comm.table import find_table
from graphfuse.report import Report
from tests.page import reports

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the extra 'test')")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on the path (Debian: chromium)")
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        sandbox = [] if os.geteuid() else ["--no-sandbox"]  # Chromium has none for root
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield launched
        launched.close()


@pytest.fixture
def show(browser, tmp_path) -> Iterator[Any]:
    """Opens a report's page. At the end, nothing may have gone wrong in it, nor been asked of the network."""
    faults: list[str] = []
    contexts = []

    def opened(report: Report, viewport=WIDE, scheme="light") -> Any:
        file = Path(tmp_path / "page.html")
        file.write_text(report.to_html("A model at TP 2"), encoding="utf-8")
        context = browser.new_context(viewport=viewport, color_scheme=scheme, bypass_csp=False)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: faults.extend({request.url} - {file.as_uri()}))
        page.goto(file.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert faults == []


def chips(page) -> Counter[str]:
    """How many reductions are shown, by status."""
    read = "chips => chips.map(chip => [chip.dataset.status, Number(chip.dataset.count)])"
    shown: Counter[str] = Counter()
    for status, count in page.eval_on_selector_all(".chip[data-key^=site]", read):
        shown[status] += count
    return shown


def counts(report: Report) -> dict[str, int]:
    """The same of the JSON report."""
    return dict(Counter(site["status"] for site in report.to_json()["sites"]))


@pytest.mark.parametrize("report", [reports.two_layers(), reports.many_layers()], ids=["two layers", "48 layers"])
def test_site_counts_equal_the_json_report(show, report):
    page = show(report)
    assert chips(page) == counts(report)
    totals = report.to_json()["totals"]
    read = "tiles => Object.fromEntries(tiles.map(tile => [tile.dataset.total, tile.textContent]))"
    shown = page.eval_on_selector_all("[data-total]", read)
    assert [int(shown[name]) for name in ("fused", "merged", "declined")] == list(totals.values())[1:]
    assert int(shown["all-reduces"]) == totals["all_reduce"]
    assert page.locator("#shown").inner_text() == f"{totals['all_reduce']} reductions of {totals['all_reduce']} shown"


def test_layers_that_are_alike_unfold_and_fold(show):
    report = reports.many_layers()
    page = show(report)
    assert page.locator(".chip").count() == 1 + 2 * 3  # the embedding, one layer for 47, the last one
    page.get_by_role("button", name="Unfold layers.0 to layers.46").click()
    assert page.locator(".chip").count() == 1 + 48 * 3
    assert chips(page) == counts(report)
    page.keyboard.press("Enter")  # the button kept the focus
    assert page.locator(".chip").count() == 1 + 2 * 3
    page.get_by_role("button", name="Unfold all").click()
    assert page.locator(".chip").count() == 1 + 48 * 3


def test_filters_change_what_is_shown(show):
    page = show(reports.two_layers())
    page.get_by_role("checkbox", name="fused").uncheck()
    assert chips(page) == {"merged": 1, "declined": 2}
    page.get_by_role("checkbox", name="merged").uncheck()
    assert chips(page) == {"declined": 2}
    assert page.locator("#shown").inner_text() == "2 reductions of 6 shown"
    page.get_by_label("Reason").select_option("the reduced value has another user: sigmoid")
    assert page.locator(".chip").count() == 1
    assert page.locator(".layer-name").all_inner_texts() == ["layers.1"]
    page.get_by_label("Reason").select_option("")
    page.get_by_role("checkbox", name="fused").check()
    page.get_by_label("Part of a layer").select_option("self_attn")
    assert chips(page) == {"fused": 1}
    page.get_by_label("Part of a layer").select_option("mlp with experts")
    assert page.locator(".chip").count() == 4  # with the merged one hidden


def test_the_slider_shows_what_the_measured_table_says(show):
    page = show(reports.many_layers())
    table = find_table("NVIDIA H200", 2, "bfloat16")
    measured = {row.tokens: row.us for row in table.measured if row.hidden_size == reports.HIDDEN}
    for position, tokens in ((0, 1), (24, 64), (56, 16384)):
        page.get_by_label("Tokens in a step").fill(str(position))
        fused, unfused = 97 * measured[tokens]["symm_mem/one_shot"], 97 * measured[tokens]["unfused"]
        assert page.locator("#tokens-shown").inner_text() == f"{tokens:,}"
        text = page.locator("#saved").inner_text()
        assert f"take {fused:,.0f} µs a step instead of {unfused:,.0f} µs" in text
        saved = (unfused - fused) / tokens
        assert text.startswith(f"{saved:,.{2 if saved < 10 else 0}f} µs a token")
    shown = []
    for position in (24, 25, 26, 27, 28):  # 64 … 128 tokens: between measured ones times are interpolated
        page.get_by_label("Tokens in a step").fill(str(position))
        shown.append(int(page.locator(".bar.unfused + .bar-text").inner_text().split()[0].replace(",", "")))
    assert shown == sorted(shown) and len(set(shown)) == 5


def test_pointing_at_a_reduction_shows_it_and_a_click_keeps_it(show):
    page = show(reports.two_layers())
    details = page.locator("#details")
    page.locator(".chip[data-status=fused]").nth(1).hover()
    assert "layers.0.self_attn.o_proj" in details.inner_text()
    assert "layers.0.post_attention_layernorm" in details.inner_text()
    assert f"[T, {reports.HIDDEN}] bfloat16" in details.inner_text()
    assert "symm_mem one_shot, any size" in details.inner_text()
    assert details.locator("svg").count() == 2, "before and after"
    assert "all_reduce → add" in details.locator("svg").first.get_attribute("aria-label")
    page.mouse.move(0, 0)
    assert "Nothing is chosen" in details.inner_text()
    page.locator(".chip[data-status=merged]").click()
    page.mouse.move(0, 0)
    assert "layers.0.mlp.shared_expert.down_proj" in details.inner_text()


def test_a_declined_one_says_why_and_what_would_change_it(show):
    page = show(reports.two_layers())
    page.locator(".chip[data-status=declined]", has_text="all_reduce").nth(0).click()
    text = page.locator("#details").inner_text()
    assert reports.SECOND_USER in text
    assert "What would change it: Let the residual add alone read the reduced value." in text
    assert page.locator("#details svg").count() == 1


def test_names_that_are_markup_are_shown_as_text(show):
    page = show(reports.two_layers())
    page.locator(".chip[data-status=declined]", has_text="all_reduce").nth(0).click()
    assert page.locator("#details h2").inner_text() == reports.HOSTILE
    assert page.locator("main img, main b").count() == 0
    assert "</script><script>pwned()</script>" in page.locator("#about").inner_text()


def test_everything_can_be_reached_with_the_keyboard(show):
    page = show(reports.two_layers())
    page.locator(".chip").first.focus()
    page.keyboard.press("ArrowDown")
    assert "layers.0.self_attn.o_proj" in page.locator("#details").inner_text()
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    assert page.locator(".chip").last.get_attribute("aria-pressed") == "true"
    assert reports.WIDE_WEIGHT in page.locator("#details").inner_text()
    page.keyboard.press("Escape")
    assert page.locator("[aria-pressed=true]").count() == 0
    assert "Nothing is chosen" in page.locator("#details").inner_text()


def test_on_a_phone_details_come_up_on_a_tap_and_go_away(show):
    page = show(reports.two_layers(), NARROW)
    assert not page.locator("#details").is_visible()
    page.locator(".chip[data-status=declined]").last.click()
    assert page.locator("#details").is_visible()
    tapped, sheet = page.locator(".chip").last.bounding_box(), page.locator("#details").bounding_box()
    assert tapped["y"] >= 0 and tapped["y"] + tapped["height"] <= sheet["y"], "the sheet does not cover what was tapped"
    page.get_by_role("button", name="Close the details").click()
    assert not page.locator("#details").is_visible()


def test_without_a_measured_table_there_is_no_slider_but_the_reason(show):
    report = reports.two_layers()
    report.gate["decisions"][0]["table"] = None
    page = show(report)
    assert page.locator("#tokens").count() == 0
    assert "graphfuse tune allreduce" in page.locator("#savings").inner_text()


def test_a_model_that_was_not_traced_has_a_page(show):
    page = show(Report())
    assert "not traced yet" in page.locator("#host").inner_text()


LOOKS = [(WIDE, "light"), (NARROW, "dark"), (WIDE, "dark"), (NARROW, "light")]


def serious_faults(page) -> list[tuple[str, str]]:
    """What axe-core holds to be serious or critical, with everything unfolded and the details open."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    if page.locator("#fold-all").is_visible():
        page.locator("#fold-all").click()
    page.locator(".chip").last.click()
    found = axe.run(page).response["violations"]
    return [(v["id"], v["nodes"][0]["html"]) for v in found if v["impact"] in ("serious", "critical")]


@pytest.mark.parametrize(("viewport", "scheme"), LOOKS[:2], ids=["1280 light", "390 dark"])
def test_axe_finds_no_serious_fault(show, viewport, scheme):
    page = show(reports.two_layers(), viewport, scheme)
    assert serious_faults(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]


@pytest.mark.slow
@pytest.mark.parametrize(("viewport", "scheme"), LOOKS, ids=["1280 light", "390 dark", "1280 dark", "390 light"])
def test_nor_in_any_look_of_small_and_large_models(show, viewport, scheme):
    for report in (reports.two_layers(), reports.many_layers()):
        page = show(report, viewport, scheme)
        assert serious_faults(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]


def test_axe_would_find_text_that_nobody_can_read(show):
    page = show(reports.many_layers(1))
    page.evaluate("document.querySelector('.host').style.color = '#bbbbbb'")
    assert [fault for fault, _ in serious_faults(page)] == ["color-contrast"]
