"""The Space in a real browser: several visitors draw on one engine, one cancels, one leaves, one types nonsense."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from conftest import assert_pictures_equal

gradio = pytest.importorskip("gradio", reason="the Space needs the demo extra")
sync_api = pytest.importorskip("playwright.sync_api", reason="the browser test needs playwright")
expect = sync_api.expect

# Gradio sums up its calls with ways of pandas that pandas is giving up.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'future.no_silent_downcasting' is deprecated"),
    pytest.mark.filterwarnings("ignore:The copy keyword is deprecated"),
]

ROOT = Path(__file__).parents[1]
SCREENSHOTS = Path(os.environ.get("TEST_ARTIFACTS") or ROOT / "test-artifacts")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WAIT_MS = 90_000  # for what takes a second; never used up unless something is broken, however busy the machine is


@pytest.fixture(scope="module")
def space_app() -> Any:
    """The program as a module."""
    spec = importlib.util.spec_from_file_location("space_app", ROOT / "space_app.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["space_app"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's chromium."""
    if CHROMIUM is None:
        if os.environ.get("REQUIRE_BROWSER"):
            pytest.fail("REQUIRE_BROWSER is set and there is no chromium: apt-get install chromium")
        pytest.skip("there is no chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def space(browser: Any, space_app: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The Space on a free port, its address in `url`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    space = space_app.Space(space_app.load(None, None), tmp_path_factory.mktemp("pictures"), space_app.engine_config())
    with pytest.MonkeyPatch.context() as patch:
        # Gradio gives up when its page takes longer than 3 seconds, which it may beside other work.
        patch.setattr("gradio.networking.url_ok", lambda url: True)
        page = space_app.serve(space, "127.0.0.1", port, prevent_thread_lock=True)
    space.url = page.local_url
    yield space
    page.close(verbose=False)
    space.engine.stop(hard_stop=True)


class Visitor:
    """A browser window of somebody; collects what the browser complains about."""

    def __init__(self, browser: Any, url: str) -> None:
        self.complaints: list[str] = []
        self.page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self._check_address(request.url, url))
        self.page.goto(url)
        self.stage = self.page.locator("#stage")
        self.timeline = self.page.locator("#timeline")
        self.toast = self.page.get_by_test_id("toast-body")
        expect(self.page.locator("#generate")).to_be_visible(timeout=WAIT_MS)
        # Every preview that the page shows, however shortly.
        self.page.evaluate(
            """() => {
                window.previews = new Set();
                const look = () => document.querySelectorAll("#stage img.preview").forEach(i => previews.add(i.src));
                const changes = {attributes: true, childList: true, subtree: true};
                new MutationObserver(look).observe(document.querySelector("#stage"), changes);
            }"""
        )

    def _check_address(self, address: str, url: str) -> None:
        if not address.startswith((url, "data:", "blob:")):
            self.complaints.append(f"asked for {address}")

    def set(self, label: str, value: str) -> None:
        """Type into a field and leave it."""
        field = self.page.get_by_label(label, exact=True)
        field.fill(value)
        field.press("Tab")

    def generate(self) -> None:
        self.page.locator("#generate").click()

    def wait_for_preview(self) -> None:
        self.page.wait_for_function("previews.size > 0")

    def pictures(self) -> list[Image.Image]:
        """The finished pictures on the stage, from their files."""
        sources = [image.get_attribute("src") for image in self.stage.locator("img:not(.preview)").all()]
        files = [self.page.request.get(f"{self.page.url}{source}").body() for source in sources]
        return [Image.open(io.BytesIO(file)) for file in files]

    def screenshot(self, name: str) -> None:
        SCREENSHOTS.mkdir(exist_ok=True, parents=True)
        self.page.screenshot(path=SCREENSHOTS / f"space-{name}.png", full_page=True, animations="disabled")


@pytest.fixture
def visit(browser: Any, space: Any) -> Iterator[Callable[[], Visitor]]:
    """Opens windows, and at last looks whether the browser had anything to complain about."""
    visitors: list[Visitor] = []

    def open_window() -> Visitor:
        visitors.append(Visitor(browser, space.url))
        return visitors[-1]

    yield open_window
    complaints = [visitor.complaints for visitor in visitors]
    for visitor in visitors:
        visitor.page.context.close()
    assert complaints == [[]] * len(visitors)


def draws_alone(space: Any, prompt: str, steps: int, seed: int, **arguments: Any) -> Image.Image:
    """The pipeline's own picture."""
    return space.pipe(
        prompt, negative_prompt=" ", height=128, width=128, num_inference_steps=steps, seed=seed, **arguments
    ).images[0]


def test_two_visitors_draw_on_one_engine_at_the_same_time(visit, space):
    first, second = visit(), visit()
    first.set("Prompt", "a large white ring on a green background")
    first.page.get_by_label("VAE", exact=True).check()
    for visitor in (first, second):
        visitor.page.get_by_label("New each time").uncheck()
    first.set("Seed", "7")
    second.set("Seed", "11")
    with space.engine.pause():  # so that both are there before a step is taken
        first.generate()
        expect(first.stage).to_contain_text("number 1 in the queue", timeout=WAIT_MS)
        second.generate()
        expect(second.stage.get_by_text("in the queue")).to_have_count(2, timeout=WAIT_MS)
        expect(second.timeline).to_contain_text("under way: 3, waiting: 3", timeout=WAIT_MS)
        second.screenshot("queue")
    second.wait_for_preview()
    with space.engine.pause():
        second.screenshot("under-way")
    for visitor, count in ((first, 1), (second, 2)):
        expect(visitor.stage.locator("img:not(.preview)")).to_have_count(count, timeout=WAIT_MS)
        expect(visitor.stage).to_contain_text("drawn in")
        expect(visitor.page.locator("#gallery .thumbnail-item img")).to_have_count(count)
        assert visitor.page.evaluate("previews.size") >= 2
    expect(second.timeline).to_contain_text("under way: 0, waiting: 0", timeout=WAIT_MS)
    second.screenshot("two-decoders")

    together = [set(step.request_ids) for step in space.engine.stats().recent_steps if step.kind == "denoise"]
    assert max(map(len, together)) == 3

    (ring,) = first.pictures()
    star, large_star = second.pictures()
    assert (ring.size, star.size, large_star.size) == ((128, 128), (128, 128), (512, 512))
    assert (ring.text["prompt"], ring.text["seed"]) == ("a large white ring on a green background", "7")
    assert_pictures_equal(ring, draws_alone(space, ring.text["prompt"], 20, 7, decoder="vae"))
    assert_pictures_equal(star, draws_alone(space, "a red star on a blue background", 20, 11, decoder="vae"))


def test_cancel_ends_the_visitors_own_request(visit, space):
    visitor = visit()
    visitor.set("number input for Steps", "100")
    visitor.generate()
    visitor.wait_for_preview()
    visitor.page.locator("#cancel").click()
    expect(visitor.stage).to_contain_text("cancelled after step", timeout=WAIT_MS)
    expect(visitor.page.locator("#cancel")).to_be_disabled()
    visitor.screenshot("cancelled")
    stats = space.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)


def test_closing_the_page_takes_the_request_out_of_the_engine(visit, space):
    leaver, other = visit(), visit()
    with space.engine.pause():
        leaver.generate()
        expect(other.timeline).to_contain_text("under way: 2, waiting: 2", timeout=WAIT_MS)
        leaver.page.close()
        expect(other.timeline).to_contain_text("under way: 0, waiting: 0", timeout=WAIT_MS)


@pytest.mark.parametrize(
    ("label", "value", "message"),
    [
        ("Prompt", "  ", "The prompt is empty"),
        ("Size", "100x100", "multiple of 16 on both sides; the nearest sizes are 96x96 and 112x112"),
        ("Size", "4096x4096", "too large for this page: at most 256x256"),
        ("number input for Steps", "2", "2 of 2 steps left to PiD is too much: leave it 1 at most"),
        ("Seed", "", "The seed is empty"),
    ],
)
def test_nonsense_is_answered_in_plain_words(visit, space, label, value, message):
    visitor = visit()
    visitor.page.get_by_label("New each time").uncheck()
    visitor.set(label, value)
    visitor.generate()
    expect(visitor.toast).to_contain_text(message, timeout=WAIT_MS)
    expect(visitor.toast).to_have_css("opacity", "1")  # it fades in
    visitor.screenshot("refused")
    assert space.engine.stats().num_waiting == 0


def test_a_cold_start_tells_no_time_that_it_would_have_to_guess(space_app, tmp_path):
    space = space_app.Space(space_app.load(None, None), tmp_path, space_app.engine_config())
    order = {"negative_prompt": "", "size": "64x64", "steps": 2, "cfg": 1, "seed": 1, "decoder": "VAE"}

    def draw(deadline_s: float | None) -> tuple[str, str]:
        """What is said of a picture in the queue, and once it is there."""

        async def follow() -> tuple[str, str]:
            asked = space.check(prompt="a ring", early_stop_steps=0, deadline_s=deadline_s, priority=0, **order)
            with space.engine.pause():
                (drawing,) = space._begin(asked, space._open(asked), space.engine.clock())
                queued = space._standing(drawing)
            async for _ in space._follow([drawing]):
                pass
            return queued, space._standing(drawing)

        with ThreadPoolExecutor(1) as pool:  # playwright has an event loop in this thread
            return pool.submit(asyncio.run, follow()).result()

    try:
        queued, done = draw(None)
        assert queued == "number 1 in the queue"
        assert "after its deadline" not in done
        assert "after its deadline" in draw(1e-3)[1]
        draw(None)
        assert re.fullmatch(r"number 1 in the queue, about .* s left", draw(None)[0])
    finally:
        space.engine.stop(hard_stop=True)


def test_a_model_that_is_not_there_is_named(space_app, monkeypatch, capsys):
    monkeypatch.setenv("MODEL_ID", "/nowhere/at-all")
    assert space_app.main([]) == 1
    assert "MODEL_ID='/nowhere/at-all'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"), [("slo_scal=2", "did you mean 'slo_scale'"), ("slo_scale=2,calibration=no.json", "'no.json'")]
)
def test_an_engine_that_cannot_be_made_is_told_in_one_line(space_app, monkeypatch, capsys, options, words):
    monkeypatch.setenv("ENGINE_OPTIONS", options)
    assert space_app.main([]) == 1
    (message,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert words in message
