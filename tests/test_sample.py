import pytest
from conftest import TINY, start

from errors import UserError
from history import choose_snapshot


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    assert start(*TINY, f"run_dir={path}").returncode == 0
    return path


def sample(*arguments, **kwargs):
    return start(*arguments, script="sample.py", **kwargs)


def test_a_snapshot_alone_is_enough(run_dir, tmp_path):
    copy = tmp_path / "alone.pt"
    copy.write_bytes((run_dir / "gpt_snapshot.pt").read_bytes())
    result = sample(f"snapshot={copy}", "max_new_tokens=30", "num_samples=2", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.split("-" * 40 + "\n")
    assert (
        len(first) == len(second) == 32 and first[0] == second[0] == "\n"
    )  # newline, 30, the one that print adds


def test_a_prompt_is_taken_as_it_is_and_a_seed_repeats(run_dir):
    arguments = [
        f"run_dir={run_dir}",
        "max_new_tokens=40",
        "top_k=10",
        "top_p=0.9",
        "temperature=0.9",
    ]
    prompt = 'prompt=a: b, (c) = [d] "e" #1.3 + %'
    a, b, c = (sample(*arguments, prompt, f"seed={seed}").stdout for seed in (1, 1, 2))
    assert a == b != c and a.startswith(prompt.removeprefix("prompt="))


def test_the_newest_run_is_found(run_dir, tmp_path):
    (tmp_path / "runs" / "sweep").mkdir(parents=True)
    (tmp_path / "runs" / "sweep" / "0").symlink_to(run_dir)
    result = sample("max_new_tokens=3", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "gpt_snapshot.best.pt" in result.stderr


def test_the_snapshot_of_a_run_is_where_its_configuration_says(run_dir, tmp_path):
    (tmp_path / "config.yaml").write_text("trainer:\n  snapshot_path: in/other.pt\n")
    with pytest.raises(UserError, match=r"there is no snapshot at .*in/other\.pt"):
        choose_snapshot(None, str(tmp_path))
    (tmp_path / "in").mkdir()
    for name in ("other.pt", "other.best.pt"):
        (tmp_path / "in" / name).write_bytes((run_dir / "gpt_snapshot.pt").read_bytes())
        assert choose_snapshot(None, str(tmp_path)) == str(tmp_path / "in" / name)
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(UserError, match=r"config\.yaml: cannot be read"):
        choose_snapshot(None, str(tmp_path))


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["prompt=漢"], "prompt: character '漢' (U+6F22) at position 0 is not in the vocabulary"),
        (["top_k=0"], "top_k=0: must be at least 1"),
        (["top_k=a"], "top_k: Value 'a' of type 'str' could not be converted to Integer"),
        (["prompt="], "prompt=: is empty"),
        (["temprature=1"], "temprature=1: not an argument; there are prompt="),
        (["snapshot=nowhere.pt"], "nowhere.pt: no such snapshot"),
        (["snapshot=/etc/hostname"], "/etc/hostname: not a whole snapshot"),
        (["run_dir=nowhere"], "run_dir=nowhere: there is no snapshot at nowhere/gpt_snapshot.pt"),
    ],
)
def test_bad_input_gets_one_line(run_dir, arguments, says):
    given = [] if arguments[0].startswith(("snapshot", "run_dir")) else [f"run_dir={run_dir}"]
    result = sample(*given, *arguments)
    assert result.returncode == 1
    errors = [line for line in result.stderr.splitlines() if not line.startswith("[")]
    assert len(errors) == 1 and errors[0].startswith("error: ") and says in errors[0], result.stderr


def test_without_any_run_there_is_one_line(tmp_path):
    result = sample(cwd=tmp_path)
    assert result.returncode == 1 and "no run under runs/" in result.stderr
