import dataclasses
import functools
import itertools
import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import unicodedata

import pytest
import torch
from conftest import TINY, command, latest, model_snapshot, start, succeed

import sample as sampling
from char_dataset import CharDataset, DataConfig
from engine.config.schema import SHAKESPEARE_URL
from engine.errors import UserError
from engine.run import directory as run_directory
from engine.run.directory import choose_snapshot
from engine.text import documents, sources
from model import GPT
from sample import SampleConfig, score

VOCABULARY = "\n abcdefgh"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    succeed(*TINY, "trainer.use_amp=false", f"run_dir={path}")
    return path


def sample(*arguments, **kwargs):
    return start(*arguments, script="sample.py", **kwargs)


def drawn(snapshot, **settings) -> list[str]:
    return ["".join(text) for text in sampling.sample(SampleConfig(device="cpu", **settings), snapshot)]


@pytest.fixture
def shapes(monkeypatch) -> list[torch.Size]:
    """The shapes of the model's inputs."""
    seen, forward = [], GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda self, idx, **more: seen.append(idx.shape) or forward(self, idx, **more))
    return seen


def test_sampling_needs_only_the_snapshot(run_dir, tmp_path):
    copy = tmp_path / "alone.pt"
    copy.write_bytes((run_dir / "gpt_snapshot.pt").read_bytes())
    result = succeed(f"snapshot={copy}", "max_new_tokens=30", "num_samples=2", script="sample.py", cwd=tmp_path)
    first, second = result.stdout.split("-" * 40 + "\n")
    assert len(first) == len(second) == 31  # 30 and the newline that print adds, but not the default prompt


def test_a_terminal_shows_characters_as_they_are_drawn_until_ctrl_c(run_dir, spawn):
    terminal, shown = pty.openpty()
    arguments = [f"run_dir={run_dir}", "prompt=a", "max_new_tokens=100000000"]
    line = command(*arguments, script="sample.py")
    process = spawn(line, stdout=shown, stderr=subprocess.PIPE)
    os.close(shown)
    text = b""
    while len(text) < 20:
        assert select.select([terminal], [], [], 60)[0], "nothing is shown"
        text += os.read(terminal, 1)  # OSError if the process has ended
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    os.close(terminal)
    assert process.returncode == 130 and text.startswith(b"a")
    assert len(said.splitlines()) == 2 and said.startswith("[") and said.endswith("\n\n")


def test_a_closed_output_pipe_is_no_error(run_dir):
    reader, writer = os.pipe()
    os.close(reader)
    line = command(f"run_dir={run_dir}", "max_new_tokens=5", script="sample.py")
    result = subprocess.run(line, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert result.returncode == -signal.SIGPIPE and len(result.stderr.splitlines()) == 1


def test_a_prompt_file_is_continued_as_it_is(run_dir, tmp_path):
    prompt = "two lines\nlonger than what the model sees\n\n"
    (tmp_path / "opening.txt").write_text(prompt)
    arguments = [f"run_dir={run_dir}", "max_new_tokens=9"]
    given = sample(*arguments, f"prompt={prompt}").stdout
    read = sample(*arguments, f"prompt_file={tmp_path / 'opening.txt'}").stdout
    piped = sample(*arguments, "prompt_file=-", input=prompt)
    assert given == read == piped.stdout and "[reading - until it ends]" in piped.stderr
    assert given.startswith(prompt) and len(given) == len(prompt) + 9 + 1


def test_samples_do_not_depend_on_num_samples_or_length(monkeypatch, shapes):
    texts = functools.partial(drawn, model_snapshot(VOCABULARY, "modern"), temperature=1.0)
    together = texts(num_samples=5, max_new_tokens=40)
    assert len(set(together)) == 5
    assert texts(max_new_tokens=40) == together[:1]  # streamed
    assert texts(num_samples=2, max_new_tokens=30) == [text[:30] for text in together[:2]]
    monkeypatch.setattr(sampling, "BATCH_CHARACTERS", 2 * 24)
    shapes.clear()
    assert texts(num_samples=5, max_new_tokens=40) == together
    assert max(shapes)[0] == 2


def test_every_sampling_option_reaches_generate():
    texts = functools.partial(drawn, model_snapshot(VOCABULARY), max_new_tokens=40)
    [likeliest] = texts(temperature=0)
    for settings in ({"top_k": 1}, {"top_p": 1e-46}, {"temperature": 1e-3}):
        assert texts(**{"temperature": 3.0, **settings}) == [likeliest]
    several = [texts(temperature=3.0, num_samples=2, seed=seed) for seed in (1337, 9, None, None)]
    assert len({likeliest, *itertools.chain(*several)}) == 9


# --- the loss of a text ---


@pytest.fixture
def scoring(tmp_path):
    """Writes a text; returns the configuration that scores it."""

    def scoring(text: str, **settings) -> SampleConfig:
        (tmp_path / "text.txt").write_text(text)
        return SampleConfig(score=str(tmp_path / "text.txt"), **settings)

    return scoring


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_score_of_the_held_out_text_equals_the_runs_loss(precision, run_dir, tmp_path, scoring):
    if precision == "bfloat16":
        run_dir = tmp_path / "run"
        succeed(*TINY, f"trainer.amp_dtype={precision}", f"run_dir={run_dir}")
    snapshot = latest(run_dir)
    assert snapshot.choices["amp_dtype"] == precision and snapshot.loss_step == snapshot.step
    text = documents.pydoc_text()
    text = text[: int(len(text) * snapshot.config["data"]["truncate"])]
    held_out = text[int(len(text) * snapshot.config["data"]["train_split"]) :]
    losses = score(scoring(held_out), snapshot)
    assert losses.shape == (1, len(held_out) - 1)
    assert losses.mean().item() == pytest.approx(snapshot.loss, abs=1e-6)


@pytest.mark.parametrize("scored", ["text.txt", "{}/text.txt", "**/t*.txt", "other.txt"])
def test_score_of_the_training_text_says_so(scored, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("text.txt", "other.txt"):
        (tmp_path / name).write_text(VOCABULARY)
    snapshot = model_snapshot(VOCABULARY)
    snapshot.config["data"] = {"path": ["text.txt", "more.txt"]}
    sampling.print_score(SampleConfig(score=scored.format(tmp_path)), {"a.pt": snapshot})
    assert ("this is text of the run" in capsys.readouterr().err) == (scored != "other.txt")


def with_separator(separator: str | None, vocabulary: str = VOCABULARY):
    snapshot = model_snapshot(vocabulary)
    snapshot.config["data"] = {"separator": separator}
    return snapshot


def random_ids(length: int) -> torch.Tensor:
    return torch.randint(len(VOCABULARY), (length,), generator=torch.Generator().manual_seed(0))


def text_of(ids: torch.Tensor) -> str:
    return "".join(VOCABULARY[i] for i in ids)


@torch.no_grad()
def probabilities(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """What `model` expects after each of `ids` (T,): (T, V)."""
    return model(ids[None])[0][0].double().softmax(-1)


@pytest.mark.parametrize("stride", [None, 23, 12, 7, 1])
@pytest.mark.parametrize("length", [2, 24, 25, 26, 37, 49, 150])
def test_every_character_is_scored_once_in_its_window(length, stride, scoring, monkeypatch):
    snapshot, ids = model_snapshot(VOCABULARY), random_ids(length)
    model, step, expected = sampling.load_model(snapshot, "cpu"), stride or 24, []
    for i in range(1, length):
        start = max(0, -(-(i - 24) // step) * step)  # of the first window that reaches it
        assert start == 0 or 24 - step < i - start <= 24
        expected.append(-probabilities(model, ids[start:i])[-1, ids[i]].log().item())
    config = scoring(text_of(ids), stride=stride)
    # Pieces of a file and batches of windows end anywhere.
    for at_once, piece in ((8192, 2**18), (48, 7), (1, 60)):
        monkeypatch.setattr(sampling, "BATCH_CHARACTERS", at_once)
        monkeypatch.setattr(sources, "PIECE", piece)
        assert score(config, snapshot).tolist() == [pytest.approx(expected, abs=1e-5)]


def test_an_ensemble_has_the_mean_of_the_probabilities(scoring):
    ids = random_ids(25)  # one window
    config = scoring(text_of(ids))
    several = [model_snapshot(VOCABULARY, arch) for arch in ("gpt2", "modern")]
    each = torch.stack([probabilities(sampling.load_model(snapshot, "cpu"), ids[:-1]) for snapshot in several])
    expected = [-p.gather(1, ids[1:, None]).log().mean().item() for p in (*each, each.mean(dim=0))]
    losses = score(config, *several).mean(dim=1).tolist()
    assert losses == pytest.approx(expected, abs=1e-6)
    assert losses[2] < sum(losses[:2]) / 2 - 0.01  # the logarithm is concave
    same = score(config, *several[:1] * 3)
    assert torch.allclose(same, same[:1], atol=1e-12)


def test_losses_are_printed_of_each_model_and_of_the_ensemble(scoring, capsys):
    config = scoring(text_of(random_ids(99)), stride=6)
    several = {f"{arch}.pt": model_snapshot(VOCABULARY, arch) for arch in ("gpt2", "modern")}
    each = [f"{path}: {score(config, snapshot).mean():.6f} nats per character" for path, snapshot in several.items()]
    for number, labels in (1, []), (2, [*each, "ensemble of 2 snapshots"]):
        snapshots = dict([*several.items()][:number])
        nats = score(config, *snapshots.values())[-1].mean().item()
        sampling.print_score(config, snapshots)
        assert capsys.readouterr().out.splitlines() == [
            "characters scored   98",
            "stride              6",
            *labels,
            f"nats in total       {nats * 98:.6f}",
            f"nats per character  {nats:.6f}",
            f"bits per character  {nats / math.log(2):.6f}",
            f"perplexity          {math.exp(nats):.6f}",
        ]


@pytest.mark.parametrize(
    "what, vocabulary, settings", [("vocabulary", VOCABULARY[::-1], {}), ("context", VOCABULARY, {"block_size": 12})]
)
def test_an_ensemble_of_other_models_is_refused(what, vocabulary, settings):
    several = {"a.pt": model_snapshot(VOCABULARY), "b.pt": model_snapshot(vocabulary, **settings)}
    with pytest.raises(UserError, match=rf"^snapshots=: b\.pt has another {what} than a\.pt$"):
        sampling.print_score(SampleConfig(score="any.txt"), several)


@pytest.mark.parametrize("more", [{}, {"by": "line", "out": "unused"}])
def test_unknown_characters_are_skipped_and_counted(more, scoring, capsys):
    texts = ("abé\ncx\nx\nd", "ab\nc\n\nd")
    assert torch.equal(*(score(scoring(text, **more), model_snapshot(VOCABULARY)) for text in texts))
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith("[characters skipped: 3; ") and "'é' (U+00E9) at position 2 is not among the 10" in said


@pytest.mark.parametrize("by, separator", [("line", None), ("line", "newline"), ("document", "blank_line")])
def test_a_line_or_document_is_scored_without_its_neighbours(by, separator, tmp_path, scoring, monkeypatch):
    snapshot, end = with_separator(separator), "\n\n" if separator == "blank_line" else "\n"
    parts = ["abc", "", "ab" * 40, "h", "d" * 23, "e" * 24, "f" * 25, "a b"]
    model = sampling.load_model(snapshot, "cpu")
    expected = []
    for part in parts:
        ids = torch.tensor([VOCABULARY.index(c) for c in end + part + end])
        places = range(len(end), len(ids))
        each = [-probabilities(model, ids[(i - 1) // 24 * 24 : i])[-1, ids[i]].log().item() for i in places]
        expected.append([sum(each), sum(each) / len(each), part])
    for last in ("", end):  # with or without the end of the last one
        config = scoring(end.join(parts) + last, by=by, out=str(tmp_path / "scores.tsv"))
        for at_once in (8192, 60, 1):
            monkeypatch.setattr(sampling, "BATCH_CHARACTERS", at_once)
            sampling.print_score(config, {"a.pt": snapshot})
            rows = [line.split("\t") for line in (tmp_path / "scores.tsv").read_text().splitlines()]
            assert [[float(total), float(mean), text] for total, mean, text in rows] == [
                [pytest.approx(total, abs=1e-4), pytest.approx(mean, abs=1e-4), text] for total, mean, text in expected
            ]
        (tmp_path / "scores.tsv").unlink()  # or it is refused: it may be any file


def test_a_newline_that_ends_a_line_is_left_out_if_the_model_has_none(scoring):
    assert score(scoring("cab", by="line", out="unused"), with_separator("|", "abc|")).shape == (1, 3)


def test_a_text_is_read_in_the_format_of_the_runs_if_it_is_named_like_that(tmp_path, capsys):
    snapshot = model_snapshot(VOCABULARY)
    snapshot.config["data"] = {"path": "run.log", "format": "jsonl", "field": "t", "separator": "newline"}
    for name in ("a.log", "a.txt"):
        (tmp_path / name).write_text('{"t": "ab"}\n{"u": 1}\n')
    assert sampling.read_as_trained(str(tmp_path / "a.log"), snapshot, None) == "ab"
    assert "a.log: 1; 1 without t are skipped]" in capsys.readouterr().err
    assert sampling.read_as_trained(str(tmp_path / "a.txt"), snapshot, None) == '{"t": "ab"}\n{"u": 1}\n'


def test_lines_are_computed_together_and_the_logits_of_a_batch_are_limited(scoring, monkeypatch, shapes):
    text = "abc\nde\n" * 50
    score(scoring(text, by="line", out="unused"), model_snapshot(VOCABULARY))
    assert shapes[-1] == (100, 4) and len(shapes) == 2  # the first is the probe
    monkeypatch.setattr(sampling, "BATCH_LOGITS", 48 * len(VOCABULARY))
    shapes.clear()
    score(scoring(text), model_snapshot(VOCABULARY))
    assert max(shapes)[0] == 2


@pytest.mark.parametrize("name", ["scores.tsv", "scores.jsonl"])
def test_each_character_but_the_first_is_scored_into_a_line(name, tmp_path, scoring, capsys):
    text = "ab\n\ncd" * 20
    config = scoring(text, by="character", out=str(tmp_path / name))
    sampling.print_score(config, {"a.pt": model_snapshot(VOCABULARY)})
    lines = (tmp_path / name).read_text().splitlines()
    if name.endswith(".jsonl"):
        rows = [[*json.loads(line).values()] for line in lines]
    else:
        rows = [[*map(float, line.split("\t")[:2]), line.split("\t")[2].replace("\\n", "\n")] for line in lines]
    plain = score(scoring(text), model_snapshot(VOCABULARY))[0].tolist()
    assert rows == [[pytest.approx(nats, abs=1e-5)] * 2 + [c] for nats, c in zip(plain, text[1:], strict=True)]
    assert f"nats in total       {sum(plain):.6f}" in capsys.readouterr().out


# --- runs and errors ---


def test_the_snapshot_of_a_run_is_found_by_its_configuration(run_dir, tmp_path):
    (tmp_path / "config.yaml").write_text("trainer:\n  snapshot_path: in/other.pt\n")
    with pytest.raises(UserError, match=r"there is no snapshot at .*in/other\.pt"):
        choose_snapshot(None, str(tmp_path))
    (tmp_path / "in").mkdir()
    for name in ("other.pt", "other.best.pt"):
        (tmp_path / "in" / name).write_bytes((run_dir / "gpt_snapshot.pt").read_bytes())
        for given in ((None, str(tmp_path)), (str(tmp_path), None)):
            assert choose_snapshot(*given) == str(tmp_path / "in" / name)
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(UserError, match=r"config\.yaml: cannot be read"):
        choose_snapshot(None, str(tmp_path))


def test_the_newest_run_is_the_one_that_logged_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, at in (("b", 200), ("a", 300), ("c", 100)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("{}\n")
        os.utime(folder / "metrics.jsonl", (at, at))
    assert run_directory.runs() == ["runs/a", "runs/b", "runs/c"]
    assert run_directory.newest_run() == "runs/a"


def test_a_text_ends_before_the_stop_string(run_dir):
    snapshot = latest(run_dir)
    texts = functools.partial(drawn, snapshot, prompt="The ", num_samples=5, max_new_tokens=60)
    whole = texts()
    stop = whole[0][20:22]
    for text, stopped in zip(whole, texts(stop=stop), strict=True):
        assert stopped == "The " + text.removeprefix("The ").split(stop)[0]
    with pytest.raises(UserError, match=r"^stop='€': character '€' \(U\+20AC\) at position 0 is not among"):
        texts(stop="€")


def test_the_copied_share_is_of_the_training_text(run_dir):
    result = sample(f"run_dir={run_dir}", "prompt=The ", "max_new_tokens=40", "copied=true")
    assert re.search(r"^\[\d+\.\d% of this is copied from the training text", result.stderr, re.MULTILINE)
    train, held_out = CharDataset(DataConfig(**latest(run_dir).config["data"])).split()
    source = train.decode(train.data.tolist())
    assert sampling.copied_share([train.decode(train.data[100:150]), "#" * 50], source) == 0.5
    assert sampling.copied_share([held_out.decode(held_out.data[:100])], source) == 0


def test_a_training_text_that_is_gone_or_changed_is_one_line(run_dir, tmp_path):
    snapshot = latest(run_dir)
    snapshot.config["data"]["fallback"] = "a field that DataConfig no longer has"
    text = sampling.run_text(snapshot, "new=true", None)
    assert text.digest == snapshot.text_digest
    snapshot.config["data"] |= {"url": SHAKESPEARE_URL, "truncate": 1.0}  # with which no other path is allowed
    (tmp_path / "moved.txt").write_text(text.decode(text.data))
    assert sampling.run_text(snapshot, "new=true", str(tmp_path / "moved.txt")).digest == snapshot.text_digest
    snapshot.text_digest = "0" * 64
    with pytest.raises(UserError, match=r"^new=true: .* is not the text that was trained on"):
        sampling.run_text(snapshot, "new=true", None)
    snapshot.config["data"]["path"] = "gone.txt"
    with pytest.raises(UserError, match=r"^new=true: needs the training text, .*gone\.txt: no such file"):
        sampling.run_text(snapshot, "new=true", None)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_short_lines_are_copied_as_a_whole(end):
    source = end.join(["Ada", "Grace", "Edith"] * 40)
    for texts, share in ((["Ada", "Dith"], 3 / 7), (["Ada\r"], 1), (["Ada\nEhe\nGrace\n"], 10 / 14), ([""], 0)):
        assert sampling.copied_share(texts, source) == share


def test_a_byte_model_reads_and_writes_text(tmp_path):
    book = tmp_path / "book.bin"
    book.write_bytes("größer ".encode() * 400 + b"\xff")
    run = [*TINY, "data=text", f"data.path={book}", "data.truncate=1", "data.encoding=bytes"]
    result = succeed(*run, f"run_dir={tmp_path / 'run'}")
    assert "bits per byte" in result.stdout
    assert "(of which 0.28% do not occur in training)" in result.stdout
    result = sample(f"run_dir={tmp_path / 'run'}", "prompt=größer", "max_new_tokens=9")
    assert result.stdout.startswith("größer"), result.stderr
    result = sample(f"run_dir={tmp_path / 'run'}", "prompt=Ü")
    assert "prompt: byte 0x9c at position 1 is not among the 8 bytes of the training text" in result.stderr
    result = sample(f"run_dir={tmp_path / 'run'}", f"score={book}")
    assert f"bytes scored        {len(book.read_bytes()) - 1}" in result.stdout
    assert "resuming from" in succeed(*run, f"run_dir={tmp_path / 'run'}", "trainer.max_steps=9").stdout


# --- documents, new ones, files ---


@pytest.mark.parametrize("separator, text", [("newline", "\n"), ("blank_line", "\n\n"), ("g\\ng", "g\ng")])
def test_a_sample_is_one_document(separator, text):
    snapshot = with_separator(separator)
    whole = drawn(snapshot, num_samples=4)
    assert whole == drawn(snapshot, num_samples=4, prompt=text)  # the default, which is not shown
    expected = [document.split(text)[0] for document in whole]
    assert drawn(snapshot, num_samples=4, stop="document") == expected != whole


@pytest.mark.parametrize("separator", [None, "none", "newline"])  # the last does not occur in the text
def test_without_documents_stop_document_is_refused(separator):
    with pytest.raises(UserError, match=r"^stop=document: the run's text has no separator"):
        drawn(with_separator(separator, "abc"), stop="document")


@pytest.mark.parametrize("vocabulary, prompt", [("\n\tab", "a\n\tb"), ("\n\\abnt", "a\\n\\tb")])
def test_escapes_are_read_unless_the_text_has_a_backslash(vocabulary, prompt):
    [text] = drawn(model_snapshot(vocabulary), prompt="a\\n\\tb", stop="\\n", max_new_tokens=300)
    stop, more = prompt[1:-2], text.removeprefix(prompt)
    assert text.startswith(prompt) and stop.startswith(("\n", "\\n")) and stop.split("\t")[0] not in more


@pytest.mark.parametrize("known, given", [("NFC", "NFD"), ("NFD", "NFC")])
def test_an_unknown_character_in_another_normal_form_names_the_form(known, given):
    snapshot = model_snapshot("".join(sorted(set(unicodedata.normalize(known, "éa\n")))))
    with pytest.raises(UserError, match=rf"^prompt: character .*; in normal form {known} of Unicode"):
        drawn(snapshot, prompt=unicodedata.normalize(given, "aé"))
    with pytest.raises(UserError, match=r"of the training text$"):
        drawn(snapshot, prompt="z")


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """The run of a list of names."""
    folder = tmp_path_factory.mktemp("names")
    (folder / "names.txt").write_text("\n".join(("anna", "nan", "ann", "na") * 300))
    run = [*TINY, "data=text", f"data.path={folder / 'names.txt'}", "data.truncate=1", "trainer.max_steps=40"]
    succeed(*run, "optimizer.learning_rate=1e-2", f"run_dir={folder}")
    return folder


def test_new_texts_are_not_of_the_runs_text_and_differ(names, tmp_path):
    out = tmp_path / "new.txt"
    arguments = [f"run_dir={names}", "num_samples=10", "new=true", "temperature=1.5"]
    result = sample(*arguments, f"out={out}")
    assert result.returncode == 0 and result.stdout == "", result.stderr
    texts = out.read_text().splitlines()
    assert len(set(texts)) == len(texts) == 10 and not {"", "anna", "nan", "ann", "na"} & set(texts)
    said = r"\[dropped: (\d+) of the run's text, (\d+) drawn before, (\d+) cut off by max_new_tokens\]"
    dropped = re.search(said, result.stderr).groups()
    number = 10 + sum(map(int, dropped))
    all_drawn = sample(*arguments[:1], f"num_samples={number}", "stop=\\n", "temperature=1.5")
    kept = [text for text in dict.fromkeys(all_drawn.stdout.splitlines()) if text in texts]
    assert kept == texts
    assert sample(*arguments).stdout.splitlines() == texts


@pytest.mark.parametrize("encoding, most", [("utf-8", 6), ("bytes", 8)])
def test_a_text_that_is_cut_off_is_not_new(encoding, most, capsys):
    texts = [["", *"größer"], ["", *"größere"]]
    assert [*sampling.only_new(texts, set(), 2, most, encoding)] == texts[:1]
    assert "1 cut off by max_new_tokens" in capsys.readouterr().err


def test_a_stop_of_ones_own_ends_the_known_texts_too(tmp_path, monkeypatch, capsys):
    """Of documents of two lines, the first one is not new."""
    (tmp_path / "t.txt").write_text("ab\nc\n\nab\nc\n\n" * 9)
    data = CharDataset(DataConfig(path=str(tmp_path / "t.txt"), block_size=4, separator="blank_line"))
    snapshot = model_snapshot(data.vocabulary)
    snapshot.text_digest, snapshot.config["data"] = data.digest, vars(data.config)
    (tmp_path / "s.pt").write_bytes(snapshot.to_bytes())
    monkeypatch.setattr(sampling, "sample", lambda *_: [["", "ab"], ["", "b"]])
    sampling.main([f"snapshot={tmp_path / 's.pt'}", "new=true", "stop=\\n"])
    assert capsys.readouterr().out == "b\n"


def test_drawing_ends_if_few_are_new(names, tmp_path):
    settings = ["num_samples=3", "new=true", "temperature=0", "max_new_tokens=50", f"out={tmp_path / 'new.txt'}"]
    result = sample(f"run_dir={names}", *settings)
    texts = (tmp_path / "new.txt").read_text().splitlines()
    said = r"dropped: (\d+) of .* text, (\d+) drawn before, (\d+) cut off .*; only (\d) of 3 are new"
    dropped = [int(number) for number in re.search(said, result.stderr).groups()]
    assert len(texts) == dropped[-1] < 3 and sum(dropped) == 150


def test_texts_of_several_lines_are_written_as_json_only(run_dir, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    arguments = [f"run_dir={run_dir}", "num_samples=2", "max_new_tokens=40"]
    for name, error in (("texts.txt", r"name it \.jsonl"), ("mine.txt", "already exists; give another name")):
        result = sample(*arguments, f"out={tmp_path / name}")
        assert result.returncode == 1 and re.search(rf"^error: out=.*{error}", result.stderr, re.MULTILINE)
    assert os.listdir(tmp_path) == ["mine.txt"] and (tmp_path / "mine.txt").read_text() == "mine"
    sample(*arguments, f"out={tmp_path / 'texts.jsonl'}")
    texts = [json.loads(line)["text"] for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert sample(*arguments).stdout == f"\n{'-' * 40}\n".join(texts) + "\n"


def test_a_setting_of_another_type_in_a_snapshot_is_one_line():
    snapshot = model_snapshot(VOCABULARY)
    snapshot.config["model"]["resid_pdrop"] = "none"
    with pytest.raises(UserError, match=r"model\.resid_pdrop='none': must be a number"):
        sampling.load_model(snapshot, "cpu")


@pytest.mark.parametrize(
    "name, size", [("n_layer", 200_000), ("n_embd", 60_000), ("vocab_size", 10**9), ("ngram_rows", 10**9)]
)
def test_sizes_that_the_weights_do_not_have_are_refused_before_a_model_is_built(name, size):
    snapshot = model_snapshot(VOCABULARY)
    sharded = dataclasses.replace(snapshot, model_state={}, config={"model": {"ngram_rows": 9}})
    assert sharded.model_config["ngram_rows"] == 9  # its weights are elsewhere
    snapshot.config["model"][name] = size
    with pytest.raises(UserError, match=rf"declares model\.{name}={size}, but its weights have"):
        sampling.load_model(snapshot, "cpu")
