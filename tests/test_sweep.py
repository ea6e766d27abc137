"""Sweeps: every job in its directory, and all of them in the table at the end."""

import re
import signal
from pathlib import Path

import pytest
from conftest import LONG, TINY, UNREAD, lines, metrics, start, succeed, wait_until

from engine.config.overrides import job_name
from engine.errors import UserError
from engine.reports.history import Run
from engine.reports.sweep import check_sweep, read_jobs, table


def job(path: Path, *overrides: str, loss: float | None = 2.0, status: str = "finished") -> Run:
    run = Run(str(path))
    run.step, run.val = 10, [] if loss is None else [{"step": 5, "loss": loss}]
    run.job = {"overrides": ["a=1", *overrides], "status": status}
    run.starts = [{"total_steps": 10, "text_sha256": "ab"}]
    run.config = {"data": {}, **dict(override.split("=") for override in overrides)}
    return run


def test_a_sweep_ends_with_its_table_and_is_not_repeated(tmp_path):
    run = tmp_path / "run [1]"  # no pattern, for all that
    sweep = ["-m", *TINY, "optimizer.learning_rate=1e-3,1e-2", f"run_dir={run}"]
    result, again = succeed(*sweep), succeed(*sweep)
    assert again.stdout.count("this run is finished") == 2
    jobs = read_jobs(f"{run}.sweep")
    rates = [f"optimizer.learning_rate={rate}" for rate in ("0.01", "0.001")]
    assert [job.job["overrides"][-2] for job in jobs] == rates
    for found in jobs:
        assert (found.step, found.job["status"]) == (6, "finished")
        best = min(metrics(Path(found.path), "val"), key=lambda line: line["loss"])
        assert (found.best["loss"], found.best["step"]) == (best["loss"], best["step"])
        assert found.characters_per_s > 0
    shown = table(jobs)
    assert shown[1].startswith("learning_rate=0.01 ") and max(map(len, shown)) < 80
    best = f"sample      python sample.py run_dir='{jobs[0].path}'"
    for each in (result, again):
        assert each.stdout.splitlines()[-len(shown) - 1 :] == [*shown, best]


@pytest.mark.parametrize("swept", ["experiment=overfit,shakespeare_quick", "run_name=a,b"])
def test_jobs_whose_recipe_or_name_differs_are_of_one_sweep(swept, tmp_path):
    settings = [s for s in TINY if not s.startswith("experiment") or "run_name" in swept]
    result = succeed(*settings, "-m", swept, "trainer.max_steps=2", cwd=tmp_path)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run.sweep"]
    jobs = read_jobs(str(tmp_path / "runs" / "run.sweep"))
    assert [job.job["status"] for job in jobs] == ["finished"] * 2
    assert result.stdout.splitlines()[-4:-1] == table(jobs)


def test_different_jobs_have_different_directories_and_the_same_job_has_its_own():
    jobs = [["data.path=a/b.txt"], ["data.path=a_b.txt"], ["data.path=a:b.txt"], ["x=1"], []]
    jobs += [[f"a.long.key={'x' * 200}{end}"] for end in "ab"]
    names = [job_name(job) for job in jobs]
    assert len(set(names)) == len(names) and all(8 < len(name) <= 120 for name in names)
    assert all(re.fullmatch(r"[\w.,=+-]+", name) for name in names)
    assert job_name(["b=2", "a=1"]) == job_name(["a=1", "b=2"])
    swept = [job_name([f"a={a}", f"b={b}"], "b") for a in (1, 2) for b in (1, 2)]
    assert len(set(swept)) == 4 and [name[:4] for name in swept] == ["b=1-", "b=2-"] * 2


def test_a_failed_job_is_in_the_table_and_in_the_status_and_stops_no_other(tmp_path):
    heads = ["-m", *TINY, f"run_dir={tmp_path / 'run'}", "model.n_head=3,4"]
    result = start(*heads)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    rows = [line.split() for line in result.stdout.splitlines()[-3:-1]]
    assert [(row[0], *row[-2:]) for row in rows] == [("n_head=4", "6", "finished"), ("n_head=3", "0", "failed")]


def test_a_stopped_sweep_prints_its_table_and_keeps_the_status_of_its_job(tmp_path, begin):
    process = begin("-m", *LONG, "trainer.seed=1,2", f"run_dir={tmp_path / 'run'}")
    wait_until(lambda: any(lines(p) > 5 for p in tmp_path.glob("run.sweep/*/")), process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, out
    assert "Traceback" not in out and "SIGTERM: stopped after step" in out
    assert out.splitlines()[-1].endswith("stopped")
    (stopped,) = read_jobs(f"{tmp_path / 'run'}.sweep")
    assert "trainer.seed=1" in stopped.job["overrides"] and stopped.step > 5


def test_an_impossible_sweep_directory_gets_one_line(tmp_path):
    (tmp_path / "run.sweep").write_text("my thesis\n")
    result = start("-m", *TINY, "trainer.seed=1,2", f"run_dir={tmp_path / 'run'}")
    assert result.returncode == 1
    assert result.stderr == f"error: {tmp_path / 'run.sweep'}: File exists\n"
    assert (tmp_path / "run.sweep").read_text() == "my thesis\n"


def test_the_table_names_jobs_by_what_differs_and_has_means_over_seeds(tmp_path):
    losses = {(0.2, 1): 2.0, (0.2, 2): 2.5, (3, 1): 1.0, (3, 2): 1.5, (4, 1): 0.5}
    jobs = [job(tmp_path, f"x.lr={rate}", f"trainer.seed={seed}", loss=loss) for (rate, seed), loss in losses.items()]
    jobs.append(job(tmp_path, "x.lr=4", "trainer.seed=2", loss=None, status="failed"))
    shown = [" ".join(line.split()) for line in table(jobs)]
    assert shown[1] == "lr=0.2 seed=1 2.0000 5 10 finished"
    assert shown[len(jobs) :] == [
        "lr=4 seed=2 - - 10 failed",
        "mean of 2 seeds: lr=3 1.2500 ± 3.1765 (95 %), deviation 0.3536",
        "mean of 2 seeds: lr=0.2 2.2500 ± 3.1765 (95 %), deviation 0.3536",
        "the best two means do not differ by more than chance: by 1.0000 ± 1.5213 (95 %)",
    ]
    assert " ".join(table(jobs[:2])[-1].split()) == "mean of 2 seeds 2.2500 ± 3.1765 (95 %), deviation 0.3536"
    assert table(jobs[:1])[1].startswith(f"{tmp_path.name} ")


def test_a_sweep_over_texts_recommends_none(tmp_path, text_file):
    other = tmp_path / "other.txt"
    other.write_text("".join(reversed(text_file.read_text())))
    paths = f"data.path={text_file},{other}"
    result = succeed("-m", *UNREAD, "data.block_size=16", paths, f"run_dir={tmp_path / 'run'}", "run_name=both")
    said = "warning: The runs have different texts, encodings or splits: their losses cannot be compared."
    assert result.stdout.splitlines()[-1] == said


def test_a_sweep_over_texts_needs_a_name():
    texts = ["-m", "data=text", "data.path=a.txt,b.txt"]
    with pytest.raises(UserError, match="needs a name: run_name=NAME"):
        check_sweep(texts)
    check_sweep([*texts, "run_name=both"])
