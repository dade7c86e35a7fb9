"""The report in a real browser: nothing leaves the disk, sorting, light and dark, phones, labels and contrast.

Receives: the comparison of ``test_report``, and a chromium on this machine that playwright drives.
Gives: what a reader meets; where there is no browser, one skip that says what to install.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clipwise.cli import main
from clipwise.report import read, write_report
from test_report import FAST, comparison, data

NAMES = ("chromium", "chromium-browser", "google-chrome")
PROGRAM = next((found for name in NAMES if (found := shutil.which(name))), None)
if PROGRAM is None:
    pytest.skip("no browser: install Debian's package chromium to test the page in one", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright to test the page in a browser")

Open = Callable[..., Any]
PHONE, DESKTOP = 360, 1280
PATIENCE = 300_000  # milliseconds: a busy machine is no failure


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:  # CI runs as root, which a sandbox does not
        opened = started.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"], timeout=PATIENCE)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def compared(base: Path) -> Path:
    return comparison(base) / "report.html"


@pytest.fixture(scope="module")
def crowded(base: Path) -> Path:
    """Twelve runs with long names, one of them hostile: more than there are colours."""
    folder = base / "crowded"
    if not folder.exists():
        for number, letter in enumerate("abcdefghijkl"):
            name = "<img src=x onerror=alert(1)>" if letter == "a" else f"a-run-with-a-very-long-name-{letter * 12}"
            shutil.copytree(comparison(base) / ("1-flat", "6-layerwise")[number % 2], folder / name)
        write_report(read([folder]), folder)
    return folder / "report.html"


@pytest.fixture(scope="module")
def spelt(base: Path) -> Path:
    """Runs whose data has a long name without a space, as that of a csv file with its columns."""
    folder = base / "spelt"
    if not folder.exists():
        shutil.copytree(comparison(base), folder)
        name = "csv:people.csv?label=work:office|farm&columns=" + ",".join(f"column{n}:0..100" for n in range(9))
        for place in folder.glob("*/settings.toml"):
            place.write_text(re.sub(r"(?m)^data = .*$", f"data = {json.dumps(name)}", place.read_text()))
        write_report(read([folder]), folder)
    return folder / "report.html"


@pytest.fixture(scope="module")
def advice(base: Path) -> Path:
    folder = base / "advice"
    if not folder.exists():
        words = ["advise", "--data", data(base), "--public", data(base), "--model", "mlp(hidden=8)", *FAST[:8]]
        assert main([*words, "--steps", "5", "--warm-up", "2", "--folder", str(folder)]) == 0
    return folder / "advice.html"


@pytest.fixture
def shown(browser: Any) -> Iterator[Open]:
    """(file, width, scheme) → the page, once it is there; whatever it asked for and complained of is kept on it."""
    contexts = []

    def opened(file: Path, width: int = DESKTOP, scheme: str = "light") -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme))
        contexts[-1].set_default_timeout(PATIENCE)
        page = contexts[-1].new_page()
        page.asked, page.complaints = [], []
        page.on("request", lambda request: page.asked.append(request.url))
        page.on("console", lambda message: page.complaints.append(message.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (page.complaints.append(dialog.message), dialog.dismiss()))
        page.goto(file.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()


@pytest.mark.parametrize("which", ["compared", "crowded", "advice"])
def test_the_page_asks_for_nothing_but_itself_and_has_no_complaints(
    which: str, shown: Open, request: pytest.FixtureRequest
) -> None:
    file = request.getfixturevalue(which)
    page = shown(file)
    page.wait_for_load_state("networkidle")
    assert page.asked == [file.as_uri()]
    assert page.complaints == []
    assert page.locator("img").count() == 0, "a name was taken for markup"


# sorting


def order(page: Any, title: str) -> list[str]:
    """The values of a column as they stand, from above."""
    column = page.locator("#runs thead th button").all_inner_texts().index(title)
    return page.evaluate("c => [...document.querySelectorAll('#runs tbody tr')].map(r => r.cells[c].dataset.v)", column)


def test_a_click_on_a_columns_title_sorts_by_it_and_another_one_turns_it_round(shown: Open, compared: Path) -> None:
    page = shown(compared)
    for title in page.locator("#runs thead th button").all_inner_texts():
        button = page.get_by_role("button", name=title, exact=True)
        for turned, said in ((False, "ascending"), (True, "descending")):
            button.click()
            found = order(page, title)
            known = [value for value in found if value != ""]
            key = (lambda value: value.lower()) if title == "method" else float
            assert known == sorted(known, key=key, reverse=turned), title
            assert found == known + [""] * (len(found) - len(known)), "what nobody measured comes last"
            assert button.locator("..").get_attribute("aria-sort") == said
        assert page.locator("#runs thead [aria-sort=ascending], #runs thead [aria-sort=descending]").count() == 1


@pytest.mark.parametrize("key", ["Enter", "Space"])
def test_the_keyboard_sorts_too(key: str, shown: Open, compared: Path) -> None:
    page = shown(compared)
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.innerText") == "accuracy":
            break
    assert page.evaluate("document.activeElement.innerText") == "accuracy", "the title can be reached by Tab"
    page.keyboard.press(key)
    values = [float(value) for value in order(page, "accuracy")]
    assert values == sorted(values) and len(set(values)) > 1


def test_a_rows_name_opens_that_runs_statement(shown: Open, compared: Path) -> None:
    page = shown(compared)
    assert page.locator("details[open]").count() == 0
    page.locator("#runs tbody a").nth(2).click()
    page.locator("details[open]").first.wait_for()  # it opens when the page's address has changed, a moment later
    (opened,) = page.locator("details[open]").all()
    assert opened.get_attribute("id") == "run-2" and "differentially private" in opened.inner_text()


def test_pointing_at_a_run_fades_the_others(shown: Open, compared: Path) -> None:
    page = shown(compared)
    page.locator("#runs tbody tr").nth(1).hover()
    others = "[...document.querySelectorAll('#bias .s[data-run]')].filter(g => g.dataset.run !== '1')"
    # they fade in a moment, and later on a busy machine
    page.wait_for_function(f"{others}.every(g => getComputedStyle(g).opacity === '0.14')")
    clear = page.evaluate(
        "[...document.querySelectorAll('#bias .s[data-run]')].map(g => [g.dataset.run, getComputedStyle(g).opacity])"
    )
    assert {run for run, opacity in clear if opacity == "1"} == {"1"}
    assert {opacity for run, opacity in clear if run != "1"} == {"0.14"}


# light and dark


def paper(page: Any) -> str:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


LIGHT, DARK = "rgb(247, 247, 244)", "rgb(17, 17, 16)"


def test_the_page_follows_the_readers_scheme_until_the_button_says_otherwise(shown: Open, compared: Path) -> None:
    for scheme, begins, turned in (("light", LIGHT, DARK), ("dark", DARK, LIGHT)):
        page = shown(compared, scheme=scheme)
        assert paper(page) == begins
        button = page.get_by_role("button", name="Switch between light and dark")
        button.click()
        assert paper(page) == turned
        page.reload()
        assert paper(page) == turned, "the choice is kept"
        page.get_by_role("button", name="Switch between light and dark").press("Enter")
        assert paper(page) == begins


CONTRAST = """() => {
  const rgb = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const lum = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const at = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || at.closest('script,style,title')) continue;
    const style = getComputedStyle(at), ink = rgb(at.closest('svg') ? style.fill : style.color);
    let under = at, behind = [0, 0, 0, 0];
    while (under && !(behind.length === 3 || behind[3] === 1)) {
      behind = rgb(getComputedStyle(under).backgroundColor); under = under.parentElement }
    const [high, low] = [lum(ink), lum(behind)].sort((a, b) => b - a);
    found.push([(high + 0.05) / (low + 0.05), walk.currentNode.data.trim().slice(0, 30)]);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("which", ["compared", "advice"])
def test_all_text_has_a_contrast_of_four_and_a_half(
    which: str, scheme: str, shown: Open, request: pytest.FixtureRequest
) -> None:
    page = shown(request.getfixturevalue(which), scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    found = page.evaluate(CONTRAST)
    assert len(found) > 50
    assert [(ratio, text) for ratio, text in found if ratio < 4.5] == []


# phones


@pytest.mark.parametrize("which", ["compared", "crowded", "spelt", "advice"])
@pytest.mark.parametrize("width", [PHONE, 390, 768, DESKTOP])
def test_the_page_never_scrolls_sideways(which: str, width: int, shown: Open, request: pytest.FixtureRequest) -> None:
    page = shown(request.getfixturevalue(which), width)
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    beyond = page.evaluate(
        "[...document.querySelectorAll('svg text, h1, h2, h3, p, summary')].filter(each => "
        "each.getBoundingClientRect().right > innerWidth || each.getBoundingClientRect().left < 0)"
        ".map(each => each.textContent)"
    )
    assert beyond == []


def test_on_a_phone_the_table_scrolls_by_itself_and_keeps_the_names(shown: Open, compared: Path) -> None:
    page = shown(compared, PHONE)
    page.evaluate("document.querySelector('.scroll').scrollLeft = 1000")
    left, inside = page.evaluate(
        "[document.querySelector('#runs tbody th').getBoundingClientRect().left, "
        "document.querySelector('.scroll').scrollLeft]"
    )
    assert inside > 100 and 0 <= left < 40


def test_on_a_phone_a_methods_name_stands_beside_its_dot_and_is_cut_between_words(
    shown: Open, base: Path, tmp_path: Path
) -> None:
    for name in ("inner_momentum", "momentum_per_sample", "self_augmentation"):
        shutil.copytree(comparison(base) / "1-flat", tmp_path / name)
        statement = tmp_path / name / "statement.json"
        statement.write_text(re.sub(r'"flat\(.*?"', f'"{name}"', statement.read_text()))
    write_report(read([tmp_path]), tmp_path)
    lines = shown(tmp_path / "report.html", PHONE).evaluate(
        """[...document.querySelectorAll('#runs tbody th')].map(each => {
          const text = each.querySelector('a').firstChild, range = document.createRange();
          range.setStart(text, 0), range.setEnd(text, text.length);
          const tops = [...range.getClientRects()].filter(each => each.width).map(each => each.top);
          return [tops[0] < each.querySelector('.swatch').getBoundingClientRect().bottom, tops.length, text.data];
        })"""
    )
    assert [line[:2] for line in lines] == [[True, 1]] * 3, lines  # the first word, whole


OVERLAPS = """() => [...document.querySelectorAll('svg')].flatMap(svg => {
  const boxes = [...svg.querySelectorAll('text')].map(each => [each, each.getBoundingClientRect()]);
  return boxes.flatMap(([one, a], i) => boxes.slice(i + 1).filter(([other, b]) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1.5 &&
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 0.35 * Math.min(a.height, b.height)
  ).map(([other]) => [one.firstChild.data, other.firstChild.data, svg.getAttribute('aria-label')]))
})"""


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("which", ["compared", "advice"])
def test_no_text_of_a_chart_lies_on_another(
    which: str, width: int, shown: Open, request: pytest.FixtureRequest
) -> None:
    page = shown(request.getfixturevalue(which), width)
    assert page.evaluate(OVERLAPS) == []


# those who do not see the page


@pytest.mark.parametrize("which", ["compared", "crowded", "advice"])
def test_every_chart_control_and_heading_has_a_label(which: str, shown: Open, request: pytest.FixtureRequest) -> None:
    page = shown(request.getfixturevalue(which))
    assert page.locator("html").get_attribute("lang") == "en" and page.title()
    charts = page.evaluate("[...document.querySelectorAll('svg')].map(s => [s.getAttribute('role'), s.ariaLabel])")
    assert charts and all(role == "img" and label and len(label) > 5 for role, label in charts)
    named = "[...document.querySelectorAll('button, summary, a, [tabindex]')]"
    unnamed = page.evaluate(f"{named}.filter(each => !(each.ariaLabel || each.textContent.trim())).length")
    assert unnamed == 0
    levels = [int(tag[1]) for tag in page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(h => h.tagName)")]
    assert levels[0] == 1 and levels.count(1) == 1
    assert page.evaluate("[...document.querySelectorAll('th')].every(th => ['col', 'row'].includes(th.scope))")


def test_a_chart_says_in_words_where_its_lines_end(shown: Open, compared: Path) -> None:
    page = shown(compared)
    label = page.locator("#quality svg").get_attribute("aria-label")
    runs = json.loads((compared.parent / "report.json").read_text())["runs"]
    for run in runs:
        assert f"{run['name']} {run['accuracy']:.3g}" in label


def test_what_is_reached_by_tab_shows_where_it_is(shown: Open, compared: Path) -> None:
    page = shown(compared)
    for _ in range(6):
        page.keyboard.press("Tab")
        width = page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
        assert float(re.sub("px", "", width)) >= 2


def test_twelve_runs_in_eight_colours_are_told_apart_by_dashes(shown: Open, crowded: Path) -> None:
    page = shown(crowded)
    styles = page.evaluate(
        "[...document.querySelectorAll('#bias .s > polyline:not(.lead)')]"
        ".map(line => [getComputedStyle(line).stroke, line.getAttribute('stroke-dasharray')])"
    )
    assert len(styles) == 12
    assert all(one != other for one, other in itertools.combinations(map(tuple, styles), 2))
