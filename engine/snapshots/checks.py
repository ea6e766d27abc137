"""Whether a file that is to be a snapshot may be read: it may be made by hand, to do damage."""

import dataclasses
import io
import pickletools
import re
import types
import typing
import zipfile
from typing import Any

import torch

# All that the pickle in a snapshot refers to; torch allows more, some of which takes memory.
REFERENCES = r"torch \w+Storage|torch\._utils _rebuild_tensor_v2|collections OrderedDict"
# Where shards may lie: names below the snapshot's own folder, that lead nowhere else.
SHARDS_FOLDER, SHARDS_FILE = r"[^/\0]+\.shards/[\w-]+", r"\.?\w[\w.-]*"


def check_contents(content: bytes) -> None:
    """Raises ValueError for an archive or a pickle that is not as `torch.save` writes them.

    Reads names and sizes only. An entry that unpacks to more than the file holds, or a name that
    the unpickler would call to get memory, is found here, before it is acted on.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("an entry is compressed")
        if sum(entry.file_size for entry in entries) > len(content):
            raise ValueError("its entries declare more bytes than the file has")
        # Torch's reader looks at the archive by itself: it must not find another one.
        if not entries or min(entry.header_offset for entry in entries):
            raise ValueError("something stands before its first entry")
        if len({entry.filename.lower() for entry in entries}) < len(entries):
            raise ValueError("two of its entries have the same name")
        pickles = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError("it has no pickle, or several")
        for opcode, argument, _ in pickletools.genops(archive.read(pickles[0])):
            if opcode.name == "GLOBAL":
                if not re.fullmatch(REFERENCES, str(argument)):
                    raise ValueError(f"it refers to {argument!r}, which no snapshot does")
            elif opcode.name in ("STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX"):
                raise ValueError(f"it uses {opcode.name}, which no snapshot does")


def check_fields(cls: type, fields: dict[str, Any], size: int) -> None:
    """Raises ValueError unless `fields` are those of `cls`, each of its type, with tensors of no
    more than `size` bytes.
    """
    kinds = {f.name: f.type for f in dataclasses.fields(cls)}
    if fields.keys() != kinds.keys():
        raise ValueError(f"its fields are {', '.join(map(str, fields))}")
    for name, kind in kinds.items():
        plain: Any = kind if isinstance(kind, types.UnionType) else typing.get_origin(kind) or kind
        if not isinstance(fields[name], plain):
            raise ValueError(f"{name} is of type {type(fields[name]).__name__}")
    if min(fields["step"], fields["windows_seen"]) < 0:
        raise ValueError(f"its step is {fields['step']}")
    for group in ("data", "model", "optimizer", "trainer"):
        if not isinstance(fields["config"].get(group, {}), dict):
            raise ValueError(f"config.{group} is {fields['config'][group]!r}")
    if fields["shards"]:
        check_shards_field(fields["shards"])
    left = size  # a value takes a byte of the file at least, and a tensor all of its own
    counted: set[tuple] = set()  # one of two names, as a tied head is, is in the file once

    def count(value: Any) -> None:
        nonlocal left
        left -= 1
        if isinstance(value, torch.Tensor):
            same = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            left -= value.nbytes if same not in counted else 0
            counted.add(same)
        if left < 0:
            raise ValueError("its values declare more bytes than the file has")
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        if isinstance(inner, list | tuple | set):
            for one in inner:
                count(one)

    count(fields)


def check_shards_field(shards: dict[str, Any]) -> None:
    """Raises ValueError unless `shards` is as `Snapshot` describes it, with names that stay in the
    snapshot's folder. The metadata, which is a pickle, must be among what has a digest.
    """
    folder, files = shards.get("folder"), shards.get("files")
    if not isinstance(folder, str) or not re.fullmatch(SHARDS_FOLDER, folder):
        raise ValueError(f"shards.folder is {folder!r}, not NAME.shards/NAME")
    if not isinstance(files, dict) or ".metadata" not in files:
        raise ValueError("shards.files does not name the shards and their .metadata")
    for name, about in files.items():
        if not isinstance(name, str) or not re.fullmatch(SHARDS_FILE, name):
            raise ValueError(f"shards.files has {name!r}, which is not the plain name of a file")
        if not isinstance(about, list) or [type(value) for value in about] != [int, str]:
            raise ValueError(f"shards.files has {about!r} for {name}, not its size and SHA-256")
