"""Reading and writing of all files, with one error for every fault.

Reading: every fault of a file (missing, a folder, a device, not UTF-8, truncated, no JSON, nested too deep, numbers
beyond 64 bits, another type at the top) raises ``BadFile`` with argument, path, expectation and remedy. Only regular
files are read: a pipe would wait for ever, a device never ends. A byte order mark at the start of a UTF-8 file is not
part of its text.

Writing: a temporary file in the same folder is synced to disk, then renamed, so that readers and power cuts find the
old file or the new one. A target that is no regular file stays unchanged, and links are followed. ``require_writable``
checks all that early, by writing: access bits do not show a full disk, a read-only mount, or root.

Standard library only; independent of the files' content.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import shutil
import stat
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from emad_ref.errors import BadArgument

MAX_INT = 2**63 - 1  # larger whole numbers overflow arrays, and then floats
WRITE_AGAIN = "fetch or write it again"
KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)
POINTER_BYTES = 256  # enough to see that a file is one
# Version control for large files leaves a pointer where it did not fetch the content.
POINTERS: tuple[tuple[re.Pattern[bytes], str], ...] = (
    (re.compile(rb"version https?://\S+/spec/v"), "a git-lfs pointer, not the file: run `git lfs pull` in its folder"),
    (re.compile(rb"# xet version"), "a Xet pointer, not the file: check it out with git-xet"),
    (re.compile(rb"\S*/annex/objects/"), "a git-annex pointer, not the file: run `git annex get {name}` in its folder"),
)
TYPES: dict[type, str] = {dict: "an object", list: "a list"}


class BadFile(BadArgument, OSError):
    """Raised for a file that cannot be read or written, or has other content; ``reason``: a short text."""

    def __init__(self, argument: str, path: Path | str, expected: str, reason: str, remedy: str = ""):
        super().__init__(argument, str(path), expected, f"{remedy} ({reason})" if remedy else reason)
        self.reason = self.strerror = reason

    def __str__(self) -> str:  # OSError's own text would show errno and file name
        return str(self.args[0])


# ---------------------------------------------------------------- checks


def is_file(path: Path) -> bool:
    """Whether ``path`` is a file; false for a name that the system refuses (too long, or with NUL)."""
    return _is_kind(path, Path.is_file)


def is_folder(path: Path) -> bool:
    """Whether ``path`` is a folder; as ``is_file``."""
    return _is_kind(path, Path.is_dir)


def _is_kind(path: Path, kind: Callable[[Path], bool]) -> bool:
    try:
        return kind(path)
    except (OSError, ValueError):
        return False


def resolve_path(path: Path) -> Path:
    """``path`` with links followed, as ``Path.resolve``; a loop of links, for which that raises, stays unchanged."""
    return Path(os.path.realpath(path))


# ---------------------------------------------------------------- reading


@contextmanager
def open_regular_file(path: Path | str, argument: str, remedy: str = WRITE_AGAIN) -> Iterator[BufferedReader]:
    """Open a regular file for reading bytes; errors during reading become BadFile too.

    Raises:
        BadFile: it cannot be opened or read, or is no regular file.
    """
    if not isinstance(path, str | os.PathLike):  # a number would be one of this process's descriptors
        raise BadArgument(argument, path, "a path", "pass a str or Path")
    try:
        with open(path, "rb", opener=_open_nonblocking) as file:
            if kind := describe_file_kind(os.fstat(file.fileno()).st_mode):
                raise BadFile(argument, path, "a file", f"it is {kind}", "name a regular file")
            if pointer := describe_pointer(file.peek(POINTER_BYTES), os.path.basename(path)):
                raise BadFile(argument, path, "a file with its content", f"it is {pointer}")
            yield file
    # ValueError: a NUL in the name. The clause names no class of this module: a generator of lines may be closed at the
    # interpreter's end, after this module's names are deleted
    except (OSError, ValueError) as error:
        if isinstance(error, BadFile):
            raise
        if isinstance(error, PermissionError):
            remedy = "make it readable for this user, as by chmod u+r"
        raise BadFile(argument, path, "a file that can be read", _error_text(error), remedy) from error


def describe_pointer(head: bytes, name: str) -> str:
    """What a file that begins with ``head`` is, and the command that brings its content; "" if it is no pointer."""
    return next((what.format(name=name) for pattern, what in POINTERS if pattern.match(head)), "")


def _open_nonblocking(path: str, flags: int) -> int:
    """Open also a pipe without a writer, so that it can be refused."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_bytes(path: Path | str, argument: str) -> bytes:
    """All bytes of a file. Raises BadFile."""
    with open_regular_file(path, argument) as file:
        return file.read()


def read_text(path: Path | str, argument: str) -> str:
    """All text of a UTF-8 file. Raises BadFile."""
    try:
        return _decode_start(read_bytes(path, argument))
    except UnicodeError as error:
        raise BadFile(argument, path, "a file in UTF-8", str(error), "convert it first") from error


def read_lines(path: Path | str, argument: str) -> Iterator[str]:
    """Lines of a UTF-8 file as they are asked for, whatever its size, with their ends. Only \\n ends one: JSON may hold
    U+2028 and its like inside a string. Raises BadFile.
    """
    with open_regular_file(path, argument) as file:
        for number, line in enumerate(file, start=1):
            try:
                yield _decode_start(line) if number == 1 else line.decode("utf-8")
            except UnicodeError as error:
                reason = f"line {number}: {error}"
                raise BadFile(argument, path, "a file in UTF-8", reason, "convert it first") from error


def _decode_start(start: bytes) -> str:
    """The text of a file's first bytes, without a byte order mark.

    Raises:
        UnicodeError: another encoding than UTF-8.
    """
    for mark in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):  # UTF-32's mark begins with UTF-16's
        if start.startswith(mark):
            raise UnicodeError("it begins with the byte order mark of UTF-16 or UTF-32")
    return start.removeprefix(codecs.BOM_UTF8).decode("utf-8")


def read_json(path: Path | str, argument: str, kind: type | None = None, *, remedy: str = WRITE_AGAIN) -> Any:
    """Content of a JSON file, of type ``kind`` (dict or list) if given.

    Raises:
        BadFile: as ``read_text``, and as ``parse_json``.
    """
    text = read_text(path, argument)
    try:
        value = parse_json(text)
    except ValueError as error:
        raise BadFile(argument, path, "a readable JSON file", str(error), remedy) from error
    if kind is not None and type(value) is not kind:
        raise BadFile(argument, path, f"{TYPES[kind]} of JSON", f"it holds a {type(value).__name__}", remedy)
    return value


def parse_json(text: str | bytes) -> Any:
    """``text`` as JSON.

    Raises:
        ValueError: no JSON, NaN or infinity, nested too deep, a number beyond 64 bits, or an object with one key twice.
    """
    try:
        return json.loads(
            text,
            parse_int=_parse_int,
            parse_float=_parse_float,
            parse_constant=_refuse_constant,
            object_pairs_hook=reject_duplicate_keys,
        )
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, for ``object_pairs_hook``. Raises ValueError for a duplicate key."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:80]!r} stands twice in one object")
        found[key] = value
    return found


def read_toml(path: Path | str, argument: str, remedy: str = "mend the file") -> dict[str, Any]:
    """The content of a TOML file.

    Raises:
        BadFile: as ``read_text``; no TOML, nested too deep, or a whole number beyond 64 bits.
    """
    text = read_text(path, argument)
    try:
        table = tomllib.loads(text, parse_float=_parse_float)
        _require_64_bits(table)
    except RecursionError as error:
        raise BadFile(argument, path, "valid TOML in UTF-8", "it is nested too deep", remedy) from error
    except ValueError as error:
        raise BadFile(argument, path, "valid TOML in UTF-8", str(error), remedy) from error
    return table


def _parse_int(digits: str) -> int:
    if len(digits) > 20 or abs(int(digits)) > MAX_INT:
        raise ValueError(f"a whole number of {len(digits.lstrip('-'))} digits is beyond 64 bits")
    return int(digits)


def _parse_float(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {digits[:20]} is beyond what a float holds")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _require_64_bits(value: Any) -> None:
    """Check whole numbers after parsing, since TOML's parser has no hook for them."""
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in below:
        _require_64_bits(item)
    if isinstance(value, int) and abs(value) > MAX_INT:
        raise ValueError("a whole number is beyond 64 bits")


# ---------------------------------------------------------------- writing


def write_atomically(path: Path, text: str, argument: str = "file") -> None:
    """Write ``text`` in UTF-8, completely or not at all; lone surrogates, which UTF-8 lacks, as escapes.

    Raises as ``open_for_atomic_write``.
    """
    with open_for_atomic_write(path, argument) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


@contextmanager
def open_for_atomic_write(path: Path, argument: str) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces ``path`` at the end of the block, and is removed after any error.

    It is readable for all, like reports and goldens, or has the mode of the replaced file.

    Raises:
        BadFile: the target is no regular file or may not be written, its folder is missing or cannot be written to, the
            disk is full.
    """
    target, mode = _target(path, argument)
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}.")
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, mode)
            os.replace(name, target)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(name)
            raise
        _sync(target.parent)
    except OSError as error:
        if isinstance(error, BadFile):
            raise
        raise BadFile(argument, path, "a place that can be written to", _error_text(error), "choose another") from error


@contextmanager
def replace_folder_atomically(folder: Path, argument: str) -> Iterator[Path]:
    """Yield an empty folder, which replaces ``folder`` at the end of the block.

    Folders cannot be swapped in one step, so the old one is moved aside first, and back if the second step fails. A
    process killed in between leaves both, under names that begin like ``folder``'s.

    Raises:
        BadFile: as ``require_writable_folder``; the disk is full.
    """
    target = resolve_path(folder)
    require_writable_folder(target.parent, argument, folder)
    beside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    aside = beside.with_name(f"{beside.name}.old")
    try:
        try:
            yield beside
            for path in beside.iterdir():
                _sync(path)
            beside.chmod(0o755)
            if target.exists():
                target.rename(aside)
            try:
                beside.rename(target)
            except OSError:
                if aside.exists():
                    aside.rename(target)
                raise
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        _sync(target.parent)
        shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        if isinstance(error, BadFile):
            raise
        raise BadFile(argument, folder, "a folder that can be written", _error_text(error), "choose another") from error


def require_replaceable_folder(folder: Path, names: frozenset[str], argument: str) -> None:
    """Refuse a folder with other content than ``names``, which would be lost.

    Raises:
        BadFile: it is no folder, has other content, or is in a folder that is not writable.
    """
    target = resolve_path(folder)
    require_writable_folder(target.parent, argument, folder)
    if not target.exists():
        return
    try:
        strange = sorted(entry.name for entry in target.iterdir() if entry.name not in names)
    except OSError as error:
        raise BadFile(argument, folder, "a folder, or none yet", _error_text(error), "choose another") from error
    if strange:
        raise BadFile(
            argument, folder, "a folder of a saved model, or none yet", f"it holds {strange[0]}", "choose another"
        )


def append_text(path: Path, text: str, argument: str) -> None:
    """Append ``text`` to a file and sync it to disk; an interruption may leave part of it at the end.

    Raises:
        BadFile: as ``open_for_atomic_write``.
    """
    target, _ = _target(path, argument)
    try:
        with target.open("ab") as file:
            file.write(text.encode("utf-8", "backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise BadFile(
            argument, path, "a file that can be added to", _error_text(error), "choose another place"
        ) from error


def remove_file(path: Path, argument: str) -> None:
    """Remove a file if it exists. Raises BadFile."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise BadFile(argument, path, "a file that can be removed", _error_text(error), "remove it yourself") from error


def require_writable(path: Path, argument: str) -> None:
    """Refuse a ``path`` that ``open_for_atomic_write`` would refuse, before a long pass; makes its folder.

    Raises:
        BadFile: as ``open_for_atomic_write``; a name that is empty or too long.
    """
    target, _ = _target(path, argument)
    require_writable_folder(target.parent, argument, path)
    try:
        os.lstat(target)  # detects a name that is too long
    except FileNotFoundError:
        return
    except OSError as error:
        raise BadFile(argument, path, "a name for a file", _error_text(error), "choose another") from error


def require_replaceable_file(path: Path, argument: str, kind: str, start: bytes) -> None:
    """``require_writable``, and refuse a file of another kind, which would be lost: an input, or a user's own.

    Args:
        start: a regular expression that matches in the first bytes of each file of this ``kind``.

    Raises:
        BadFile: as ``require_writable``; there is a file, not empty, of another kind.
    """
    require_writable(path, argument)
    if not is_file(path):
        return
    with open_regular_file(path, argument) as file:
        head = file.read(4096)
    if head and re.search(start, head) is None:
        raise BadFile(argument, path, f"a new file, or {kind} to replace", "it holds something else", "choose another")


def require_writable_folder(folder: Path, argument: str, named: Path | None = None) -> None:
    """Make ``folder`` if needed and check it by writing a page to its disk; ``named``: the user's name for it.

    Raises:
        BadFile: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except (OSError, ValueError) as error:
        raise BadFile(
            argument, named or folder, "a folder that can be written", _error_text(error), "choose another"
        ) from error


def _target(path: Path, argument: str) -> tuple[Path, int]:
    """(Target of ``path`` with links followed, mode of the written file)."""
    if not path.name:
        raise BadFile(argument, path, "the name of a file", "it is empty or a folder", "name the file")
    try:
        target = resolve_path(path)
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return target, 0o644
    except (OSError, ValueError) as error:
        raise BadFile(argument, path, "a place that can be written to", _error_text(error), "choose another") from error
    if kind := describe_file_kind(mode):
        raise BadFile(argument, path, "a regular file, or none yet", f"it is {kind}", "choose another name")
    if not os.access(target, os.W_OK):
        raise BadFile(argument, path, "a file that may be written", "it is read-only", "choose another name")
    return target, stat.S_IMODE(mode)


def _sync(folder: Path) -> None:
    """Sync the rename to disk, on systems that can open folders."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def describe_file_kind(mode: int) -> str:
    """Name of the kind of file of this ``st_mode``; "" for a regular file."""
    if stat.S_ISREG(mode):
        return ""
    return next((kind for is_one, kind in KINDS if is_one(mode)), "no regular file")


def _error_text(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
