"""Reading and writing any file gives its content, or one error that names argument, path and reason."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from emad_ref.errors import BadArgument
from emad_ref.files import (
    BadFile,
    append_text,
    open_for_atomic_write,
    open_regular_file,
    read_json,
    read_lines,
    read_text,
    read_toml,
    remove_file,
    require_writable,
    write_atomically,
)


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def device(path: Path) -> Path:
    """Return our own device if permitted, so that an error that replaces it costs the machine nothing."""
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 7))  # the numbers of /dev/full
    except PermissionError:
        return Path("/dev/full")  # a user who may not make one cannot replace this one either
    return path


def linked(path: Path) -> Path:
    path.symlink_to(device(path.with_name("device")))
    return path


KINDS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "absent": (lambda path: path, "No such file or directory"),
    "folder": (lambda path: path.mkdir() or path, "folder|directory"),
    "below a file": (lambda path: path.write_text("x") and path / "below", "Not a directory"),
    "device": (device, "it is a device"),
    "link to a device": (linked, "it is a device"),
    "link to itself": (lambda path: path.symlink_to(path) or path, "Too many levels of symbolic links"),
    "pipe": (pipe, "it is a pipe"),
    "long name": (lambda path: path.with_name("x" * 300), "File name too long"),
    "NUL": (lambda path: path.with_name("a\0b"), "null byte"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file_is_not_read(tmp_path: Path, kind: str) -> None:
    make, said = KINDS[kind]
    path = make(tmp_path / "file")
    for reader in (read_json, read_toml, lambda *given: list(read_lines(*given))):
        with pytest.raises(BadFile, match=rf"^profile='.*, but expected a file.*({said})") as refused:
            reader(path, "profile")
        assert isinstance(refused.value, BadArgument)
        assert isinstance(refused.value, OSError)
        assert refused.value.strerror == refused.value.reason


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "absent"])
def test_what_is_no_regular_file_is_not_written_to_and_stays_as_it_is(tmp_path: Path, kind: str) -> None:
    make, said = KINDS[kind]
    path = make(tmp_path / "file")
    before = {entry.name: stat.S_IFMT(os.lstat(entry).st_mode) for entry in tmp_path.iterdir()}
    attempts = (
        lambda: require_writable(path, "out"),
        lambda: write_atomically(path, "text", "out"),
        lambda: append_text(path, "text", "out"),
    )
    for attempt in attempts:
        with pytest.raises(BadFile, match=rf"^out='.*, but expected .*({said})"):
            attempt()
    assert {entry.name: stat.S_IFMT(os.lstat(entry).st_mode) for entry in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "Expecting value"),
        (b'{"a": [1, 2', "Expecting"),
        (b"\xff\xfe", "a file in UTF-8; convert it first"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b"1" * 10_000, "a whole number of 10000 digits is beyond 64 bits"),
        (b"[-9223372036854775809]", "beyond 64 bits"),
        (b"[1e999]", "the number 1e999 is beyond what a float holds"),
        (b"[NaN]", "NaN is no JSON number"),
        (b"[-Infinity]", "-Infinity is no JSON number"),
    ],
)  # fmt: skip
def test_what_is_no_json_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(BadFile, match=said):
        read_json(tmp_path / "x", "file")


def test_the_type_at_the_top_is_held(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("[1, 9223372036854775807]")
    assert read_json(tmp_path / "x", "file", list) == [1, 2**63 - 1]
    with pytest.raises(BadFile, match=r"expected an object of JSON; .* \(it holds a list\)"):
        read_json(tmp_path / "x", "file", dict)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[a", "Expected"),
        ("a = " + "[" * 100_000, "nested too deep"),
        ("a = " + "9" * 5000, "digits"),
        ("a = {b = [18446744073709551616]}", "a whole number is beyond 64 bits"),
        ("a = 1e999", "beyond what a float holds"),
    ],
)
def test_what_is_no_toml_is_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "x").write_text(content)
    with pytest.raises(BadFile, match=rf"claims='.*x', but expected valid TOML in UTF-8; mend the file \(.*{said}"):
        read_toml(tmp_path / "x", "claims")


def test_lines_end_at_newlines_alone_and_a_bad_one_is_numbered(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes("a\u2028b\r\nc\x0cd\n".encode() + b"\xff\n")
    lines = read_lines(tmp_path / "x", "corpus")
    assert [next(lines), next(lines)] == ["a\u2028b\r\n", "c\x0cd\n"]
    with pytest.raises(BadFile, match=r"expected a file in UTF-8; convert it first \(line 3: "):
        next(lines)


def test_a_link_is_followed_and_a_file_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "x").write_text("old")
    (tmp_path / "real" / "x").chmod(0o640)
    (tmp_path / "link").symlink_to("real/x")
    (tmp_path / "dangling").symlink_to("real/y")
    for name in ("link", "dangling"):
        write_atomically(tmp_path / name, "new")
        assert (tmp_path / name).is_symlink()
    assert [(tmp_path / "real" / name).read_text() for name in "xy"] == ["new", "new"]
    assert [(tmp_path / "real" / name).stat().st_mode & 0o777 for name in "xy"] == [0o640, 0o644]


def test_half_characters_are_kept_as_their_escape(tmp_path: Path) -> None:
    """A report must survive a file name that is no valid text; in JSON the escape is the character."""
    write_atomically(tmp_path / "x", '["\udcff"]')
    assert read_json(tmp_path / "x", "file") == ["\udcff"]


@pytest.mark.parametrize("step", ["fsync", "replace", "chmod"])
def test_a_disk_that_fills_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "x").write_text("old")
    monkeypatch.setattr(os, step, full)
    with pytest.raises(BadFile, match=r"^out='.*x', but expected .* \(No space left on device\)") as refused:
        write_atomically(tmp_path / "x", "new", "out")
    assert refused.value.reason == "No space left on device"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "old"


def test_an_interruption_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")

    def interrupted() -> None:
        with open_for_atomic_write(tmp_path / "x", "out") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "old"


def test_what_is_asked_early_is_what_writing_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_writable(tmp_path / "new" / "deep" / "x", "out")
    assert [path.name for path in (tmp_path / "new" / "deep").iterdir()] == []
    (tmp_path / "kept").write_text("kept")
    require_writable(tmp_path / "kept", "out")
    assert (tmp_path / "kept").read_text() == "kept"
    with pytest.raises(BadFile, match="the name of a file"):
        require_writable(Path(), "out")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BadFile, match=r"a folder that can be written; choose another \(No space left on device\)"):
        require_writable(tmp_path / "x", "out")


def test_read_only_is_refused_where_root_is_not_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_text("old")
    (tmp_path / "x").chmod(0o444)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # the answer to a user other than root
    with pytest.raises(BadFile, match="it is read-only"):
        require_writable(tmp_path / "x", "out")


FULL = """
import os, sys
from pathlib import Path
from emad_ref.files import BadFile, require_writable, write_atomically
folder = Path(sys.argv[1])
(folder / "ballast").write_bytes(bytes(os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize))
for attempt in (require_writable, lambda path, name: write_atomically(path, "y" * 9999, name)):
    try:
        attempt(folder / "x", "out")
    except BadFile as error:
        print(error.reason)
print(sorted(path.name for path in folder.iterdir()))
"""


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """A file system of 64 kB in memory, mounted in a private namespace."""
    mounted = f'mount -t tmpfs -o size=64k none {tmp_path} && exec "$0" -c "$1" {tmp_path}'
    words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*words, f"mount -t tmpfs none {tmp_path}"]).returncode:
        pytest.skip("no mount namespaces here")
    done = subprocess.run([*words, mounted, sys.executable, FULL], capture_output=True, text=True)
    assert done.stdout == "No space left on device\nNo space left on device\n['ballast']\n", done.stderr


def test_what_is_added_to_a_file_is_there_until_the_file_is_removed(tmp_path: Path) -> None:
    append_text(tmp_path / "x", "one\n", "summary")
    append_text(tmp_path / "x", "two\n", "summary")
    assert (tmp_path / "x").read_text() == "one\ntwo\n"
    remove_file(tmp_path / "x", "summary")
    remove_file(tmp_path / "x", "summary")
    with pytest.raises(BadFile, match="expected a file that can be removed"):
        remove_file(tmp_path, "summary")


def test_a_file_that_breaks_off_while_it_is_read_says_so(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("text")
    said = pytest.raises(BadFile, match=r"a file that can be read; .* \(Input/output error")
    with said, open_regular_file(tmp_path / "x", "corpus"):
        raise OSError(errno.EIO, "Input/output error")


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes('{"a": 1}\n{"b": 2}'.encode("utf-8-sig"))
    assert read_text(path, "x").startswith("{")
    assert list(read_lines(path, "x")) == ['{"a": 1}\n', '{"b": 2}']
    path.write_bytes('{"a": 1}'.encode("utf-8-sig"))
    assert read_json(path, "x") == {"a": 1}
    path.write_bytes("a = 1".encode("utf-8-sig"))
    assert read_toml(path, "x") == {"a": 1}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_another_encoding_is_named(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "file").write_text("text", encoding=encoding)
    for read in (read_text, lambda *of: list(read_lines(*of))):
        with pytest.raises(BadFile, match=r"in UTF-8; convert it first \(.*byte order mark of UTF-16 or UTF-32"):
            read(tmp_path / "file", "x")


def test_lines_left_open_end_without_the_names_of_the_module(tmp_path, monkeypatch):
    """At interpreter exit the names are None, and an exception in a generator is printed as ignored."""
    (tmp_path / "text").write_text("one\ntwo\n")
    lines = read_lines(tmp_path / "text", "corpus")
    assert next(lines) == "one\n"
    monkeypatch.setattr("emad_ref.files.BadFile", None)
    lines.close()
