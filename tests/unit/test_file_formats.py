"""Files of our own formats come back as written; any other file is refused by format, schema or digest."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from emad_ref.errors import BadArgument, EmadError
from emad_ref.file_formats import FileFormat
from emad_ref.files import BadFile, require_replaceable_file

CONTENT = {"said": "ü \ud800 ", "numbers": [1, 0.1, -0.0, 1e300], "pair": (1, 2), "by": {"b": None, "a": {}}, 3: True}
TENSORS = {
    "b": torch.arange(6).reshape(2, 3),
    "a": torch.tensor([0.1, -2.0], dtype=torch.float64),
    "half": torch.tensor(0.3, dtype=torch.bfloat16),
    "none": torch.empty(0, 3),
}


class BadThing(EmadError):
    """The error of this format."""


THING = FileFormat("thing", 7, "make it again with `emad thing`", BadThing)


def write(kind: str, path: Path, form: FileFormat = THING, **changes: Any) -> bytes:
    """Write a file of either kind; returns its bytes."""
    if kind == "JSON":
        form.write_json(path, CONTENT | changes)
    else:
        form.write_tensors(path, TENSORS, CONTENT | changes)
    return path.read_bytes()


def read(kind: str, path: Path | str) -> Any:
    return THING.read_json(path) if kind == "JSON" else THING.read_tensors(path)


both_kinds = pytest.mark.parametrize("kind", ["JSON", "tensors"])


@both_kinds
def test_what_was_written_is_read(tmp_path, kind):
    write(kind, tmp_path / "t")
    found = read(kind, str(tmp_path / "t"))
    if kind == "tensors":
        tensors, found = found
        assert {name: (one.dtype, one.tolist()) for name, one in tensors.items()} == {
            name: (one.dtype, one.tolist()) for name, one in TENSORS.items()
        }
    assert found == json.loads(json.dumps(CONTENT))
    assert list(found) == [str(key) for key in CONTENT]


def test_a_json_file_may_be_indented_in_another_way(tmp_path):
    stored = json.loads(write("JSON", tmp_path / "t"))
    assert list(stored)[:3] == ["format", "schema", "sha256"]
    (tmp_path / "t").write_text(json.dumps(stored))
    assert THING.read_json(tmp_path / "t")["numbers"] == CONTENT["numbers"]


@both_kinds
def test_every_changed_byte_is_seen(tmp_path, kind):
    whole = write(kind, tmp_path / "t")
    for at in range(0, len(whole), 1 if len(whole) < 1000 else 7):
        (tmp_path / "t").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(BadThing, match=r"^thing='.*/t' .*; make it again with `emad thing`$"):
            read(kind, tmp_path / "t")


@both_kinds
@pytest.mark.parametrize("kept", [0, 1, 7, 8, 9, 200, -1, -8, -200])
def test_a_cut_file_is_refused(tmp_path, kind, kept):
    whole = write(kind, tmp_path / "t")
    if kind == "JSON" and kept == -1:
        return  # the line's end
    (tmp_path / "t").write_bytes(whole[:kept])
    with pytest.raises(BadThing, match=r"^thing='.*/t' cannot be read \(.*\); make it again with `emad thing`$"):
        read(kind, tmp_path / "t")


@both_kinds
@pytest.mark.parametrize(
    ("other", "said"),
    [
        (FileFormat("profile", 7, "", BadThing), "has format='profile', but expected 'thing'"),
        (FileFormat("thing", 6, "", BadThing), "has schema=6, but this version reads 7 alone"),
        (FileFormat("thing", 8, "", BadThing), "has schema=8, but this version reads 7 alone"),
    ],
    ids=["format", "older", "newer"],
)
def test_another_format_and_another_schema_are_named(tmp_path, kind, other, said):
    write(kind, tmp_path / "t", other)
    with pytest.raises(BadThing, match=rf"^thing='.*/t' {re.escape(said)}; make it again with `emad thing`$"):
        read(kind, tmp_path / "t")


@both_kinds
def test_a_file_that_was_changed_says_so(tmp_path, kind):
    whole = write(kind, tmp_path / "t", sum=123)
    (tmp_path / "t").write_bytes(whole.replace(b"123", b"124"))
    with pytest.raises(BadThing, match=r"has sha256=.{12}…, but its content gives .{12}…: it was changed or"):
        read(kind, tmp_path / "t")


def test_tensors_that_change_places_are_seen(tmp_path):
    import safetensors.torch

    whole = write("tensors", tmp_path / "t")
    length = int.from_bytes(whole[:8], "little")
    metadata = json.loads(whole[8 : 8 + length])["__metadata__"]
    for tensors in (
        {**TENSORS, "b": TENSORS["b"].reshape(3, 2)},
        {**TENSORS, "b": TENSORS["b"].double()},
        {**TENSORS, "more": torch.zeros(1)},
        {name: tensor for name, tensor in TENSORS.items() if name != "none"},
        {{"a": "c"}.get(name, name): tensor for name, tensor in TENSORS.items()},
    ):
        (tmp_path / "t").write_bytes(safetensors.torch.save(tensors, metadata=metadata))
        with pytest.raises(BadThing, match="it was changed or cut"):
            THING.read_tensors(tmp_path / "t")


@both_kinds
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"\xff\xfe", b"\x02\0\0\0\0\0\0\0{}", b'{"a": 1, "a": 2}', b'{"format": "thing"}']
)
def test_a_foreign_file_is_one_clear_error(tmp_path, kind, content):
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(BadThing, match=r"^thing='.*/t' .*; make it again with `emad thing`$"):
        read(kind, tmp_path / "t")
    with pytest.raises(BadThing, match=r"cannot be read \(No such file or directory\)"):
        read(kind, tmp_path / "none")
    with pytest.raises(BadArgument, match="thing=0, but expected a path"):
        read(kind, 0)  # type: ignore[arg-type]


def test_numbers_that_json_lacks_are_not_written(tmp_path):
    for kind in ("JSON", "tensors"):
        with pytest.raises(ValueError, match="not JSON compliant"):
            write(kind, tmp_path / "t", sum=float("nan"))
    assert list(tmp_path.iterdir()) == []


@both_kinds
def test_only_a_file_of_the_format_may_be_replaced(tmp_path, kind):
    write(kind, tmp_path / "t")
    require_replaceable_file(tmp_path / "t", "out", "a thing", THING.start)
    for other in (FileFormat("things", 7, "", BadThing), FileFormat("exit", 7, "", BadThing)):
        write(kind, tmp_path / "t", other)
        with pytest.raises(BadFile, match="expected a new file, or a thing to replace"):
            require_replaceable_file(tmp_path / "t", "out", "a thing", THING.start)


def test_json_needs_no_torch(tmp_path):
    """``emad verify`` reads a report; torch takes seconds to import."""
    write("JSON", tmp_path / "t")
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from emad_ref.errors import EmadError; from emad_ref.file_formats import FileFormat\n"
        f"FileFormat('thing', 7, '', EmadError).read_json({str(tmp_path / 't')!r})"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
