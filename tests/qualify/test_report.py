# SPDX-License-Identifier: Apache-2.0
"""The reports: in a real headless browser without network, as Markdown, and against the published schema."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from itertools import pairwise
from types import SimpleNamespace

import jsonschema
import pytest
from b12x_overlay.qualify.cli import main
from b12x_overlay.qualify.report import html, markdown
from b12x_overlay.qualify.schema import CellStop, FaultCount
from b12x_overlay.qualify.store import load
from qualify.conftest import SMALL
from qualify.fake_server import serving

HOSTILE = "<script>fetch('http://192.0.2.1')</script>|`x`*y*"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Folder of one A/B about A4, made once."""
    folder = tmp_path_factory.mktemp("ab") / "result"
    with (
        serving(accepted=1, a4_rows=False) as a,
        serving(accepted=1, a4_rows=True, needle="near", faulty={1, 30}) as b,
    ):
        main(
            [
                "ab", a.url, b.url, *SMALL, "--question", "a4", "--prefill-lengths", "64,256",
                "--decode-concurrency", "1,2", "--decode-windows", "1", "--label-a", "A4 off", "--label-b", "A4 on",
                "--out", str(folder),
            ]
        )  # fmt: skip
    return folder


@pytest.fixture
def comparison(measured, tmp_path):
    """A copy of it, with its result."""
    folder = tmp_path / "result"
    shutil.copytree(measured, folder)
    return SimpleNamespace(folder=folder, result=json.loads((folder / "result.json").read_text()))


@pytest.fixture
def page():
    """A page of a headless Chromium that reports every request and error."""
    program = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if program is None:
        pytest.skip("no Chromium here (Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.seen = []
        page.on("request", lambda request: page.seen.append(request.url))
        page.on("pageerror", lambda error: page.seen.append(f"error: {error}"))
        page.on("console", lambda message: page.seen.append(f"console: {message.text}"))
        yield page
        browser.close()


def test_the_page_in_a_browser(comparison, page):
    path = comparison.folder / "report.html"
    page.goto(path.as_uri())
    assert page.seen == [path.as_uri()]
    assert "GLM" not in page.title()
    assert comparison.result["verdict"] in page.inner_text("h1").lower()
    # Every line that compares is in the table, with its verdict as JSON has it.
    for line in comparison.result["lines"]:
        if line["id"].startswith("ab."):
            cells = page.locator(f"[id='{line['id']}'] td")
            assert cells.nth(0).inner_text() == line["title"]
            assert line["verdict"] in cells.all_inner_texts()
    figures = page.locator("figure")
    titles = figures.locator("figcaption").all_inner_texts()
    assert titles == [
        "B over A",
        "Prefill",
        "Decode",
        "Decode: engine steps",
        "Decode: accepted tokens per step",
        "Needle checksum",
    ]
    for index in range(figures.count()):
        box = figures.nth(index).locator("svg").bounding_box()
        assert box["width"] > 200
        assert box["height"] > 100
        assert figures.nth(index).get_attribute("aria-label")
    assert "A4 on" in figures.nth(1).inner_text()


@pytest.mark.parametrize("width", [360, 1200])
def test_the_page_does_not_overflow(comparison, page, width):
    page.set_viewport_size({"width": width, "height": 800})
    page.goto((comparison.folder / "report.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_what_a_server_says_cannot_become_markup(comparison, page, tmp_path):
    result = load(comparison.folder / "result.json")
    for arm in result.arms:
        arm.label = HOSTILE
        arm.identity.model = HOSTILE
        arm.identity.environment = {"B12X_W4A16_A4_PREFILL_MIN_TOKENS": HOSTILE}
        arm.identity.manifest = {"patches": [HOSTILE], "base": HOSTILE}
    result.stop = HOSTILE
    result.blocks[0].faults = [FaultCount(kind="http_5xx", count=2, example=HOSTILE)]
    result.blocks[0].stopped = [CellStop(cell="decode C1", why=HOSTILE)]
    result.lines[0].note = HOSTILE
    path = tmp_path / "hostile.html"
    path.write_text(html(result), encoding="utf-8")
    page.goto(path.as_uri())
    assert page.seen == [path.as_uri()]
    assert page.locator("script").count() == 0
    assert HOSTILE in page.inner_text("body")
    for row in markdown(result).splitlines():
        assert "<script>" not in re.sub(r"\\.", "", row)


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.found += [
            value
            for name, value in attributes
            if name in ("src", "href", "xlink:href", "action") and not value.startswith("#")
        ]
        self.found += [tag] * (tag in ("script", "iframe", "object", "embed", "link"))


def test_the_page_is_self_contained(comparison):
    text = (comparison.folder / "report.html").read_text()
    links = _Links()
    links.feed(text)
    assert links.found == []
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_markdown_tables_are_whole(comparison):
    rows = (comparison.folder / "report.md").read_text().splitlines()
    for previous, row in pairwise(rows):
        if row.startswith("|") and previous.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", row)) == len(re.findall(r"(?<!\\)\|", previous)), (
                row
            )
    assert any("A4 prefill, off against on" in row for row in rows)


def test_the_result_satisfies_the_printed_schema(comparison, capsys):
    capsys.readouterr()
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(comparison.result, schema)
    undescribed = [
        f"{part.get('title')}.{field}"
        for part in (schema, *schema["$defs"].values())
        for field, value in part.get("properties", {}).items()
        if not value.get("description")
    ]
    assert undescribed == []
    broken = json.loads(json.dumps(comparison.result))
    broken["blocks"][0]["decode"][0]["tok_s"] = "fast"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, schema)


def test_reports_of_another_file_have_its_name(comparison, qualify, tmp_path):
    shutil.copy(comparison.folder / "result.json", tmp_path / "before.json")
    (tmp_path / "report.md").write_text("mine")
    done = qualify("report", str(tmp_path / "before.json"))
    assert (tmp_path / "report.md").read_text() == "mine"
    assert (tmp_path / "before.md").exists()
    assert f"reports: {tmp_path / 'before.html'}, before.md, before.json" in done.out


def test_report_again_with_other_limits(comparison, qualify, tmp_path):
    strict = tmp_path / "strict.toml"
    strict.write_text("[ratio]\nprefill_ratio_min = 1e9\n[question.a4]\nprefill_ratio_min = 1e9\n")
    before = (comparison.folder / "result.json").read_text()
    updated = json.loads(before)["updated"]
    again = qualify("report", str(comparison.folder), "--thresholds", str(strict))
    assert again.code == 1
    result = json.loads((comparison.folder / "result.json").read_text())
    assert result["updated"] == updated
    assert result["blocks"] == json.loads(before)["blocks"]
    line = next(line for line in result["lines"] if line["id"] == "ab.prefill.64")
    assert (line["limit"], line["verdict"]) == (">= 1e+09", "fail")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = ", "is not TOML"),
        ("[ratio]\nprefill_ratio = 1\n", "ratio.prefill_ratio"),
        ("[ratio]\nprefill_ratio_min = 'fast'\n", "ratio.prefill_ratio_min"),
        ("confidence = 95\n", "confidence"),
        ("[question.a5]\n", "question"),
    ],
)
def test_a_wrong_thresholds_file(qualify, tmp_path, text, message):
    path = tmp_path / "limits.toml"
    path.write_text(text)
    done = qualify("run", "http://127.0.0.1:1", "--thresholds", str(path))
    assert done.code == 2
    assert message in done.err
    assert str(path) in done.err


def test_the_shipped_thresholds_are_the_documented_defaults_and_load():
    from b12x_overlay.qualify.settings import DEFAULT_THRESHOLDS, Thresholds, load_thresholds

    def ratios(prefill: float, decode: float, needle: float) -> dict[str, float]:
        return {
            "prefill_ratio_min": prefill,
            "decode_ratio_min": decode,
            "accepted_ratio_min": 0.95,
            "needle_difference_min": needle,
        }

    loaded = load_thresholds(DEFAULT_THRESHOLDS)
    assert loaded.model_dump() == {
        "confidence": 0.95,
        "single": {
            "prefill_tok_s_min": {},
            "decode_tok_s_min": {},
            "accepted_per_step_min": None,
            "needle_exact_min": 0.97,
        },
        "ratio": ratios(0.97, 0.97, -0.02),
        "guard": {
            "degenerate_max": 0,
            "faults_max": 0,
            "loop_cycles": 4,
            "loop_characters": 512,
        },
        "question": {
            "a4": ratios(1.10, 0.97, -0.02),
            "csf": ratios(0.95, 0.95, -0.01),
            "prefetch": ratios(1.00, 0.98, -0.01),
        },
    }
    # A file that leaves something out gets the same value.
    assert Thresholds() == loaded.model_copy(update={"question": {}})
    for part in (
        Thresholds,
        *(type(getattr(loaded, name)) for name in ("single", "ratio", "guard")),
    ):
        assert all(field.description for field in part.model_fields.values())


def test_help_names_every_command_and_exit_code(capsys):
    def text(*arguments: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        assert end.value.code == 0
        return capsys.readouterr().out

    for command in ("run", "ab", "compare", "report", "schema", "needle-task"):
        assert command in text("--help")
        assert text(command, "--help")
    assert re.search(r"130\s+interrupted", text("--help"))
