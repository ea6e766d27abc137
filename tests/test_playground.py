"""The playground: its numbers, its command line, and its page in a headless Chromium."""

import contextlib
import html
import json
import re
import shutil
import socket
import subprocess

import pytest
import torch
from conftest import ROOT, TINY, command, model_snapshot, start, wait_until

import playground
from engine.config.arguments import parse
from engine.errors import UserError
from playground import PlaygroundConfig, find_snapshots
from sample import SampleConfig

LETTERS = "\n abcdefghijklmnopqrstuvwxyz<>&{}$`"


@pytest.fixture(params=["gpt2", "modern"])
def small(request, tmp_path):
    """The path of a small model's snapshot; its block is 24."""
    path = tmp_path / "small.pt"
    path.write_bytes(model_snapshot(LETTERS, request.param).to_bytes())
    return str(path)


def made(path, prompt="the cat", length=40, **settings):
    config = SampleConfig(prompt=prompt, max_new_tokens=length, **settings)
    text, ids = playground.start(path, config)
    text.ids += list(ids)
    return text


# --- what it computes ---


def test_what_is_streamed_is_what_generate_makes_also_past_the_block(small):
    model = playground.read(small)[0]
    text = made(small, temperature=0)
    prompt = torch.tensor([text.ids[: text.start]])
    assert text.ids == model.generate(prompt, 40)[0].tolist() and len(text.ids) == 47
    settings = {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "seed": 3}
    drawn = model.generate(prompt, 40, do_sample=True, **settings)[0].tolist()
    assert made(small, **settings).ids == drawn != text.ids


@pytest.mark.parametrize("at", [1, 7, 24, 46])
def test_a_look_has_the_probabilities_and_the_attention_of_a_character(small, at):
    text = made(small, temperature=0.5)
    model = playground.read(small)[0]
    alternatives, weights = playground.look(text, at, 2, 3)
    context = torch.tensor([text.ids[max(0, at - 24) : at]])
    expected = (model(context)[0][0, -1] / 0.5).softmax(dim=-1)
    assert len(alternatives) == 10 and len(weights) == context.size(1)
    for character, probability in alternatives:
        assert probability == pytest.approx(expected[LETTERS.index(character)].item(), abs=1e-5)
    assert alternatives[0][1] == pytest.approx(expected.max().item(), abs=1e-5)
    assert alternatives == sorted(alternatives, key=lambda pair: -pair[1])
    assert sum(weights) == pytest.approx(1, abs=1e-5)


def test_html_says_the_text_and_no_more(small):
    text = made(small, "<b>a &amp\n{{b}} ${a}`")
    for shown in (playground.draft(text), playground.show(text, 5)):
        assert html.unescape(re.sub("</?span[^>]*>", "", shown)) == str(text)
    assert "{{" not in playground.draft(text) and "<b>" not in playground.show_look(text, 9, 1, 1)


@pytest.mark.parametrize(
    "act, says",
    [
        (lambda path: made(path, ""), "prompt is empty"),
        (lambda path: made(path, "a漢"), "prompt: character '漢'"),
        (lambda path: made(path, "a" * 2001), "a prompt of 2001 .* at most 2000"),
        (lambda path: made(path, "a", 2001), "max_new_tokens=2001: .* at most 2000"),
        (lambda path: playground.look(made(path), 0, 1, 1), "character=0: must be from 1 to 46"),
        (lambda path: playground.look(made(path), 47, 1, 1), "character=47: must be from 1 to"),
        (lambda path: playground.look(made(path), 9, 3, 1), "layer=3: must be from 1 to 2"),
        (lambda path: playground.look(made(path), 9, 1, None), "head=None: must be from 1 to 4"),
    ],
)
def test_what_cannot_be_shown_is_said(small, act, says):
    with pytest.raises(UserError, match=says):
        act(small)


# --- the command line ---


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["prot=1"], "prot=1: not an argument; there are run_dir=, snapshots=, host=, port="),
        (["port=0"], "port=0: must be a number from 1 to 65535"),
        (["port=x"], "port: Value 'x' of type"),
        (["run_dir=a", "snapshots=[b]"], "run_dir and snapshots: give one of them"),
    ],
)
def test_a_bad_argument_is_refused(arguments, says):
    with pytest.raises(UserError, match=re.escape(says)):
        parse(PlaygroundConfig, arguments)


def test_the_given_snapshots_come_first_and_every_run_is_offered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run in ("a", "b"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "gpt_snapshot.pt").touch()
        (tmp_path / "runs" / run / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "runs" / "a" / "gpt_snapshot.best.pt").touch()
    config = parse(PlaygroundConfig, ["snapshots=[x.pt, y.pt]"])
    given = config.named()
    assert given == ["x.pt", "y.pt"]
    found = find_snapshots(config)
    runs = {"runs/a/gpt_snapshot.best.pt", "runs/b/gpt_snapshot.pt"}
    assert found[:2] == given and set(found[2:]) == runs and len(found) == 4
    assert find_snapshots(PlaygroundConfig(run_dir="runs/a"))[0] == "runs/a/gpt_snapshot.best.pt"


def test_a_missing_gradio_and_a_missing_snapshot_are_one_line(tmp_path):
    (tmp_path / "small.pt").write_bytes(model_snapshot(LETTERS).to_bytes())
    (tmp_path / "gradio.py").write_text("raise ImportError('not installed')")
    result = start(
        f"snapshots={tmp_path}/small.pt", script="playground.py", env={"PYTHONPATH": str(tmp_path)}
    )
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1
    assert "pip install -r requirements-playground.txt" in result.stderr
    result = start("snapshots=nowhere.pt", script="playground.py")
    assert (result.returncode, result.stderr) == (1, "error: nowhere.pt: no such snapshot\n")


@pytest.mark.slow
def test_a_port_that_is_taken_is_one_line(tmp_path):
    pytest.importorskip("gradio", reason="needs requirements-playground.txt")
    (tmp_path / "small.pt").write_bytes(model_snapshot(LETTERS).to_bytes())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = start(f"snapshots={tmp_path}/small.pt", f"port={port}", script="playground.py")
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1, result.stderr
    assert f"port={port}" in result.stderr


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_that_is_not_of_this_machine_is_one_line_at_once(host):
    result = start(f"host={host}", script="playground.py")
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1, result.stderr
    assert result.stderr.startswith(f"error: host={host}: cannot listen there: ")


# --- the page ---


@pytest.fixture(scope="module")
def browser():
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("there is no Chromium with its driver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a playground with a trained snapshot and another, and its output so far."""
    pytest.importorskip("gradio", reason="needs requirements-playground.txt")
    folder = tmp_path_factory.mktemp("playground")
    assert start(*TINY, f"run_dir={folder / 'run'}").returncode == 0
    other = folder / "other.pt"
    other.write_bytes(model_snapshot(LETTERS, "modern").to_bytes())
    log = folder / "log"
    arguments = f"snapshots=[{folder / 'run' / 'gpt_snapshot.pt'},{other}]"
    with (
        log.open("w") as output,
        subprocess.Popen(
            command(arguments, script="playground.py"), cwd=ROOT, stdout=output, stderr=output
        ) as process,
    ):
        try:
            wait_until(lambda: "playground at" in log.read_text(), process, 120)
            yield re.search(r"http://\S+", log.read_text())[0], log
        finally:
            process.kill()


class Page:
    """What a person does with the page, and sees of it."""

    def __init__(self, browser, url):
        self.browser = browser
        browser.get(url)
        # Both panels: one that is made ready later is emptied.
        self.wait(lambda: ["held-out loss" in e.text for e in self.all("small")] == [True, True])

    def all(self, selector):
        return self.browser.find_elements("css selector", selector)

    def wait(self, true, patience=60):
        from selenium.common.exceptions import StaleElementReferenceException as Stale
        from selenium.webdriver.support.ui import WebDriverWait

        ignored = (Stale,)  # redrawn between finding and reading it
        return WebDriverWait(self.browser, patience, 0.1, ignored).until(lambda _: true())

    def set(self, label, value):
        from selenium.webdriver.common.keys import Keys

        box = self.browser.find_element("css selector", f"{label}")
        box.send_keys(Keys.CONTROL, "a")
        box.send_keys(value or Keys.BACKSPACE, *([Keys.TAB] * bool(value)))

    def press(self, words):
        next(b for b in self.all("button") if b.text == words).click()

    def texts(self):
        return [e.get_property("textContent").strip() for e in self.all(".clickable")]

    def generate(self, prompt):
        self.set("textarea", prompt)
        self.press("Generate")

    def finished(self, prompt, length):
        """Waits for both texts, as they are when characters can be clicked; returns them."""
        pairs = self.wait(
            lambda: (
                [
                    e.get_property("textContent").strip("\n")
                    for e in self.all(".clickable")
                    if len(e.find_elements("css selector", "[data-at]")) == len(prompt) + length - 1
                ][1:]
                and self.texts()
            )
        )
        assert all(text.startswith(prompt) for text in pairs)
        return pairs


def test_a_person_generates_looks_and_is_told_what_is_wrong(browser, server):
    url, log = server
    page = Page(browser, url)
    page.set("input[aria-label^='number input for characters']", "30.5")
    page.generate("the ")
    page.finished("the ", 30)
    page.wait(lambda: len(page.all(".alternatives")) == 2)

    page.all(".clickable [data-at='20']")[0].click()
    page.wait(lambda: page.all(".inspection p")[0].text.startswith("Character 20"))
    assert len(page.all(".alternatives")[0].find_elements("css selector", "tr")) == 10
    shaded = page.all(".attention")[0].find_elements("css selector", "[style*='background']")
    assert len(shaded) == 16  # the block
    assert page.all(".clickable .picked")[0].get_attribute("data-at") == "20"
    assert page.all(".inspection p")[2].text.startswith("Character 4")  # the other's first

    for prompt, says in (("the 漢", "character '漢'"), ("", "prompt is empty")):
        page.generate(prompt)
        page.wait(lambda says=says: any(says in e.text for e in page.all(".toast-body")))
    page.set("input[aria-label^='seed']", "-1")
    page.generate("a")
    page.wait(lambda: any("seed=-1: must be" in e.text for e in page.all(".toast-body")))
    assert "Traceback" not in page.browser.page_source and "Traceback" not in log.read_text()


def test_stop_ends_a_text_that_can_then_be_looked_at(browser, server):
    page = Page(browser, server[0])
    page.set("input[aria-label^='number input for characters']", "2000")
    page.generate("the ")
    page.wait(lambda: len(page.texts()[0]) > 10)
    page.press("Stop")
    page.wait(lambda: page.all(".clickable [data-at]") and page.all(".alternatives"))
    assert len(page.texts()[0]) < 2000


def test_two_pages_at_once_both_get_their_text(browser, server):
    prompts = {browser.current_window_handle: "one "}
    browser.switch_to.new_window("tab")
    prompts[browser.current_window_handle] = "two "
    pages = {}
    for handle in prompts:
        browser.switch_to.window(handle)
        pages[handle] = Page(browser, server[0])
        pages[handle].set("input[aria-label^='number input for characters']", "60")
    for handle, prompt in prompts.items():
        browser.switch_to.window(handle)
        pages[handle].generate(prompt)
    for handle, prompt in prompts.items():
        browser.switch_to.window(handle)
        pages[handle].finished(prompt, 60)
    browser.close()
    browser.switch_to.window(next(iter(prompts)))


def test_on_a_phone_nothing_is_wider_than_the_screen_and_nothing_is_fetched_from_elsewhere(
    browser, server
):
    browser.get_log("performance")
    with contextlib.ExitStack() as after:
        phone = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
        after.callback(browser.execute_cdp_cmd, "Emulation.clearDeviceMetricsOverride", {})
        page = Page(browser, server[0])
        page.set("input[aria-label^='number input for characters']", "30")
        page.generate("the ")
        page.finished("the ", 30)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert len(asked) > 3
    assert [u for u in asked if not u.startswith((server[0], "data:", "blob:"))] == []
