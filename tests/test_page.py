"""The page that runs a model: its file, and its computation in headless Chromium."""

import dataclasses
from pathlib import Path

import pytest
import torch
from conftest import ARCHITECTURES, model_snapshot

import export
from config import compose
from engine.errors import UserError
from engine.interop import page
from engine.kernels import ops
from engine.snapshots.snapshot import probe_logits
from model import rotary
from sample import load_model

LETTERS = "\n abcdefghijklmnopqrstuvwxyz<>&{}$`é漢"
BYTES = "".join(map(chr, range(256)))
HOSTILE = "</script><script>document.title = 'run'</script><!-- <b>&amp;"


def snapshot_of(name, vocabulary=LETTERS):
    snapshot = model_snapshot(vocabulary, **ARCHITECTURES[name])
    snapshot.config["run_name"] = f"{name} {HOSTILE}"
    return snapshot


def loaded(snapshot):
    """The model of a snapshot, with the weights that a page has."""
    weights = page.round_to_float16(snapshot.model_state)
    return load_model(dataclasses.replace(snapshot, model_state=weights), "cpu")


def write(tmp_path, *snapshots) -> list[str]:
    """Writes the snapshots, and a page of them; returns their paths."""
    paths = [str(tmp_path / f"{i}.pt") for i in range(len(snapshots))]
    for path, snapshot in zip(paths, snapshots, strict=True):
        Path(path).write_bytes(snapshot.to_bytes())
    export.main([f"page={tmp_path / 'page.html'}", f"snapshots=[{','.join(paths)}]"])
    return paths


def edited(monkeypatch):
    """A snapshot of an edited model, which differs from the 81st character on, and whose code is still there."""
    attend = ops.causal_attention

    def windowed(qkv, n_head, rotation, cache, pdrop):  # without the first character
        y = attend(qkv, n_head, rotation, cache, pdrop)
        return torch.cat((y[:, :80], attend(qkv[:, 1:], n_head, None, None, pdrop)[:, 79:]), dim=1)

    snapshot = model_snapshot(LETTERS, "modern", block_size=96)
    monkeypatch.setattr(ops, "causal_attention", windowed)
    snapshot.probe_logits = probe_logits(load_model(snapshot, "cpu"), "cpu")
    return snapshot


def test_a_model_whose_code_changed_since_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as changed:
        snapshot = edited(changed)
    with pytest.raises(UserError, match=r"0\.pt: model\.py gives different outputs"):
        write(tmp_path, snapshot)
    assert not (tmp_path / "page.html").exists()


def test_a_page_replaces_only_a_page(tmp_path):
    write(tmp_path, snapshot_of("gpt2"))
    [path] = write(tmp_path, snapshot_of("modern"))
    text = tmp_path / "notes.html"
    text.write_text("mine")
    with pytest.raises(UserError, match=r"page=.*notes\.html: already exists"):
        export.main([f"page={text}", f"snapshot={path}"])
    assert text.read_text() == "mine"


def test_the_page_of_the_default_recipe_is_small(tmp_path):
    recipe = compose(["experiment=shakespeare_cpu"])
    sizes = {name: recipe.model[name] for name in ("n_layer", "n_head", "n_embd", "token_shift", "ngram_rows")}
    vocabulary = LETTERS + "".join(map(chr, range(200, 226)))
    write(tmp_path, model_snapshot(vocabulary, recipe.model.arch, block_size=recipe.data.block_size, **sizes))
    assert (tmp_path / "page.html").stat().st_size < 8e6


# --- in a browser ---


class Page:
    """What a person does with the page, and sees of it."""

    def __init__(self, browser, path):
        self.browser = browser
        browser.get(path.as_uri())
        self.wait(lambda: set(self.texts(".status")) == {"Ready."})

    def all(self, selector):
        return self.browser.find_elements("css selector", selector)

    def texts(self, selector):
        return [e.get_property("textContent") for e in self.all(selector)]

    def wait(self, true):
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.browser, 60, 0.05).until(lambda _: true())

    def set(self, **values):
        for name, value in values.items():
            self.browser.execute_script("document.getElementById(arguments[0]).value = arguments[1]", name, str(value))

    def press(self, name):
        self.all(f"#{name}")[0].click()

    def ask(self, number, message, answer):
        """The worker's answer to a message of model `number`."""
        return self.browser.execute_async_script(
            "const [number, message, answer, done] = arguments;"
            "models[number].ask(message, {[answer]: done, failed: done});",
            *(number, message, answer),
        )


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The path of a page with a model of each architecture and one of bytes, and these models."""
    folder = tmp_path_factory.mktemp("page")
    snapshots = [snapshot_of(name) for name in ARCHITECTURES]
    of_bytes = snapshot_of("shifted", BYTES)
    of_bytes.config |= {"data": {"encoding": "bytes"}}
    write(folder, *snapshots, of_bytes)
    return folder / "page.html", snapshots


@torch.no_grad()
def last_attention(model, ids, layer, head):
    """Logits (V,) after `ids` (T,), and the weights (T,) with which a head attends from the last of them."""
    seen = []
    model.blocks[layer].attn.c_attn.register_forward_hook(lambda *given: seen.append(given[-1][0]))
    logits = model(ids[None])[0][0, -1]
    qk = seen[0].view(len(ids), 3, model.config.n_head, -1)[:, :2, head].transpose(0, 1)
    if model.config.arch == "modern":
        qk = ops.rms_norm(ops.rotate(qk, *rotary(len(ids), qk.size(2), ids.device)))
    query, keys = qk[0, -1], qk[1]
    return logits, (keys @ query / query.numel() ** 0.5).softmax(dim=0)


def test_a_page_computes_as_pytorch_and_shows_that(browser, served):
    path, snapshots = served
    opened = Page(browser, path)
    assert opened.texts(".status") == ["Ready."] * (len(ARCHITECTURES) + 1)
    fetched = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert not [name for name in fetched if not name.startswith(("blob:", "data:"))]
    for number, snapshot in enumerate(snapshots):
        model = loaded(snapshot)
        ids = torch.randint(len(LETTERS), (20,))
        looked = opened.ask(number, {"kind": "look", "ids": ids.tolist(), "layer": 1, "head": 2}, "looked")
        logits, attention = last_attention(model, ids, layer=1, head=2)
        assert looked["logits"] == pytest.approx(logits.tolist(), abs=1e-3)
        assert looked["weights"] == pytest.approx(attention.tolist(), abs=1e-3)


def test_greedy_text_equals_that_of_sample_py(browser, served):
    path, snapshots = served
    opened = Page(browser, path)
    prompt = "the cat\n"
    opened.set(prompt=prompt, count=200, temperature=0)
    opened.press("generate")
    opened.wait(lambda: all(s.startswith("200 ") for s in opened.texts(".status")))
    texts = opened.texts(".text")
    for text, snapshot in zip(texts, snapshots, strict=False):
        model = loaded(snapshot)
        ids = torch.tensor([[LETTERS.index(c) for c in prompt]])
        assert text == "".join(LETTERS[i] for i in model.generate(ids, 200)[0])
    opened.browser.execute_script("models.forEach(model => model.look(150))")
    opened.wait(lambda: len(opened.all(".made")) == len(ARCHITECTURES) + 1)
    # Beyond the context, too, what was made is what was likeliest, in what the model saw by then.
    assert len(opened.all("tr:first-child.made")) == len(ARCHITECTURES) + 1


def test_generating_stopping_and_inspecting_on_the_page(browser, tmp_path):
    snapshot = model_snapshot(LETTERS, "modern", n_layer=4, n_embd=192)  # slow enough to be stopped
    snapshot.config |= {"run_name": HOSTILE}
    write(tmp_path, snapshot)
    opened = Page(browser, tmp_path / "page.html")
    opened.set(prompt="a", count=20_000, temperature=1)
    opened.press("generate")
    opened.wait(lambda: len(opened.texts(".text")[0]) > 50)
    opened.press("halt")
    opened.all(".text span:nth-child(21)")[0].click()
    opened.wait(lambda: opened.texts("tbody")[0])
    length = len(opened.texts(".text")[0])
    shares = [float(cell.split()[0]) for cell in opened.texts("td:last-child")]
    assert 10 <= len(shares) <= 11 and 10 < sum(shares) <= 100.5
    opened.all(".text")[0].send_keys("\ue014")  # the right arrow
    opened.wait(lambda: opened.all(".picked")[0].get_dom_attribute("data-at") == "21")
    assert len(opened.texts(".text")[0]) == length < 20_000
    text = opened.texts(".text")[0]
    stop = text[30:32]
    opened.set(stop=stop)
    opened.press("generate")  # the same text, for the same seed
    opened.wait(lambda: opened.texts(".text")[0] == text[: text.index(stop, 1)])
    opened.set(prompt="A")
    opened.press("generate")
    assert opened.texts(".status") == ['Prompt: the model does not know "A".']
    assert opened.texts(".text") == [""]
    assert browser.title == HOSTILE and browser.get_log("browser") == []


def test_text_of_bytes_is_shown_as_characters(browser, served):
    opened = Page(browser, served[0])
    opened.set(prompt="é漢a", count=1, stop="")
    opened.press("generate")
    opened.wait(lambda: opened.texts(".status")[-1].startswith("1 bytes"))
    assert opened.texts(".text")[-1].startswith("é漢a")
    assert len(opened.all("section:last-child .text span")) == 7  # six bytes, and one more


def test_a_page_of_an_edited_model_shows_a_warning(browser, tmp_path, monkeypatch):
    write(tmp_path, edited(monkeypatch))
    opened = Page(browser, tmp_path / "page.html")
    [warning] = opened.texts(".warning")
    assert warning.startswith("This page computes other numbers than PyTorch, by up to")
