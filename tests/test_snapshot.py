"""Snapshot format: snapshots round-trip, and other files are refused."""

import dataclasses
import hashlib
import io
import os
import pickle
import random
import zipfile

import pytest
import torch
from conftest import equal, some_snapshot

from engine.errors import UserError
from engine.snapshots.snapshot import COMMENT, Snapshot, SnapshotError, check_can_resume, verify


def test_a_snapshot_round_trips_also_by_torch_load_with_weights_only():
    content = some_snapshot().to_bytes()
    assert equal(Snapshot.from_bytes(content, "s.pt"), some_snapshot())
    assert equal(Snapshot(**torch.load(io.BytesIO(content), weights_only=True)), some_snapshot())


def test_a_tensor_of_two_names_is_stored_once():
    weight = torch.randn(1000)
    tied = Snapshot({"a": weight, "b": weight}, {}).map_tensors(torch.clone)
    assert tied.model_state["a"] is tied.model_state["b"] is not weight
    assert len(tied.to_bytes()) < 2 * weight.nbytes
    read = Snapshot.from_bytes(tied.to_bytes(), "s.pt").model_state
    assert torch.equal(read["a"], weight) and torch.equal(read["b"], weight)


def test_any_flipped_bit_or_truncation_is_found():
    content = bytes(some_snapshot().to_bytes())
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << (position % 8)
        for changed in (bytes(damaged), content[:position]):
            with pytest.raises(SnapshotError):
                verify(changed, "x.pt")


# --- made by hand: the digest is right, the content is not ---


def sealed(content: bytes) -> bytes:
    """`content`, a bare ZIP archive, with a digest as a snapshot has it."""
    content = content[:-2] + (len(COMMENT) + 64).to_bytes(2, "little") + COMMENT
    return content + hashlib.sha256(content).hexdigest().encode()


def archive(change=lambda name, data: data, compression=zipfile.ZIP_STORED) -> bytes:
    """A snapshot's archive with `change(name, data)` for every entry."""
    source = zipfile.ZipFile(io.BytesIO(some_snapshot().to_bytes()))
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", compression) as out:
        for name in source.namelist():
            out.writestr(name, change(name, source.read(name)))
    return sealed(target.getvalue())


def with_pickle(data: bytes) -> bytes:
    return archive(lambda name, old: data if name.endswith("data.pkl") else old)


def saved(**fields) -> bytes:
    """A file of torch.save with the fields of a snapshot, some of them others."""
    buffer = io.BytesIO()
    torch.save(dataclasses.asdict(some_snapshot()) | fields, buffer)
    return sealed(buffer.getvalue())


class Touch:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_code_in_a_snapshot_is_not_run(tmp_path):
    victim = tmp_path / "made"
    for protocol in (0, 2, 4, 5):
        with pytest.raises(UserError, match=r"s\.pt: not a snapshot of this application"):
            Snapshot.from_bytes(with_pickle(pickle.dumps(Touch(str(victim)), protocol)), "s.pt")
    assert not victim.exists()


def swell(name: str, data: bytes) -> bytes:
    """An entry with 16 MiB of zeros, which compress to 16 KiB."""
    return data + bytes(2**24 if name.endswith("/version") else 0)


FOREIGN = "not a snapshot of this application: "


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "not a complete snapshot"),
        (b"PK\x03\x04" * 50, "not a complete snapshot"),
        (archive(swell, zipfile.ZIP_DEFLATED), f"{FOREIGN}its entries declare more bytes than the file has"),
        (with_pickle(b"\x80\x02]."), f"{FOREIGN}.*list"),
        (saved(format=1), "snapshot format 1; this application reads 4, 5, 6"),
        (saved(extra=1), f"{FOREIGN}.*unexpected keyword argument 'extra'"),
        (saved(model_state=[]), FOREIGN),
        (saved(model_state={1: 2}), FOREIGN),
        (saved(config={"data": {"separator": 5}}), FOREIGN),
        (saved(model_state={"weight": torch.zeros(2, device="meta")}), FOREIGN),
        (saved(model_state={"weight": torch.zeros(2).to_sparse()}), FOREIGN),
        (saved(config={"trainer": [], "model": {}}), FOREIGN),
        (saved(optimizer_state={"b": 1}), FOREIGN),
        (saved(shards={"folder": "f", "files": {"x": 1}}), FOREIGN),
        (saved(shards={"folder": 3, "files": {}}), FOREIGN),
    ],
)
def test_another_type_of_file_is_refused(content, says):
    with pytest.raises(UserError, match=f"^s.pt: {says}"):
        Snapshot.from_bytes(content, "s.pt")


def test_settings_of_a_text_that_have_another_type_are_refused():
    snapshot = some_snapshot()
    for settings, says in (({"encoding": 7}, "data.encoding=7: must be bytes"), ({"cache_dir": 5}, "invalid settings")):
        snapshot.config = {"data": settings}
        with pytest.raises(UserError, match=says):
            snapshot.data_config(path="t.txt")


def test_garbage_with_a_valid_digest_is_refused():
    chance = random.Random(0)
    body = archive()[: -len(COMMENT) - 64]
    refused = 0
    for _ in range(200):
        damaged = bytearray(body)
        for _ in range(chance.randrange(1, 20)):
            damaged[chance.randrange(len(damaged) - 22)] = chance.randrange(256)
        try:
            Snapshot.from_bytes(sealed(bytes(damaged)), "s.pt")
        except UserError as error:
            refused += 1
            assert str(error).startswith("s.pt: ") and "\n" not in str(error)
    assert refused > 20  # most of the bytes are the tensors', of which any are valid


# --- resuming ---


def test_only_a_change_that_would_alter_the_run_is_refused():
    saved = some_snapshot()
    saved.config = {"data": {"path": "a.txt"}, "model": {"n_layer": 2}, "trainer": {"batch_size": 8, "max_steps": 5}}
    now = {"data": {"path": "b.txt"}, "model": {"n_layer": 2}, "trainer": {"batch_size": 8, "max_steps": 9}}

    def resume(config: dict, text_digest: str) -> None:
        defaults = {"model.n_layer": 1, "model.gain": 1.0}
        check_can_resume(saved, "s.pt", config, defaults, text_digest)

    resume(now, "ab")
    now["model"]["gain"] = 1.0  # a setting that the snapshot does not know had its default
    resume(now, "ab")
    with pytest.raises(UserError, match=r"model.gain was 1.0, is 3.0"):
        resume({"model": {"gain": 3.0}}, "ab")
    now["model"]["n_layer"] = 3
    now["trainer"]["batch_size"] = 4
    with pytest.raises(UserError, match=r"model.n_layer was 2, is 3; trainer.batch_size was 8, is 4.*run_name="):
        resume(now, "ab")
    with pytest.raises(UserError, match=r"had SHA-256 .* has "):
        resume(saved.config, "cd")


def test_the_loss_is_shown_with_its_step():
    assert str(Snapshot({}, {}, step=7)) == "step 7"
    assert str(Snapshot({}, {}, step=7, loss=1.5, loss_step=7)) == "step 7, held-out loss 1.5000"
    stopped = Snapshot({}, {}, step=7, loss=1.5, loss_step=5)
    assert str(stopped) == "step 7, held-out loss 1.5000 at step 5"
