"""Downloads of files from elsewhere, which a browser saves and never shows.

A hostile file, such as a page or a picture with scripts, would run with the rights of the service's
own pages if a browser showed it. The type of every file is therefore a stream of bytes, its
disposition an attachment, and its policy a sandbox that allows nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import IO
from urllib.parse import quote

from starlette.responses import StreamingResponse

_BLOCK = 2**16  # bytes sent at once
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def download(name: str, content: IO[bytes]) -> StreamingResponse:
    """Return a file as an attachment. Closes the file once it is sent.

    Args:
        name: Name of the file. Folders before it are left out.
        content: The file, which can be sought.
    """
    size = content.seek(0, os.SEEK_END)
    content.seek(0)
    named = quote(name.rpartition("/")[2], safe="")
    headers = {
        "Content-Disposition": f"attachment; filename*=UTF-8''{named}",
        "Content-Length": str(size),
    }
    kind = "application/octet-stream"
    return StreamingResponse(_blocks(content), headers=_HEADERS | headers, media_type=kind)


def _blocks(content: IO[bytes]) -> Iterator[bytes]:
    with content:
        while block := content.read(_BLOCK):
            yield block
