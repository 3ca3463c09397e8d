"""Files of formats without a library that writes them: mail of Outlook, OpenDocument, RTF."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping
from email.message import EmailMessage
from itertools import pairwise

Folder = Mapping[str, "bytes | Folder"]
_FREE, _END, _FAT = 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFFFD
_SECTOR, _MINI = 512, 64


def compound_file(root: Folder) -> bytes:
    """Write a compound file ([MS-CFB]) of streams below 4,096 bytes."""
    entries: list[bytearray] = []
    mini, mini_fat = bytearray(), list[int]()

    def add(name: str, content: bytes | Folder) -> int:
        number = len(entries)
        entries.append(bytearray(128))
        child, start, size = _FREE, _END, 0
        if isinstance(content, bytes):
            size, first = len(content), len(mini_fat)
            count = -(-size // _MINI)
            mini.extend(content.ljust(count * _MINI, b"\0"))
            mini_fat.extend([*range(first + 1, first + count), _END] if count else [])
            start = first if count else _END
        else:
            numbers = [add(each, inner) for each, inner in content.items()]
            child = numbers[0] if numbers else _FREE
            for one, following in pairwise(numbers):
                struct.pack_into("<I", entries[one], 72, following)
        coded = name.encode("utf-16-le")
        kind = 5 if number == 0 else 2 if isinstance(content, bytes) else 1
        right = struct.unpack_from("<I", entries[number], 72)[0] or _FREE
        struct.pack_into(
            "<64sHBBIII", entries[number], 0, coded, len(coded) + 2, kind, 1, _FREE, right, child
        )
        struct.pack_into("<IQ", entries[number], 116, start, size)
        return number

    add("Root Entry", root)
    for entry in entries:
        if struct.unpack_from("<I", entry, 72)[0] == 0:
            struct.pack_into("<I", entry, 72, _FREE)
    return _sectors(entries, bytes(mini), mini_fat)


def _sectors(entries: list[bytearray], mini: bytes, mini_fat: list[int]) -> bytes:
    """Lay out the sectors: the FAT, the directory, the FAT of small streams, their content."""

    def padded(content: bytes) -> bytes:
        return content.ljust(-(-len(content) // _SECTOR) * _SECTOR, b"\0")

    directory = padded(b"".join(entries))
    small = struct.pack(f"<{len(mini_fat)}I", *mini_fat)
    small = small.ljust(-(-len(small) // _SECTOR) * _SECTOR, b"\xff")
    chains, fat, begins = [directory, small, padded(mini)], [_FAT], list[int]()
    for chain in chains:
        count = len(chain) // _SECTOR
        begins.append(len(fat) if count else _END)
        fat += [*range(len(fat) + 1, len(fat) + count), _END] if count else []
    directory = bytearray(directory)
    struct.pack_into("<IQ", directory, 116, begins[2], len(mini))
    table = struct.pack(f"<{len(fat)}I", *fat).ljust(_SECTOR, b"\xff")
    head = struct.pack(
        "<8s16xHHHHH6xIIIIIIIIII",
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", 0x3E, 3, 0xFFFE, 9, 6,
        0, 1, begins[0], 0, 4096, begins[1], len(small) // _SECTOR, _END, 0, 0,
    )  # fmt: skip
    head = head.ljust(_SECTOR, b"\xff")
    return head + table + bytes(directory) + small + padded(mini)


def _properties(
    texts: Mapping[int, str], header: int, more: Mapping[int, bytes] | None = None
) -> Folder:
    """Return the streams of Outlook's properties ([MS-OXMSG]): texts and binary values."""
    values = {tag << 16 | 0x1F: text.encode("utf-16-le") for tag, text in texts.items()}
    values |= {tag << 16 | 0x102: value for tag, value in (more or {}).items()}
    listed = b"".join(struct.pack("<IIII", tag, 6, len(v) + 2, 0) for tag, v in values.items())
    streams = {f"__substg1.0_{tag:08X}": value for tag, value in values.items()}
    return {**streams, "__properties_version1.0": bytes(header) + listed}


def outlook_message() -> bytes:
    attached = _properties({0x3707: "menu.txt"}, 8, {0x3701: b"Soup, then cod."})
    message = _properties(
        {
            0x001A: "IPM.Note",
            0x0037: "Dredging",
            0x1000: "The dredger arrives on Thursday.",
            0x007D: "From: Ines <ines@harbour.example>\r\nTo: crew@harbour.example\r\n\r\n",
        },
        32,
    )
    return compound_file({**message, "__attach_version1.0_#00000000": attached})


_OPEN = "urn:oasis:names:tc:opendocument:xmlns:"


def open_document(body: str, kind: str = "text") -> bytes:
    """Write an OpenDocument file with the elements of a body."""
    names = " ".join(
        f'xmlns:{short}="{_OPEN}{name}:1.0"'
        for short, name in (
            ("office", "office"), ("text", "text"), ("table", "table"), ("draw", "drawing"),
            ("presentation", "presentation"), ("style", "style"),
        )
    )  # fmt: skip
    saved = io.BytesIO()
    with zipfile.ZipFile(saved, "w") as made:
        made.writestr("META-INF/manifest.xml", "<manifest/>")
        made.writestr(
            "content.xml",
            f"<office:document-content {names}><office:body><office:{kind}>{body}"
            f"</office:{kind}></office:body></office:document-content>",
        )
    return saved.getvalue()


def text_document() -> bytes:
    return open_document(
        '<text:h text:outline-level="1">Dredger</text:h>'
        "<text:p>The dredger<text:s/>digs <text:span>12 m</text:span> deep"
        "<text:note><text:note-citation>1</text:note-citation><text:note-body>"
        "<text:p>At low tide.</text:p></text:note-body></text:note>.</text:p>"
        "<text:list><text:list-item><text:p>Mud</text:p></text:list-item>"
        "<text:list-item><text:p>Sand</text:p></text:list-item></text:list>"
        "<table:table><table:table-row>"
        '<table:table-cell table:number-rows-spanned="2"><text:p>North</text:p></table:table-cell>'
        "<table:table-cell><text:p>Ines</text:p></table:table-cell></table:table-row>"
        "<table:table-row><table:covered-table-cell/>"
        "<table:table-cell><text:p>Tom</text:p></table:table-cell></table:table-row></table:table>"
    )


def slides() -> bytes:
    return open_document(
        '<draw:page><draw:frame presentation:class="title"><draw:text-box>'
        "<text:p>Buoys</text:p></draw:text-box></draw:frame><draw:frame><draw:text-box>"
        "<text:p>The north buoy is green.</text:p></draw:text-box></draw:frame>"
        "<presentation:notes><draw:frame><draw:text-box><text:p>It has a bell.</text:p>"
        "</draw:text-box></draw:frame></presentation:notes></draw:page>",
        "presentation",
    )


RICH_TEXT = (
    rb"{\rtf1\ansi\ansicpg1252{\fonttbl{\f0 Arial;}}{\*\generator Writer;}"
    rb"{\pict\pngblip 89504e47}\f0 The sluice\'b4s key is \b brass\b0 .\par "
    rb"\trowd\cellx1000\cellx2000 Gate\cell Width\cell\row "
    rb"\trowd\cellx1000\cellx2000 East\cell 9 m\cell\row }"
)


def mailbox() -> bytes:
    made = b""
    for subject, text in (("Tides", "High water at noon."), ("Pilot", ">From dawn, Tom pilots.")):
        message = EmailMessage()
        message["Subject"], message["From"] = subject, "ines@harbour.example"
        message.set_content(text.replace(">From", "From"))
        raw = bytes(message).replace(b"\nFrom dawn", b"\n>From dawn")
        made += b"From ines@harbour.example Tue Mar  3 10:00:00 2026\n" + raw + b"\n\n"
    return made


def archive() -> bytes:
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as made:
        made.writestr("deep.md", "The deep file.")
    saved = io.BytesIO()
    with zipfile.ZipFile(saved, "w") as made:
        made.writestr("notes/keys.md", "# Keys\n\nThe key hangs by the door.")
        made.writestr("letter.rtf", RICH_TEXT)
        made.writestr("map.png", b"\x89PNG")
        made.writestr("__MACOSX/._keys.md", b"\0")
        made.writestr("more.zip", inner.getvalue())
    return saved.getvalue()


def pdf_with_attachment() -> bytes:
    from fpdf import FPDF

    made = FPDF()
    made.embed_file(bytes=b"Item,Price\nBuoy,40\n", basename="prices.csv")
    made.add_page()
    made.set_font("helvetica", size=11)
    made.multi_cell(0, 6, "The prices of buoys are attached to this letter of the harbour.")
    return bytes(made.output())
