"""Reports: reading a run back, the page, the verdict, the settings; the references of benchmarks/."""

import json
import math
import re
import statistics
from pathlib import Path

import pytest
import torch
import yaml
from conftest import TINY, metrics, start, succeed

import report
from benchmarks import reference
from benchmarks.reference import band, changes, compare, load_references, make_reference
from config import compose
from engine.config.schema import FIXED, FREE, HIDDEN, IRRELEVANT, KEYS, is_fixed
from engine.errors import UserError
from engine.generation import draw_samples
from engine.reports.history import Run, compare_means, students_t
from engine.reports.page import draw_charts, render, ticks
from engine.reports.problems import OFF_TRACK, REPEATED, check, loss_warning
from model import GPT, GPTConfig

NASTY = "</script><script>broken()</script><img src=x onerror=broken()> & \"'{{ 1 }}\n\n"


def falls(step: int, low: float = 1.5) -> float:
    return low + 3 * math.exp(-step / 200)


def some_run(
    path: Path,
    losses=lambda step: falls(step, 1.4),
    held_out=falls,
    steps: int = 1500,
    recipe: str = "shakespeare_cpu",
    **changed,
) -> Run:
    """A run of `recipe` with these curves, `changed` settings (`__` for a dot) and texts that look like HTML."""
    overrides = [f"experiment={recipe}"]
    config: dict = {"run_name": path.name, "run_dir": str(path), "model": {"vocab_size": 65}}
    config |= {"optimizer": {}, "trainer": {}, "data": {}}
    for key, value in changed.items():
        group, name = key.split("__")
        config[group][name] = value
        overrides.append(f"{group}.{name}={value}")
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    lines = []
    for step in range(100, steps + 1, 100):
        line = {"step": step, "epoch": step / 1e5, "seconds": step / 20}
        trained = {"lr": 8e-3 * (1 - step / 2000), "tokens_per_s": 50_000.0, "grad_norm": 0.3, "samples": [NASTY] * 2}
        lines.append(line | {"split": "train", "loss": losses(step)} | trained)
        if step % 500 == 0:
            lines.append(line | {"split": "val", "loss": held_out(step)})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    start = {
        "step": 0, "total_steps": 1500, "started": "2026-11-20 12:00:00 +0000",
        "recipe": recipe, "overrides": overrides, "device": NASTY, "cores": 2,
        "hosts": 1, "processes": 1, "threads": 2, "precision": "bfloat16", "compiled": False,
        "parameters": 800_000, "text_sha256": "ab", "unigram_loss": 3.35, "torch": "2.13.0",
        "python": "3.11.7", "system": "Linux x86_64",
    }  # fmt: skip
    (path / "environment.jsonl").write_text(json.dumps(start) + "\n")
    return Run(str(path))


# --- what a run leaves ---


def test_a_run_ends_with_its_report_with_samples_and_command(tmp_path):
    settings = [s for s in TINY if s not in ("report=false", "samples=false")]
    result = succeed(*settings, f"run_dir={tmp_path}", "trainer.eval_every_steps=2")
    assert f"report      {tmp_path}/report.html" in result.stdout
    html = (tmp_path / "report.html").read_text()
    assert f"python main.py experiment=null {TINY[1]}" in html and f"run_dir={tmp_path}" in html
    drawn = [line for line in metrics(tmp_path, "train") if "samples" in line]
    assert [line["step"] for line in drawn] == [1, 4, 6]
    assert len({len(text) for line in drawn for text in line["samples"]}) == 1
    assert html.count("<pre>") >= sum(len(line["samples"]) for line in drawn) == 6


def test_drawing_samples_changes_no_state():
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 4, "block_size": 8}
    model = GPT(GPTConfig(model_type=None, **sizes)).train()
    torch.set_num_threads(2)
    before = torch.random.get_rng_state()
    texts = draw_samples(model, "\nabc", "utf-8")
    assert texts == draw_samples(model, "\nabc", "utf-8")
    assert [len(text) for text in texts] == [120] * 2 and set("".join(texts)) <= set("\nabc")
    assert draw_samples(model, "\nabc", "utf-8", "a\n") != texts  # follows the separator
    assert torch.equal(before, torch.random.get_rng_state())
    assert model.training and torch.get_num_threads() == 2


def test_a_resumed_run_records_its_start(tmp_path):
    for steps in (2, 4):
        succeed(*TINY, f"trainer.max_steps={steps}", f"run_dir={tmp_path}")
    run = Run(str(tmp_path))
    assert [(start["step"], start["total_steps"]) for start in run.starts] == [(0, 2), (2, 4)]
    assert run.starts[1]["recipe"] is None and "data=pydoc" in run.starts[1]["overrides"]
    assert run.step == run.total_steps == 4
    assert [x for x in changes(run) if "max_steps" in x] == ["trainer.max_steps=4"]  # the last one
    assert render([run]).count("python main.py experiment=null data=pydoc") == 2


def test_a_report_that_cannot_be_written_does_not_fail_the_run(tmp_path):
    (tmp_path / "report.html").mkdir()
    result = succeed(*TINY, "report=true", f"run_dir={tmp_path}")
    warnings = [x for x in result.stdout.splitlines() if x.startswith("warning: cannot write report.html")]
    assert len(warnings) == 1 and "Is a directory" in warnings[0]


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("config.yaml", "run_name: é".encode("latin-1"), "cannot be read: 'utf-8' codec"),
        ("config.yaml", b"a: 2026-13-45", "cannot be read: month must be"),
        ("config.yaml", b"[]", "trainer is missing, or not of type dict"),
        ("config.yaml", b"{trainer: {}, data: 5, run_name: a}", "data is missing, or not of type dict"),
        ("environment.jsonl", b"", "is missing, empty or damaged"),
        ("environment.jsonl", b'{"step": 0}', "is missing, empty or damaged"),
        ("config.yaml", b"[" * 1000, "cannot be read: maximum recursion depth"),
        ("job.yaml", b"", "overrides is missing, or not of type list"),
    ],
)
def test_a_run_with_a_damaged_record_is_named_and_hides_no_other(tmp_path, capsys, name, content, says):
    some_run(tmp_path / "bad")
    (tmp_path / "bad" / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"^{tmp_path}/bad/{name}: {says}"):
        report.main([f"run_dir={tmp_path}/bad"])
    some_run(tmp_path / "good")
    assert report.main([f"run_dirs={tmp_path}/*"]) == 0
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/bad/{name}: {says}")
    assert "<title>good</title>" in (tmp_path / "report.html").read_text()
    assert report.main(["check", f"run_dirs={tmp_path}/*"]) == 1
    with pytest.raises(UserError, match="none of the runs can be read"):
        report.main([f"run_dirs=[{tmp_path}/bad,{tmp_path}/bad/.]"])


def test_lines_that_are_damaged_or_of_another_program_are_passed_over_and_counted(tmp_path, capsys):
    run = some_run(tmp_path)
    line = {"step": 1600, "split": "val", "loss": 9.0, "seconds": 1.0}
    foreign = [5, [], {"step": 1}, *({**line, key: ["x"]} for key in line), {**line, "lr": "x"}, {**line, "samples": 5}]
    path = tmp_path / "metrics.jsonl"
    others = [*map(json.dumps, foreign), "", "step,loss", json.dumps(line)[:-3] + "1e999}", path.read_text()]
    path.write_text("\n".join(others) + '{"step": 1600, "spl')  # half a line: it is being written
    report.main([f"run_dir={tmp_path}"])
    says = f"warning: {path}: passed over {len(foreign) + 3} damaged or foreign lines\n"
    assert capsys.readouterr().err == says
    assert (Run(str(tmp_path)).train, Run(str(tmp_path)).val) == (run.train, run.val)


def test_a_run_with_few_or_wrong_numbers_has_a_page(tmp_path):
    run = some_run(tmp_path / "new", steps=100)
    run.step = 1
    run.train[0] |= {"step": 1, "lr": 0.0}
    html = render([run])
    assert "1 of 1,500" in html and "Too few steps to tell" in html and "On track" not in html
    run.train.clear()  # nothing logged yet
    assert check(run) == ("too few steps to tell", []) and "<svg" not in render([run])

    some_run(tmp_path / "nan", losses=lambda step: math.nan, held_out=lambda step: math.inf)
    path = tmp_path / "nan" / "metrics.jsonl"
    path.write_text(path.read_text().replace("0.3", "NaN").replace("50000.0", "-Infinity"))
    run = Run(str(tmp_path / "nan"))
    assert "The run diverges: step 1500" in render([run]) and (run.best, run.passed_over) == (None, 0)

    runs = [some_run(tmp_path / str(seed), trainer__seed=seed) for seed in range(5)]
    for line in (line for run in runs for line in run.train):
        del line["lr"], line["tokens_per_s"], line["grad_norm"]  # a run that logged no speed
    assert [chart["title"] for chart in draw_charts(runs[:1], ["run"])] == ["Loss"]
    assert "1.5017" in render(runs[:1])  # the held-out loss
    assert make_reference(runs)[1]["characters_per_s"] is None


# --- the page ---


def look(browser, page: Path, script: str, width: int) -> dict:
    """What `script` leaves in `seen`, run in the page in a window `width` pixels wide."""
    size = {"width": width, "height": 3000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())
    seen = browser.execute_script(f"const seen = {{}}; {script}; return seen")
    assert browser.execute_script("return performance.getEntriesByType('resource')") == []  # nothing is fetched
    assert browser.get_log("browser") == []
    return seen


@pytest.fixture
def page(tmp_path) -> Path:
    """The report of one run, whose texts look like HTML."""
    path = tmp_path / "report.html"
    path.write_text(render([some_run(tmp_path / "run", trainer__seed=7)]))
    return path


def test_the_page_is_one_file_and_escapes_samples(page):
    html = page.read_text()
    assert not re.search(r"<link|@import|url\(|(?<!class=)\ssrc=\"|https?://(?!raw\.)", html)
    assert "broken()" in html and "<img" not in html and "<script>broken" not in html
    assert html.count("</script>") == 5  # the data of four charts, and the page's own


@pytest.mark.parametrize("width", [360, 1280])
def test_samples_and_pointer_values_show_at_any_width(browser, page, width):
    script = """
        seen.texts = [...document.querySelectorAll('.texts pre')].map(pre => pre.textContent);
        const plot = document.querySelector('.plot'), box = plot.getBoundingClientRect();
        const clientX = box.left + box.width / 3;
        plot.dispatchEvent(new PointerEvent('pointermove', {clientX}));
        seen.tip = plot.querySelector('.tip').innerText;
        seen.curves = document.querySelectorAll('.line').length;
        const root = document.documentElement;
        seen.overflow = root.scrollWidth - root.clientWidth;
        const point = new DOMPoint(500, 2).matrixTransform(
            plot.querySelector('.line').getScreenCTM());
        const tick = (kind, text) => [...plot.querySelectorAll(kind)].find(
            span => span.innerText === text).getBoundingClientRect();
        const [x, y] = [tick('.x', '500'), tick('.y', '2')];
        seen.beside = [point.x - (x.left + x.right) / 2, point.y - (y.top + y.bottom) / 2];
    """
    seen = look(browser, page, script, width)
    assert seen["texts"] == [NASTY] * len(seen["texts"]) and len(seen["texts"]) == 30
    assert seen["tip"] == f"step 500\ntraining: {falls(500, 1.4):.4f}\nheld-out: {falls(500):.4f}"
    # Two losses, learning rate, gradient norm, throughput; the dots of all but training.
    assert seen["curves"] == 9
    assert seen["beside"] == pytest.approx([0, 0], abs=1)  # a value lies at its tick
    assert seen["overflow"] <= 0


def test_several_runs_share_a_chart_and_a_table_of_what_differs_best_first(tmp_path, capsys, monkeypatch):
    for rate, loss in ((4e-3, 2.5), (8e-3, 1.5), (16e-3, 3.5)):
        changed = {"optimizer__learning_rate": rate, "trainer__save_every_steps": round(rate * 1e4)}
        some_run(tmp_path / f"rate={rate}", held_out=lambda step, loss=loss: loss, **changed)
    assert report.main([f"run_dirs={tmp_path}/*"]) == 0
    html = (tmp_path / "report.html").read_text()
    assert "3 runs" in html and html.count('class="line faint"') == 3
    assert re.findall(r"<th>(\w+\.\w+)</th>", html) == ["optimizer.learning_rate", "trainer.save_every_steps"]
    order = [html.index(f"<td>{rate}</td>") for rate in ("0.008", "0.004", "0.016")]
    assert order == sorted(order) and "rate=0.004, held-out" in html
    monkeypatch.chdir(tmp_path)
    assert report.main([f"run_dirs=[rate=0.004,{tmp_path}/rate=0.008]", "out=two.html"]) == 0
    assert "2 runs" in (tmp_path / "two.html").read_text()
    assert capsys.readouterr().out.splitlines() == [f"{tmp_path}/report.html", "two.html"]


def test_a_pattern_finds_runs_and_the_runs_of_sweeps(tmp_path):
    for name in ("a", "b.sweep/1", "b.sweep/2"):
        some_run(tmp_path / name)
    (tmp_path / "notes").mkdir()
    found = report.find_runs([f"{tmp_path}/[abn]*"])
    assert found == [f"{tmp_path}/{name}" for name in ("a", "b.sweep/1", "b.sweep/2")]


def test_runs_on_different_parts_are_not_comparable_and_other_numbers_of_steps_are_like_seeds(tmp_path):
    runs = [some_run(tmp_path / str(share), data__train_split=share) for share in (0.5, 0.9)]
    final = {"step": 1500, "split": "final", "loss": 1.2345, "seconds": 1.0}
    runs[1].final = final  # of one run alone, and not of the first on the page
    runs[0].val[-1]["loss"] = 1.0
    html = render(runs)
    assert "different texts, encodings or splits" in html and "<th>final loss</th>" in html
    runs = [some_run(tmp_path / name) for name in "ab"]
    assert "different texts" not in render(runs) and "different orders" not in render(runs)
    runs[1].starts[-1]["total_steps"] = 3000
    assert "different orders, like runs with different seeds" in render(runs)


def test_finished_runs_of_several_seeds_have_a_mean(tmp_path):
    for seed, loss in enumerate((2.5, 1.5, 2.3)):
        changed = {"trainer__seed": seed, "trainer__threads": seed}  # which changes no more
        some_run(tmp_path / f"<u>{seed}", held_out=lambda step, loss=loss: loss, **changed)
    some_run(tmp_path / "unfinished", steps=1000, trainer__seed=3)
    for patience in (1, 2):  # evaluated at steps 500 and 1000; the first was better
        patient = {"trainer__seed": 4 + patience, "trainer__patience": patience}
        some_run(tmp_path / f"p{patience}", lambda s: 2, lambda s: 2 + s / 1e4, steps=1000, **patient)
    some_run(tmp_path / "deep", trainer__seed=4, model__n_layer=9)
    html = render([Run(str(path)) for path in sorted(tmp_path.iterdir())])
    losses = (2.5, 1.5, 2.3, 2.05)
    half = 3.182 * statistics.stdev(losses) / 2  # Student's t for 3 degrees of freedom
    row = ["mean of 4 seeds: &lt;u&gt;1, p1, &lt;u&gt;2, &lt;u&gt;0", "2.0875", f"± {half:.4f} (95 %)"]
    row.append(f"deviation {statistics.stdev(losses):.4f}")
    places = [html.index(text) for text in row]
    assert places == sorted(places) and html.count("mean of") == 1 and "<u>" not in html


def test_students_t_is_that_of_tables():
    table = {1: 12.706, 2: 4.303, 5: 2.571, 6: 2.447, 10: 2.228, 30: 2.042, 1e6: 1.96}
    assert {n: students_t(n) for n in table} == pytest.approx(table, rel=2e-3)


@pytest.mark.parametrize(
    "worse, says",
    [
        ((1.2, 1.3, 1.22), "differ: by 0.1900 ± 0.1337"),  # variances of 0.0025 and 0.0028: 3.98 degrees of freedom
        ((1.0, 1.4, 1.1), "do not differ by more than chance: by 0.1167"),
        ((1.05, 1.05, 1.05), "do not differ by more than chance: by 0.0000"),
    ],
)
def test_the_best_two_means_differ_if_welchs_interval_excludes_0(worse, says):
    assert says in compare_means((1.0, 1.1, 1.05), worse)


def test_the_report_warns_of_held_out_text_that_was_trained_on(tmp_path):
    run = some_run(tmp_path)
    for share, is_shown in ((None, False), (0.4, False), (0.5, True)):
        run.starts[-1]["repeated_share"] = share
        verdict, sentences = check(run)
        assert (verdict, REPEATED in sentences) == ("on track", is_shown)


def test_long_run_names_stay_on_the_screen(browser, tmp_path):
    runs = [some_run(tmp_path / f"{'a_long_name' * 9}{seed}", trainer__seed=seed) for seed in "12"]
    (tmp_path / "report.html").write_text(render(runs))
    script = """
        const rows = [...document.querySelector('.runs').rows];
        seen.right = rows.map(row => row.cells[1].getBoundingClientRect().right);
        seen.losses = rows.map(row => row.cells[1].innerText.slice(0, 6));
    """
    seen = look(browser, tmp_path / "report.html", script, 360)
    assert seen["losses"] == ["best h", "1.5017", "1.5017", "1.5017"]
    assert max(seen["right"]) <= 360


def test_the_page_has_the_command_of_a_run_that_hydra_started(tmp_path):
    run = some_run(tmp_path / "a", data__path="c d.txt")
    assert "main.py experiment=shakespeare_cpu &#39;data.path=c d.txt&#39;" in render([run])
    run.starts[0] |= {"overrides": None, "recipe": None}  # started by a program, not by Hydra
    assert "python main.py" not in render([run]) and changes(run) == []


def test_a_long_run_has_a_small_page(tmp_path):
    run = some_run(tmp_path / "a")
    run.train = [{**run.train[0], "step": step, "samples": None} for step in range(1, 50_001)]
    run.val = run.val[:1]
    html = render([run])
    assert len(html) < 500_000
    assert re.search(r'class="line dots"[^>]* d="M500 1\.746', html)  # a lone evaluation
    curves = [curve.points for chart in draw_charts([run], ["run"]) for curve in chart["curves"]]
    assert max(map(len, curves)) <= 1000
    assert curves[0][-1] == (50_000, run.train[0]["loss"])


@pytest.mark.parametrize("low, high", [(0, 1500), (1.41, 4.2), (1.4601, 1.4602), (0, 8e-3), (0, 3), (0, 1e6)])
def test_ticks_are_few_round_and_inside(low, high):
    found = ticks(low, high)
    assert 2 <= len(found) <= 6 and all(low - 1e-9 <= tick <= high for tick, _ in found)
    assert all(len(label) <= 7 for _, label in found)


# --- is it on track? ---


def test_a_run_that_diverged_is_not_on_track(tmp_path, capsys):
    result = start(*TINY, "optimizer.learning_rate=1e38", "trainer.eval_every_steps=1", f"run_dir={tmp_path}")
    assert result.returncode == 1 and "training has diverged" in result.stderr
    (line,) = result.stderr.splitlines()  # also in the file
    assert line.removeprefix("error: ") in (tmp_path / "main.log").read_text()
    assert report.main(["check", f"run_dir={tmp_path}"]) == 1
    assert "The run diverges: step" in capsys.readouterr().out
    assert report.main([f"run_dir={tmp_path}"]) == 0


@pytest.mark.parametrize(
    "changed, says",
    [
        ({}, ""),
        ({"held_out": lambda s: 4.17}, "held-out loss at step 1500, 4.1700, is worse than guessing"),
        ({"losses": lambda s: 4.17, "steps": 400}, "training loss at step 400, 4.1700, is worse"),
        ({"losses": lambda s: None if s == 900 else 2.0}, "The run diverges: step 900: the"),
        ({"held_out": lambda s: 1.6 + s / 2000}, "The held-out loss has risen: it was lowest at step 500, 1.8500, and"),
        ({"held_out": lambda s: 1.6 + s / 90000}, ""),  # by no more than noise
    ],
)
def test_the_verdict_of_a_run(tmp_path, capsys, changed, says):
    some_run(tmp_path / "good")
    some_run(tmp_path / "run", **changed)
    assert report.main(["check", f"run_dir={tmp_path}/good"]) == 0
    assert report.main(["check", f"run_dirs={tmp_path}/*"]) == bool(says)
    alone, good, other, *problems = capsys.readouterr().out.splitlines()
    assert alone == good == f"{tmp_path}/good, step 1500 of 1500: on track"
    assert other.endswith(f": {OFF_TRACK if says else 'on track'}")
    assert len(problems) == bool(says) and all(says in problem for problem in problems)


def test_a_held_out_loss_that_was_never_better_than_guessing_has_not_risen(tmp_path):
    run = some_run(tmp_path / "run", held_out=lambda s: 3.4 + s / 9e3)
    assert "worse than guessing" in loss_warning(run) and "use the best snapshot" in loss_warning(run)
    run.step = run.val[-1]["step"] = 20
    assert not loss_warning(run)  # too early
    run.starts[-1]["total_steps"] = 20
    assert "worse than guessing" in loss_warning(run)
    assert check(run)[0] == "too few steps to tell"


# --- the references of benchmarks/ ---


@pytest.fixture(scope="module")
def card(tmp_path_factory) -> dict:
    """A reference of five runs whose losses lie 0.002 apart."""
    folder = tmp_path_factory.mktemp("reference")
    runs = []
    for seed, away in enumerate((-0.004, -0.002, 0.0, 0.002, 0.004)):
        curves = {"losses": lambda s, away=away: falls(s, 1.4 + away), "held_out": lambda s, away=away: falls(s) + away}
        runs.append(some_run(folder / str(seed), **curves, trainer__seed=seed))
    return dict([make_reference(runs)])


OVERRIDES = {"optimizer__learning_rate": 0.1, "trainer__threads": 1, "trainer__seed": 5}


@pytest.mark.parametrize(
    "changed, is_above, says",
    [
        ({}, False, "val loss at step 1500 is 1.5017, within the reference's 99 % interval, 1.5017 ± 0.0252."),
        ({"steps": 700}, False, "val loss at step 500 is 1.7463, within"),
        ({"steps": 300}, False, "train loss at step 300"),
        ({"held_out": lambda s: falls(s) + 0.2}, True, "1500 is 1.7017, above the reference"),
        ({"held_out": lambda s: falls(s) - 0.2}, False, "1500 is 1.3017, below the reference"),
        (OVERRIDES | {"held_out": lambda s: 2.5}, True, "recipe shakespeare_cpu: optimizer.learning_rate=0.1."),
    ],
)
def test_a_run_is_compared_with_the_reference_of_its_recipe(tmp_path, card, changed, is_above, says):
    found, sentences = compare(some_run(tmp_path / "run", **changed), card)
    assert found == is_above and any(says in sentence for sentence in sentences), sentences


@pytest.mark.parametrize(
    "overrides, text, says",
    [
        ([], "cd", "another text"),
        (["model.n_layer=1", "data.block_size=32"], "ab", "model.n_layer=1, data.block_size=32"),
        (["model=gpt2"], "cd", "model=gpt2, another text"),
    ],
)
def test_a_run_that_is_not_comparable_is_not_compared_with_the_reference(tmp_path, card, overrides, text, says):
    run = some_run(tmp_path / "run", held_out=lambda step: 2.5)
    run.starts[-1]["text_sha256"] = text
    run.starts[-1]["overrides"] += overrides
    assert compare(run, card) == (False, [f"The reference does not apply to {says}."])
    assert compare(run, {}) == (False, ["There is no reference for the recipe shakespeare_cpu."])


def test_the_band_is_students_prediction_interval_around_the_mean():
    losses = [1.0, 1.1, 1.2, 1.3, 1.4]
    histories = [[{"step": 1, "loss": loss}, {"step": 2, "loss": 2.0}] for loss in losses]
    (first, second), deviation = band(histories, 5.04), statistics.stdev(losses)
    # 4.60: Student's t of 4 degrees of freedom, 99 %; sqrt(6/5) for the run beside five
    assert first == [1, 1.2, pytest.approx(4.60 * math.sqrt(6 / 5) * deviation, rel=0.01)]
    assert second == [2, 2.0, pytest.approx(first[2] / 2, rel=0.01)]  # no smaller than the median


def test_a_reference_is_made_of_finished_runs_of_one_recipe(tmp_path):
    for seed in (1, 2, 3, 4, 5):
        some_run(tmp_path / str(seed), trainer__seed=seed)
    some_run(tmp_path / "same", trainer__seed=3)
    some_run(tmp_path / "changed", trainer__seed=6, model__n_head=4)
    some_run(tmp_path / "short", trainer__seed=7, steps=1000)
    some_run(tmp_path / "other", trainer__seed=8, recipe="shakespeare_quick")
    some_run(tmp_path / "text", trainer__seed=9)
    file = tmp_path / "text" / "environment.jsonl"
    file.write_text(file.read_text().replace('"ab"', '"cd"'))
    file = tmp_path / "card.json"

    def make(*names):
        run_dirs = ",".join(str(tmp_path / name) for name in names)
        assert reference.main([f"run_dirs=[{run_dirs}]", f"reference={file}"]) == 0

    for names, says in (
        ("1234", "4 runs with the seeds"),
        ([*"12345", "same"], "6 runs with the seeds"),
        ([*"1234", "changed"], "overrides its recipe: model.n_head=4"),
        ([*"1234", "short"], "is at step 1000 of 1500"),
        ([*"1234", "other"], "is a run of the recipe shakespeare_quick, not of shakespeare_cpu"),
        ([*"1234", "text"], "another text than"),
    ):
        with pytest.raises(UserError, match=says):
            make(*names)
        assert not file.exists()
    make(*"12345")
    assert reference.main(["check", f"run_dirs={tmp_path}/1", f"reference={file}"]) == 0
    made = load_references(str(file))["shakespeare_cpu"]
    assert made["seeds"] == [1, 2, 3, 4, 5] and made["steps"] == 1500
    assert made["command"] == "python main.py experiment=shakespeare_cpu trainer.seed=SEED"
    assert made["val"][0] == [500, round(falls(500), 4), 0.0252]  # 5.04 times the least, 0.005


def test_the_published_references_match_the_recipes():
    card = load_references(reference.REFERENCES)
    assert {"shakespeare_cpu", "shakespeare_quick", "nanogpt_cpu", "overfit"} <= set(card)
    for name, recorded in card.items():
        assert compose([f"experiment={name}"]).trainer.max_steps == recorded["steps"]
        assert len(recorded["seeds"]) >= 5 and f"experiment={name} " in recorded["command"]
        assert recorded["val"][-1][0] == recorded["train"][-1][0] == recorded["steps"]


# --- the command line ---


def test_every_listed_setting_exists_and_a_new_one_is_fixed_and_relevant():
    assert {*KEYS} >= FREE | FIXED | HIDDEN | IRRELEVANT | reference.INCOMPARABLE
    fixed = {key for key in [*KEYS, "model.new", "optimizer.class"] if is_fixed(key)}
    assert fixed >= {"model.new", "model.n_layer", "data.truncate", "trainer.seed", "init_from", "optimizer.class"}
    assert not fixed & {"model.model_type", "data.path", "trainer.max_steps", "optimizer.learning_rate", "run_dir"}


def test_a_report_replaces_a_report_and_no_other_file(tmp_path):
    run = tmp_path / "run"
    some_run(run)
    out = tmp_path / "pages" / "report.html"
    for _ in range(2):
        assert report.main([f"run_dir={run}", f"out={out}"]) == 0
    notes = tmp_path / "notes.md"
    notes.write_text("mine")
    for path in (notes, tmp_path):
        with pytest.raises(UserError, match="exists and is not a report"):
            report.main([f"run_dir={run}", f"out={path}"])
    assert notes.read_text() == "mine"
