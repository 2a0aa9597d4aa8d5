"""Files in formats of this project: one schema number each, and a SHA-256 of their content.

    {"format": "profile", "schema": 4, "sha256": "…", …content}     a JSON file; or a safetensors file, which holds the
                                                                    same object as JSON in its metadata

The digest covers format, schema, content and tensors: the object without ``sha256`` as JSON in the order of the file,
without blanks, then name, shape, dtype and bytes of every tensor by name. So it does not depend on indentation, and
1 GB of tensors takes about a second.

A file is read in one form. Another format, another schema or another digest is an error that names file, value,
expectation and remedy, so the code behind a reader does not check content again. To change a file, read it, change the
object in Python and write it. The digest finds cut, merged and hand-edited files; it is no signature.

Imports neither torch nor safetensors before a tensor is written or read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emad_ref.errors import EmadError
from emad_ref.files import BadFile, open_for_atomic_write, parse_json, read_bytes, write_atomically

if TYPE_CHECKING:
    from torch import Tensor

METADATA_KEY = "emad"  # key of the metadata of safetensors, whose values are texts


@dataclass(frozen=True)
class FileFormat:
    """A format: its ``name`` in files and messages, and the only ``schema`` that is written and read.

    ``remedy``  how to make a file again, in the imperative.
    ``error``   the class of every error about a file of this format.
    """

    name: str
    schema: int
    remedy: str
    error: type[EmadError]

    @property
    def start(self) -> bytes:
        """A regular expression for ``files.require_replaceable_file``: how files of this format begin."""
        return rb'(?:^\{\s*|"%s":"\{)\\?"format\\?": \\?"%s\\?"' % (METADATA_KEY.encode(), self.name.encode())

    def write_json(self, path: Path, content: Mapping[str, Any]) -> None:
        """Write ``content`` as JSON; the file is complete or unchanged.

        Raises
        ------
        BadFile
            It cannot be written.
        ValueError
            NaN or infinity, which JSON lacks.
        """
        text = json.dumps(self._stamped(content, {}), indent=1, allow_nan=False, ensure_ascii=False)
        write_atomically(path, text + "\n", self.name)

    def read_json(self, path: Path | str) -> dict[str, Any]:
        """The content that ``write_json`` wrote.

        Raises
        ------
        EmadError
            ``error``: a file that cannot be read, of another format or schema, or changed after it was written.
        """
        data = self._read_bytes(path)
        try:
            found = parse_json(data)
        except ValueError as error:
            raise self._unreadable(path, f"no JSON: {error}") from error
        return self._intact(path, found, {})

    def write_tensors(self, path: Path, tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> None:
        """Write ``tensors`` as safetensors, with ``content`` in the metadata. Raises as ``write_json``."""
        import safetensors.torch

        metadata = {METADATA_KEY: json.dumps(self._stamped(content, tensors), allow_nan=False)}
        with open_for_atomic_write(path, self.name) as file:
            file.write(safetensors.torch.save(dict(tensors), metadata=metadata))

    def read_tensors(self, path: Path | str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors and the content that ``write_tensors`` wrote. Raises as ``read_json``."""
        import safetensors.torch

        data = self._read_bytes(path)
        try:
            header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")])  # eight bytes of length, then JSON
            found = parse_json(header["__metadata__"][METADATA_KEY])
            tensors = safetensors.torch.load(data)
        except Exception as error:  # a foreign or cut file raises any error of safetensors or JSON
            raise self._unreadable(path, f"{type(error).__name__}: {str(error)[:200]}") from error
        return tensors, self._intact(path, found, tensors)

    def _read_bytes(self, path: Path | str) -> bytes:
        try:
            return read_bytes(path, self.name)
        except BadFile as error:
            raise self._unreadable(path, error.reason) from error

    def _stamped(self, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        head = {"format": self.name, "schema": self.schema}
        return {**head, "sha256": content_digest({**head, **content}, tensors), **content}

    def _intact(self, path: Path | str, found: Any, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """``found`` without format, schema and digest, if they are those that this class writes."""
        content = dict(found) if isinstance(found, dict) else {}
        stated, problem = content.pop("sha256", None), ""
        if content.get("format") != self.name:
            problem = f"has format={content.get('format')!r:.60}, but expected {self.name!r}"
        elif content.get("schema") != self.schema:
            problem = f"has schema={content.get('schema')!r:.60}, but this version reads {self.schema} alone"
        elif stated != (digest := content_digest(content, tensors)):
            problem = (
                f"has sha256={stated!s:.12}…, but its content gives {digest:.12}…: it was changed or cut after it was "
                "written"
            )
        if problem:
            raise self.error(f"{self.name}={str(path)!r} {problem}; {self.remedy}")
        return {name: value for name, value in content.items() if name not in ("format", "schema")}

    def _unreadable(self, path: Path | str, reason: str) -> EmadError:
        return self.error(f"{self.name}={str(path)!r} cannot be read ({reason}); {self.remedy}")


def content_digest(content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """sha256, hex, of JSON values and tensors, as the module's docstring defines it."""
    digest = hashlib.sha256(json.dumps(content, separators=(",", ":"), allow_nan=False).encode())
    for name in sorted(tensors):
        update_digest_with_tensor(digest, name, tensors[name])
    return digest.hexdigest()


def update_digest_with_tensor(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    """Add name, shape, dtype and bytes of ``tensor`` to ``digest``."""
    import torch

    digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
