"""Snapshots in an object store: a real S3 server on this machine, and a network that fails."""

import contextlib
import socket
import socketserver
import sys
import threading

import pytest
from conftest import CREDENTIALS, TINY, equal, metrics, some_snapshot, start, succeed

from engine.errors import UserError
from engine.snapshots.manager import SnapshotManager
from engine.snapshots.state import State
from engine.snapshots.storage import SnapshotStorage, load
from trainer import TrainerConfig

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")


class Network(socketserver.ThreadingTCPServer):
    """Passes connections on to the server at `port`, of each at most `limit` bytes in either direction."""

    daemon_threads = allow_reuse_address = True

    def __init__(self, port: int):
        super().__init__(("127.0.0.1", 0), Connection)
        self.port, self.limit = port, sys.maxsize
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *_) -> None:
        pass  # a client that goes away


class Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.server.port)) as server:
            back = threading.Thread(target=self.pass_on, args=(server, self.request), daemon=True)
            back.start()
            self.pass_on(self.request, server)
            back.join(timeout=30)

    def pass_on(self, source, target) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while (left := self.server.limit - passed) > 0 and (data := source.recv(1 << 16)):
                target.sendall(data[:left])
                passed += len(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def server():
    """The port of an S3 server that forgets all when it ends."""
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture
def network(server, monkeypatch, tmp_path):
    """A network before the server, and the environment with which to reach the one by the other."""
    network = Network(server)
    address = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{network.server_address[1]}", "AWS_MAX_ATTEMPTS": "2"}
    files = dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), str(tmp_path / "none"))
    for name, value in (CREDENTIALS | address | files).items():
        monkeypatch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    file_system = fsspec.filesystem("s3")
    if not file_system.exists("bucket"):
        file_system.mkdir("bucket")
    yield network
    network.limit = sys.maxsize
    for path in file_system.find("bucket"):
        file_system.rm_file(path)
    network.shutdown()
    network.server_close()


@pytest.fixture
def files(network):
    return SnapshotStorage("s3://bucket/lr=[1]*/s.pt", keep=2)  # a name, no pattern


def write(files, step, is_best=False):
    files.write(some_snapshot(step).to_bytes(), step, is_best, is_numbered=True)


def names() -> list[str]:
    file_system = fsspec.filesystem("s3")
    file_system.invalidate_cache()
    return [path.rpartition("/")[2] for path in file_system.find("bucket")]


def test_a_store_gets_the_same_files_as_a_disk(files, caplog):
    for step in (1, 2, 3):
        write(files, step, is_best=step == 2)
    assert names() == ["s.best.pt", "s.prev.pt", "s.pt", "s.step00000002.pt", "s.step00000003.pt"]
    assert [load(path).step for path in files.all()] == [3, 2, 2, 2, 3]
    assert equal(load(files.path), some_snapshot(3))
    for path in (files.path, f"{files.path[:-3]}.step00000003.pt"):
        with fsspec.open(path, expand=False) as file:
            content = bytearray(file.read())
        content[len(content) // 2] ^= 1
        files._put(path, content)
    assert files.recover()[0].step == load(files.path).step == 2
    assert "damaged" in caplog.text and "s.damaged1.pt" in names()


def test_a_network_failure_while_saving_is_a_warning(files, network, caplog, tmp_path):
    write(files, 1)
    snapshots = SnapshotManager(TrainerConfig(snapshot_path=files.path, keep_snapshots=2), str(tmp_path))
    for step, limit in ((2, 3000), (3, sys.maxsize)):
        network.limit = limit
        snapshots.save(some_snapshot(step), True, loss=1.0)
        snapshots.wait(State())
        network.limit = sys.maxsize
        assert bool(snapshots.last_error) == (step == 2)
        assert load(files.path).step == (1 if step == 2 else 3)
    assert f"step 2: the snapshot was not written to {files.path}" in caplog.text
    assert not [name for name in names() if "tmp" in name]


@pytest.mark.parametrize("limit", [0, 1000, 3000])
def test_a_network_failure_while_reading_is_neither_damage_nor_a_fresh_start(files, network, limit):
    for step in (1, 2):
        write(files, step)
    before = names()
    network.limit = limit
    with pytest.raises(UserError, match=r"s\.pt: cannot be reached"):
        files.recover()
    network.limit = sys.maxsize
    assert names() == before and files.recover()[0].step == 2


def test_a_save_cut_off_after_any_request_leaves_a_good_snapshot(files, monkeypatch):
    """Each request to the store in turn is the last that comes through."""
    write(files, 1)
    write(files, 2)
    fs = type(files.file_system)
    call, left = fs._call_s3, [0]

    async def cut_off(self, method, *args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise PermissionError(f"{method} is cut off")  # s3fs does not try that again
        return await call(self, method, *args, **kwargs)

    reached, done = [], False
    while not done:
        left[0] = len(reached)
        with monkeypatch.context() as patch:
            patch.setattr(fs, "_call_s3", cut_off)
            try:
                write(files, 3, is_best=True)
                done = True
            except (OSError, UserError):
                assert len(reached) < 60
        files.prepare()
        reached.append(files.recover()[0].step)
        assert reached[-1] in (2, 3) and load(files.previous_path).step in (1, 2, 3)
        assert not [name for name in names() if "tmp" in name]
    assert len(reached) > 6 and reached == sorted(reached)


def test_a_run_on_a_fresh_disk_resumes_from_the_store(network, tmp_path):
    settings = [*TINY, "trainer.snapshot_path=s3://bucket/run/gpt.pt", "trainer.save_every_steps=2"]
    succeed(*settings, f"run_dir={tmp_path / 'a'}")
    second = succeed(*settings, f"run_dir={tmp_path / 'b'}", "trainer.max_steps=8")
    assert "resuming from s3://bucket/run/gpt.pt, step 6" in second.stdout
    assert "metrics.jsonl: missing 8 of 8 lines up to step 6" in second.stdout
    assert [x["step"] for x in metrics(tmp_path / "b", "train")] == [7, 8]
    assert names() == ["gpt.best.pt", "gpt.prev.pt", "gpt.pt"]
    sampled = succeed("snapshot=s3://bucket/run/gpt.pt", "max_new_tokens=20", script="sample.py")
    assert "step 8" in sampled.stderr


@pytest.mark.parametrize(
    "path, environment, says",
    [
        ("s3://bucket/run/gpt.pt", {"AWS_ACCESS_KEY_ID": ""}, "credentials"),
        ("s3://bucket/run/gpt.pt", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "connect"),
        ("s3://nowhere/run/gpt.pt", {}, "nowhere"),
    ],
)
def test_a_store_that_cannot_be_used_gets_one_line_before_training(
    network, tmp_path, path, environment, says, monkeypatch
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    result = start(*TINY, f"run_dir={tmp_path}", f"trainer.snapshot_path={path}")
    assert result.returncode == 1 and result.stderr.startswith("error: "), result.stderr
    assert result.stderr.count("\n") == 1 and says in result.stderr.lower()
    assert "step 1/" not in result.stdout
