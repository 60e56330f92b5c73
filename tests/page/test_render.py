"""The page as a file: whole, without network, and nothing from a model in it is markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re

from tests.page import reports


def data_of(page: str) -> dict:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def test_the_embedded_data_is_the_report():
    made = reports.two_layers()
    data, document = data_of(made.to_html("Title")), made.to_json()
    assert data["totals"] == document["totals"]
    assert [(s["id"], s["status"], s["module"]) for s in data["sites"]] == [
        (s["id"], s["status"], s["module"]) for s in document["sites"]
    ]


def test_text_of_a_model_is_never_markup():
    page = reports.two_layers().to_html("<b>a & b</b>")
    assert "&lt;b&gt;a &amp; b&lt;/b&gt;" in page
    assert "<img" not in page and "<b>" not in page
    assert page.count("</script>") == 2, "the data's and the code's"
    assert data_of(page)["sites"][4]["module"] == reports.HOSTILE


def test_it_asks_for_nothing_from_elsewhere():
    page = reports.many_layers().to_html()
    addresses = set(re.findall(r"https?://[^\s'\"]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a name, not an address"
    assert not re.search(r"\b(src|href)\s*=|@import|url\(|fetch\(|XMLHttpRequest|innerHTML|\beval\(", page)


def test_only_its_own_script_may_run():
    page = reports.many_layers().to_html()
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page


def test_a_model_of_94_layers_is_a_small_file():
    assert len(reports.many_layers(94).to_html()) < 400_000
