"""Report, site, documentation and playground in a real headless Chromium: they react, and they fetch nothing."""

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
from torch import nn

import mcbn
from mcbn import networks
from mcbn.page import write_page
from mcbn_study.playground.server import Playground
from mcbn_study.site import write as site

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install 'mcbn[test]'")
pytestmark = pytest.mark.slow

CHROMIUM = os.environ.get("MCBN_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
RESULTS = Path(__file__).resolve().parents[1] / "results"
EVIL = "<script>window.hacked = 1</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator["playwright.Browser"]:
    if not CHROMIUM:
        pytest.skip("chromium is not installed: apt-get install chromium, or name it in MCBN_CHROMIUM")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


class Watched:
    """A page with all it complained about and all it asked for beyond itself."""

    def __init__(self, browser: "playwright.Browser", **options) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.trouble: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.trouble.append(message.text))
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))


@pytest.fixture
def watch(browser) -> Iterator:
    opened: list[Watched] = []

    def start(address: str, width: int = 1200, scheme: str = "light") -> Watched:
        opened.append(Watched(browser, viewport={"width": width, "height": 900}, color_scheme=scheme))
        opened[-1].page.goto(address)
        return opened[-1]

    yield start
    for one in opened:
        one.context.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> str:
    x = torch.randn(300, 3, generator=torch.Generator().manual_seed(0))
    y = x[:, 0] * 2 + 0.3 * x[:, 1].square() + torch.randn(300, generator=torch.Generator().manual_seed(1))
    network = networks.Standardized(networks.RegressionMLP(3, (20,), seed=0), x[:200], y[:200])
    networks.train_regression(network, x[:200], y[:200], epochs=20)
    bayes = mcbn.MCBN(network, "regression").fit(x[:200], n_samples=30, batch_size=16).tune((x[:200], y[:200]))
    path = tmp_path_factory.mktemp("page") / "report.html"
    return write_page(path, bayes, x[200:], y[200:], train=x[:200], names=["a", EVIL, "c"], title=EVIL).as_uri()


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_report_opens_without_an_error_or_a_request(report, watch, width, scheme):
    seen = watch(report, width, scheme)
    assert seen.page.locator("[data-chart] .plot > svg").count() == 5
    assert seen.trouble == []
    assert [url for url in seen.requests if url != report and not url.startswith("data:")] == []
    assert seen.page.evaluate("window.hacked") is None
    assert seen.page.locator("h1").inner_text() == EVIL
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width  # nothing sticks out sideways


@pytest.fixture(scope="module")
def maps(tmp_path_factory) -> str:
    """The report of a segmentation."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None), nn.ReLU(), nn.Conv2d(4, 3, 1)]
    network = nn.Sequential(*body)
    x = torch.randn(12, 3, 24, 32, generator=torch.Generator().manual_seed(0))
    network.train()(x)
    bayes = mcbn.MCBN(network.eval(), "classification").fit(x, n_samples=10, batch_size=6)
    path = tmp_path_factory.mktemp("maps") / "report.html"
    y = bayes.plain(x).argmax(1).roll(3, 2)
    return write_page(path, bayes, x, y, train=x, ignore_index=2, classes=["sky", EVIL, "void"]).as_uri()


@pytest.mark.parametrize(("width", "scheme"), [(1200, "dark"), (390, "light")])
def test_report_of_maps_fits_and_names_its_pictures(maps, watch, width, scheme):
    seen = watch(maps, width, scheme)
    assert seen.trouble == []
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    assert seen.page.locator(".tile img").count() == 2 * 6 * 4
    assert all(seen.page.locator(".tile img").nth(i).get_attribute("alt") for i in range(4))
    assert {"sky", EVIL, "left out"} <= set(seen.page.locator(".colors li").all_inner_texts())
    sizes = seen.page.locator(".tile img").evaluate_all("all => all.map(i => i.getBoundingClientRect().width)")
    assert min(sizes) > 60
    assert seen.page.evaluate("window.hacked") is None


def test_plot_reacts_to_hover_and_keys(report, watch):
    page = watch(report).page
    chart = page.locator("[data-chart=errors]")
    tip = chart.locator(".tip")
    assert tip.is_hidden()
    chart.locator(".plot > svg").hover(position={"x": 400, "y": 150})
    assert re.match(r"input \d+, std [\d.]+", tip.inner_text())
    first = tip.inner_text()
    chart.locator(".plot > svg").hover(position={"x": 900, "y": 150})
    assert tip.inner_text() != first
    page.mouse.move(1, 1)
    assert tip.is_hidden()
    chart.locator(".plot > svg").focus()
    page.keyboard.press("End")
    last = chart.locator(".spoken").inner_text()
    page.keyboard.press("ArrowLeft")
    assert "absolute error" in chart.locator(".spoken").inner_text() != last
    page.keyboard.press("Escape")
    assert tip.is_hidden()


def test_legend_clicks_hide_and_show_a_series(report, watch):
    chart = watch(report).page.locator("[data-chart=errors]")
    button = chart.get_by_role("button", name="absolute error")
    assert chart.locator("path.dots").count() == 1
    button.click()
    assert chart.locator("path.dots").count() == 0
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    assert chart.locator("path.dots").count() == 1


def test_table_sorts_by_its_numbers_both_ways(report, watch):
    page = watch(report).page
    table = page.locator("table.sortable", has_text="|error|").first  # the least certain inputs
    heading = table.locator("thead button", has_text="|error|")

    def column() -> list[float]:
        return [float(text) for text in table.locator("tbody td:nth-child(5)").all_inner_texts()]

    before = column()
    heading.click()
    assert column() == sorted(before)
    heading.focus()
    page.keyboard.press("Enter")
    assert column() == sorted(before, reverse=True)
    assert table.locator("th[aria-sort=descending]").count() == 1


def test_theme_button_turns_the_page_dark_and_print_is_light(report, watch):
    page = watch(report).page
    color = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(color)
    page.locator("#theme").click()
    assert page.evaluate(color) != light
    page.emulate_media(media="print")
    assert page.evaluate(color) == light
    assert page.locator("#theme").is_hidden()


def test_site_opens_without_an_error_and_its_links_work(watch, tmp_path: Path):
    index = site.report(RESULTS, tmp_path / "site")
    seen = watch(index.as_uri(), 390)
    for name in seen.page.locator("nav a").all_inner_texts():
        seen.page.locator("nav").get_by_role("link", name=name, exact=True).click()
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 390, name
    assert seen.trouble == []
    assert all(url.startswith((index.parent.as_uri(), "data:")) for url in seen.requests)


@pytest.fixture
def playground() -> Iterator[str]:
    with Playground() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server.address
        server.shutdown()
        thread.join()


def band(page) -> str | None:
    return page.locator("#chart-mcbn path.band").first.get_attribute("d")


def test_playground_click_adds_a_point_and_the_bands_change_within_two_seconds(playground, watch):
    seen = watch(playground)
    page = seen.page
    page.locator('body[data-answered="0"]').wait_for()
    before, started = band(page), time.perf_counter()
    page.locator("#chart-mcbn .plot > svg").click(position={"x": 330, "y": 60})
    page.locator('body[data-answered="1"]').wait_for(timeout=10_000)
    seconds = time.perf_counter() - started
    assert band(page) != before
    assert page.locator("#status").inner_text().startswith("41 points")
    assert seconds < 2
    assert seen.trouble == []
    assert all(url.startswith(playground) or url == "data:," for url in seen.requests)


def test_playground_sliders_and_buttons_change_what_is_shown(playground, watch):
    page = watch(playground, 390, "dark").page
    page.locator('body[data-answered="0"]').wait_for()
    page.locator("#tau").fill("0")  # 10^0
    page.locator('body[data-answered="1"]').wait_for()
    assert page.locator("#tau-value").inner_text() == "1.00"
    assert not page.locator("#tune").is_checked()
    page.locator("#batch-size").fill("4")
    page.locator('body[data-answered="2"]').wait_for()
    assert page.locator("#batch-size-value").inner_text() == "4"
    page.get_by_role("button", name="Remove all points").click()
    page.get_by_text("add two points or more").wait_for()
    for x in ("1", "2"):
        page.locator("#new-x").fill(x)
        page.get_by_role("button", name="Add point").click()
    page.locator('body[data-answered="5"]').wait_for()
    assert page.locator("#status").inner_text().startswith("2 points")


@pytest.fixture(scope="module")
def undecided(tmp_path_factory) -> str:
    """The report of a network that knows nothing: every entropy is log 3 to five digits."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    network.train()(x)
    network[3].weight.data.mul_(1e-5)
    network[3].bias.data.zero_()
    bayes = mcbn.MCBN(network.eval(), "classification").fit(x, n_samples=10, batch_size=16)
    path = tmp_path_factory.mktemp("undecided") / "report.html"
    return write_page(path, bayes, x, (x[:, 0] > 0).long()).as_uri()


def test_every_tick_can_be_told_from_the_next(undecided, report, watch):
    for address in (undecided, report):
        page = watch(address).page
        for plot in page.locator(".plot > svg").all():
            for side in ("end", "middle"):  # of the values, and of what is below
                labels = plot.locator(f"text[text-anchor={side}]").all_text_contents()
                assert len(set(labels)) == len(labels) > 1, labels
    bars = watch(undecided).page.locator("[data-chart=histogram] path.bars").first.get_attribute("d")
    assert "NaN" not in bars
    assert bars


def test_scores_fit_a_telephone_and_wider_tables_keep_their_first_column(report, watch):
    page = watch(report, 390).page
    scores, examples = page.locator(".scroll").first, page.locator(".scroll", has_text="|error|").first
    assert scores.evaluate("e => e.scrollWidth <= e.clientWidth")
    examples.evaluate("e => { e.scrollLeft = 200; }")
    assert examples.locator("td").first.evaluate("e => e.getBoundingClientRect().left") == pytest.approx(14, abs=1)


@pytest.fixture(scope="module")
def documentation(tmp_path_factory) -> Iterator[tuple[Path, str]]:
    """The documentation, built and served: its folder and its address."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("documentation") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=RESULTS.parent, check=True, capture_output=True)
    handler = partial(QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None: ...


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_every_page_of_the_documentation_fits_and_its_links_work(documentation, watch, width, scheme):
    folder, address = documentation
    seen = watch(address, width, scheme)
    for path in sorted(folder.rglob("index.html")):
        place = path.parent.relative_to(folder)
        assert seen.page.goto(f"{address}/{place}/").ok
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width, f"{place} sticks out sideways"
        for link in seen.page.eval_on_selector_all("a[href], img[src]", "all => all.map(one => one.href || one.src)"):
            if link.startswith(address):
                target = folder / unquote(link.removeprefix(address).split("#")[0].split("?")[0].strip("/"))
                assert (target / "index.html").exists() or target.is_file(), f"{place} leads to {link}"
    assert seen.trouble == []
    assert [url for url in seen.requests if not url.startswith((address, "data:", "blob:"))] == []
