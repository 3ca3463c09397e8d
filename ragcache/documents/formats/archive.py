"""ZIP archives, as a document of the files in them."""

from __future__ import annotations

import io
import zipfile
from pathlib import PurePosixPath

from ragcache.documents.formats.base import Content, Format, RawFile
from ragcache.documents.source import DocumentPart
from ragcache.errors import UnreadableDocument

_ENCRYPTED = 0x1  # bit of a member's flags
MAX_MEMBERS = 10_000


def read_zip(file: RawFile) -> Content:
    """Read the files of an archive, in the order of their names.

    Files that cannot be read are left out. Hidden ones are ignored.
    """
    parts: list[DocumentPart] = []
    omitted: list[str] = []
    with zipfile.ZipFile(io.BytesIO(file.raw)) as archive:
        members = [each for each in archive.infolist() if not each.is_dir()]
        if len(members) > MAX_MEMBERS:
            raise UnreadableDocument(
                f"an archive of {len(members):,} files, more than {MAX_MEMBERS:,}; unpack it"
            )
        for member in sorted(members, key=lambda each: each.filename):
            if _is_hidden(member.filename):
                continue
            if member.flag_bits & _ENCRYPTED:
                omitted.append(f"{member.filename}: it needs a password")
                continue
            file.budget.check(member.file_size)
            found, lacks = file.read_inner(member.filename, archive.read(member))
            parts += found
            omitted += lacks
    return Content(parts, omitted=tuple(omitted))


def _is_hidden(name: str) -> bool:
    return any(each.startswith(".") or each == "__MACOSX" for each in PurePosixPath(name).parts)


FORMATS = (Format.of(".zip", read_zip),)
