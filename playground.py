"""A local web page to try trained models: type a prompt, watch characters come, and see for each
what else the model might have said and where a head looked.

    python playground.py                               the newest run; the others can be chosen
    python playground.py run_dir=runs/NAME             another run first
    python playground.py snapshots=[a.pt,b.pt]         two to compare, side by side
    python playground.py port=8000 host=0.0.0.0        for others, too: there is no password

It needs Gradio (pip install -r requirements-playground.txt) and no network, and reads a snapshot
when it is first asked for.
"""

import contextlib
import functools
import html
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from char_dataset import encode
from engine.config.arguments import parse, run_program
from engine.errors import UserError, one_line
from engine.run.directory import choose_snapshot, runs
from engine.snapshots.sharded import load_full
from model import GPT
from sample import SampleConfig, is_small, load_model

CSS = os.path.join(
    os.path.dirname(os.path.abspath(__file__)), "engine", "reports", "playground.css"
)
LONGEST = 2000  # characters of a prompt, and of what continues it
ALTERNATIVES = 10
FRAME = 0.04  # seconds between what is shown of a text that grows; a browser is slower than a model
WHITESPACE = {" ": ("space", "␣"), "\n": ("newline", "↵"), "\t": ("tab", "⇥")}
# A click on a character becomes an event that carries its position.
CLICK = """element.addEventListener('click', event => {
    const at = event.target.dataset.at;
    if (at !== undefined) trigger('click', {at: Number(at)});
});"""


@dataclass
class PlaygroundConfig:
    """What to show, and where; every field is an argument, `name=value`."""

    run_dir: str | None = None  # the run that is shown first; without: the newest under runs/
    snapshots: str | None = None  # or files or URLs, [a.pt,b.pt]; the first two are side by side
    host: str = "127.0.0.1"  # the address to listen at
    port: int | None = None  # without: 7860, or the next that is free

    def __post_init__(self):
        if self.run_dir and self.snapshots:
            raise UserError("run_dir and snapshots: give one of them")
        if self.port is not None and not 1 <= self.port < 2**16:
            raise UserError(f"port={self.port}: must be a number from 1 to 65535")

    def named(self) -> list[str]:
        """The snapshots that are given."""
        return [s.strip() for s in (self.snapshots or "").strip("[]").split(",") if s.strip()]


def find_snapshots(config: PlaygroundConfig) -> list[str]:
    """Those that are given, and then the best of each run under runs/, newest first."""
    others = []
    for run in runs():
        with contextlib.suppress(UserError):  # it has not saved yet
            others.append(choose_snapshot(None, run))
    first = config.named() or [choose_snapshot(None, config.run_dir)]
    return list(dict.fromkeys([*first, *others]))


# --------------------------------------------------------------------------------------------------
# The models


@functools.lru_cache(maxsize=4)
def read(path: str) -> tuple[GPT, str, str]:
    """The model of a snapshot, its vocabulary, and a line on it. Raises `UserError`."""
    snapshot = load_full(path)
    model = load_model(snapshot)
    size = sum(p.numel() for p in model.parameters())
    return model, snapshot.vocabulary, f"{path}: {size / 1e6:.3g} M parameters, {snapshot}"


@dataclass
class Text:
    """What one model has made so far: ids, of which the first `start` are the prompt's."""

    path: str
    vocabulary: str
    ids: list[int]
    start: int
    temperature: float

    def __str__(self) -> str:
        return "".join(self.vocabulary[i] for i in self.ids)


def start(path: str, config: SampleConfig) -> tuple[Text, Iterator[int]]:
    """The prompt as the snapshot at `path` knows it, and what it will be continued by. Raises
    `UserError` for a prompt that is empty, too long, or has an unknown character.
    """
    model, vocabulary, _ = read(path)
    if not config.prompt:
        raise UserError("prompt is empty: give at least one character")
    if max(len(config.prompt), config.max_new_tokens) > LONGEST:
        raise UserError(
            f"a prompt of {len(config.prompt)} and max_new_tokens={config.max_new_tokens}: "
            f"each must be at most {LONGEST} characters"
        )
    try:
        ids = encode(config.prompt, vocabulary).tolist()
    except UserError as error:
        raise UserError(f"prompt: {error}") from error
    text = Text(path, vocabulary, ids, len(ids), config.temperature)
    made = model.stream(
        torch.tensor([ids], device=model.tok_emb.weight.device),
        config.max_new_tokens,
        **config.options(),
    )
    return text, map(int, made)


def look(text: Text, at: int, layer: int, head: int) -> tuple[list[tuple[str, float]], list[float]]:
    """How the model came to the character at position `at` of `text`: its `ALTERNATIVES` likeliest
    ones with their probabilities (after temperature, before top-k and top-p), and how much of each
    character before it the head took, the last `block_size` of them at most, adding up to 1.

    `layer` and `head` count from 1. Raises `UserError` where there is no such position, layer or
    head.
    """
    model, vocabulary, _ = read(text.path)
    sizes = (
        ("character", at, 1, len(text.ids) - 1),
        ("layer", layer, 1, model.config.n_layer),
        ("head", head, 1, model.config.n_head),
    )
    for name, value, low, high in sizes:
        if value is None or not low <= value <= high:
            raise UserError(f"{name}={value}: must be from {low} to {high}")
    context = text.ids[max(0, at - model.config.block_size) : at]
    logits, weights = model.inspect(torch.tensor(context, device=model.tok_emb.weight.device))
    probability = (logits[-1] / (text.temperature or 1.0)).softmax(dim=-1)
    likeliest = probability.topk(min(ALTERNATIVES, len(vocabulary)))
    pairs = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
    return [(vocabulary[i], p) for i, p in pairs], weights[layer - 1, head - 1, -1].tolist()


# --------------------------------------------------------------------------------------------------
# The page


def span(character: str, classes: str = "", attributes: str = "") -> str:
    """One character as HTML; CSS makes whitespace visible."""
    classes = f"{WHITESPACE.get(character, ('', ''))[0]} {classes}".strip()
    return f'<span class="{classes}" {attributes}>{html.escape(character)}</span>'


def draft(text: Text) -> str:
    """The text as HTML while it grows, when an element for each character would be too slow.

    Braces are escaped, too, so that no two of them can be taken for a template's.
    """
    return "".join(
        span(c) if c in WHITESPACE else html.escape(c).replace("{", "&#123;") for c in str(text)
    )


def show(text: Text, picked: int | None = None) -> str:
    """The text as HTML, with a position at each character."""
    return "".join(
        span(
            character,
            "prompt" * (at < text.start) + " picked" * (at == picked),
            f'data-at="{at}"' if at else "",  # nothing comes before the first
        )
        for at, character in enumerate(str(text))
    )


def show_look(text: Text, at: int, layer: int, head: int) -> str:
    """What `look` finds, as HTML."""
    alternatives, weights = look(text, at, layer, head)
    made = str(text)[at]
    rows = "".join(
        f'<tr class="{"made" * (character == made)}"><th>{name(character)}</th><td>'
        f'<span class="bar" style="width:{100 * p:.1f}%"></span>{100 * p:.1f} %</td></tr>'
        for character, p in alternatives
    )
    most = max(weights)
    context = str(text)[at - len(weights) : at]
    shaded = "".join(
        span(c, "", f'style="background:rgb(255 140 0 / {0.6 * w / most:.3f})" title="{w:.1%}"')
        for c, w in zip(context, weights, strict=True)
    )
    temperature = text.temperature or 1.0
    return (
        f"<p>Character {at}, {name(made)}: the likeliest here, at temperature {temperature:g}</p>"
        f'<table class="alternatives">{rows}</table>'
        f"<p>Where head {head} of layer {layer} looked (darkest: {most:.1%})</p>"
        f'<div class="characters attention">{shaded}</div>'
    )


def name(character: str) -> str:
    """A character by itself, as HTML."""
    if character in WHITESPACE:
        return WHITESPACE[character][1]
    return html.escape(character) if character.isprintable() else f"U+{ord(character):04X}"


def build(paths: list[str], beside: str):
    """The page for the snapshots at `paths`, with the first of them and perhaps one `beside` it."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when it is imported
    try:
        import gradio as gr
    except ImportError as error:
        raise UserError(
            f"the playground needs Gradio: pip install -r requirements-playground.txt ({error})"
        ) from error

    @contextlib.contextmanager
    def messages():
        """What the user can mend is a message on the page, as text."""
        try:
            yield
        except UserError as error:
            raise gr.Error(html.escape(one_line(error)), print_exception=False) from None

    def generate(first, second, prompt, temperature, top_k, top_p, length, seed):
        """Both texts, and their HTML, at each character; without a second snapshot, one."""
        with messages():
            if not first:
                raise UserError("snapshot is empty: choose one")
            config = SampleConfig(
                prompt=prompt,
                max_new_tokens=int(length),  # a request made by hand may have 2.5
                temperature=temperature,
                top_k=int(top_k) or None,
                top_p=top_p,
                seed=seed,
            )
            texts, streams = zip(*(start(p, config) for p in (first, second) if p), strict=True)
            length, due = config.max_new_tokens, 0.0
            for made in zip(*streams, strict=True):
                for text, i in zip(texts, made, strict=True):
                    text.ids.append(i)
                if time.monotonic() > due or len(texts[0].ids) == texts[0].start + length:
                    shown = [x for text in texts for x in (draft(text), text)]
                    yield (*shown, *[gr.skip()] * (4 - len(shown)))
                    due = time.monotonic() + FRAME

    def inspect(text, at, layer, head):
        """What belongs to a position; to the first that was made, where there is none."""
        if text is None:
            return gr.skip(), gr.skip(), gr.skip()
        at = text.start if at is None else at
        with messages():
            return show(text, at), at, show_look(text, at, layer, head)

    def click(text, layer, head, event: gr.EventData):
        return inspect(text, event.at, layer, head)

    def finish(text, layer, head):
        return inspect(text, None, layer, head)

    def choose(path):
        """A panel made ready for the snapshot at `path`; hidden without one."""
        if not path:
            return gr.Column(visible=False), *[gr.skip()] * 6, None
        with messages():
            model, _, about = read(path)
        layers, heads = (
            gr.Dropdown(list(range(1, n + 1)), value=n if label == "layer" else 1, label=label)
            for label, n in (("layer", model.config.n_layer), ("head", model.config.n_head))
        )
        about = f"<small>{html.escape(about)}</small>"
        return gr.Column(visible=True), about, "", None, layers, heads, "", None

    with gr.Blocks(title="Playground", analytics_enabled=False) as page:
        with gr.Row():
            first = gr.Dropdown(paths, value=paths[0], label="snapshot", min_width=320)
            second = gr.Dropdown(
                [("none", ""), *paths], value=beside, label="beside it", min_width=320
            )
        prompt = gr.Textbox(label="prompt", lines=2, placeholder="text to continue")
        with gr.Row():
            temperature = gr.Slider(0, 2, SampleConfig.temperature, step=0.05, label="temperature")
            top_k = gr.Slider(0, 100, 0, step=1, label="top-k (0: among all)")
            top_p = gr.Slider(0.01, 1, 1, step=0.01, label="top-p (1: among all)")
        with gr.Row():
            length = gr.Slider(1, LONGEST, 300, step=1, label="characters")
            seed = gr.Number(
                SampleConfig.seed, label="seed (empty: another text every time)", precision=0
            )
        with gr.Row():
            go = gr.Button("Generate", variant="primary")
            stop = gr.Button("Stop")
        panels = []
        with gr.Row():
            for snapshot in (first, second):
                with gr.Column(visible=bool(snapshot.value)) as column:
                    about = gr.HTML()
                    shown = gr.HTML(
                        "",
                        html_template='<div class="characters clickable">${value}</div>',
                        js_on_load=CLICK,
                    )
                    with gr.Row():
                        at = gr.Number(label="character, or click one", precision=0, min_width=80)
                        layer = gr.Dropdown([], label="layer", min_width=80)
                        head = gr.Dropdown([], label="head", min_width=80)
                    found = gr.HTML(elem_classes="inspection")
                    text = gr.State()
                panels.append((shown, text, at, layer, head, found))
                ready = [column, about, shown, at, layer, head, found, text]
                gr.on([page.load, snapshot.change], choose, snapshot, ready)
                shown.click(click, [text, layer, head], [shown, at, found])
                gr.on(
                    [at.input, layer.input, head.input],
                    inspect,
                    [text, at, layer, head],
                    [shown, at, found],
                )
        made = gr.on(
            [go.click, prompt.submit],
            generate,
            [first, second, prompt, temperature, top_k, top_p, length, seed],
            [component for panel in panels for component in panel[:2]],
            show_progress="minimal",
        )
        for shown, text, at, layer, head, found in panels:
            outputs = [shown, at, found]
            made.success(finish, [text, layer, head], outputs)
            stop.click(finish, [text, layer, head], outputs, cancels=made)
    return page.queue(api_open=False, default_concurrency_limit=1)  # so many at once wait


def check_host(host: str) -> None:
    """Raises `UserError` for an address that this machine cannot listen at: Gradio would try a
    hundred ports there, for minutes.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        raise UserError(f"host={host}: cannot listen there: {one_line(error)}") from error


def main(arguments: list[str]) -> None:
    config = parse(PlaygroundConfig, arguments)
    check_host(config.host)
    paths = find_snapshots(config)
    shown = list(dict.fromkeys(config.named() or paths[:1]))
    for path in shown:
        read(path)  # what is wrong with it is said here
    if is_small(read(paths[0])[0], 1):
        torch.set_num_threads(1)  # a character at a time is too little to share
    page = build(paths, shown[1] if len(shown) > 1 else "")
    import gradio as gr  # `build` has seen to it that there is one

    try:
        _, url, _ = page.launch(
            server_name=config.host,
            server_port=config.port,
            share=False,
            ssr_mode=False,
            run_history=False,
            footer_links=[],
            css_paths=CSS,
            theme=gr.themes.Default(font="system-ui", font_mono="ui-monospace"),
            quiet=True,
            prevent_thread_lock=True,
        )
    except OSError as error:
        why = "in use, or not available" if "empty port" in str(error) else one_line(error)
        raise UserError(f"host={config.host} port={config.port}: {why}; give another") from error
    print(f"playground at {url} (Ctrl-C ends it)", flush=True)
    page.block_thread()


if __name__ == "__main__":
    run_program(main)
