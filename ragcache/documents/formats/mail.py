"""Mail: messages and mailboxes as mail programs save them, and messages of Outlook."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping
from email import message_from_bytes, policy
from email.message import EmailMessage
from encodings.aliases import aliases

from ragcache.documents.charset import decode_text
from ragcache.documents.formats.base import Content, Format, RawFile, flat, import_library
from ragcache.documents.html import read_html
from ragcache.documents.source import DocumentPart

_HEADERS = ("From", "To", "Cc", "Date")
_CODE_PAGES = (874, 932, 936, 949, 950)  # that Outlook names otherwise than Python
_NAMELESS = "without a name"


def read_mail(file: RawFile) -> Content:
    """Read a message with its headers, and each attachment of a known type as parts."""
    return _message(file, file.raw)


def _message(file: RawFile, raw: bytes) -> Content:
    message = message_from_bytes(raw, policy=policy.default)
    assert isinstance(message, EmailMessage)
    headers = {name: flat(str(message[name])) for name in _HEADERS if message[name]}
    attached = (
        (each.get_filename() or _inner_name(each), _payload(each))
        for each in message.iter_attachments()
        if isinstance(each, EmailMessage)
    )
    return _mail(file, str(message.get("Subject", "")), headers, _mail_body(message), attached)


def _inner_name(attachment: EmailMessage) -> str:
    return "message.eml" if attachment.get_content_type() == "message/rfc822" else _NAMELESS


def _payload(attachment: EmailMessage) -> bytes | None:
    if attachment.get_content_type() == "message/rfc822":
        inner = attachment.get_payload(0)
        return bytes(inner) if isinstance(inner, EmailMessage) else None
    payload = attachment.get_payload(decode=True)
    return payload if isinstance(payload, bytes) else None


def _mail_body(message: EmailMessage) -> str:
    body = message.get_body(("plain", "html"))
    if not isinstance(body, EmailMessage):
        return ""
    try:
        text = str(body.get_content())
    except LookupError:  # a charset that Python does not know
        payload = body.get_payload(decode=True)
        text = decode_text(payload) if isinstance(payload, bytes) else ""
    return read_html(text).text if body.get_content_subtype() == "html" else text.strip()


def _mail(
    file: RawFile,
    subject: str,
    headers: Mapping[str, str],
    body: str,
    attached: Iterable[tuple[str, bytes | None]],
) -> Content:
    """Return a message as a part, followed by the parts of its attachments."""
    title = flat(subject)
    lines = [f"{name}: {value}" for name, value in headers.items()]
    parts: list[DocumentPart] = []
    omitted: tuple[str, ...] = ()
    for name, payload in attached:
        found, lacks = file.read_inner(name, payload) if payload else ([], (f"{name}: no content",))
        lines.append(f"Attachment: {name}" + ("" if found else " (not read)"))
        parts += found
        omitted += lacks
    blocks = (f"# {title}" if title else "", "\n".join(lines), body)
    text = "\n\n".join(block for block in blocks if block)
    metadata = {name.lower(): value for name, value in headers.items()}
    if title:
        metadata["subject"] = title
    return Content([DocumentPart(text), *parts], metadata, omitted)


_SEPARATOR = re.compile(rb"(?:\A|\r?\n\r?\n)From [^\r\n]*\r?\n")


def read_mailbox(file: RawFile) -> Content:
    """Read the messages of a mailbox (`mbox`). Each has its headers as metadata."""
    parts: list[DocumentPart] = []
    omitted: list[str] = []
    begins = [*_SEPARATOR.finditer(file.raw)]
    if not begins:
        return read_mail(file)  # a single message without a separator
    ends = [*(each.start() for each in begins[1:]), len(file.raw)]
    for begin, end in zip(begins, ends, strict=True):
        raw = re.sub(rb"^>(>*From )", rb"\1", file.raw[begin.end() : end], flags=re.MULTILINE)
        content = _message(file, raw)
        for part in content.parts:
            own = {**content.metadata, **part.metadata}
            parts.append(DocumentPart(part.text, own, part.continues, part.language))
        omitted += content.omitted
    return Content(parts, omitted=tuple(omitted))


def read_outlook(file: RawFile) -> Content:
    """Read a message that Outlook saved (`.msg`), with attachments of known types as parts."""
    aliases.update({f"windows_{page}": f"cp{page}" for page in _CODE_PAGES})
    message = import_library("oxmsg").Message.load(io.BytesIO(file.raw))
    known = {name.lower(): value for name, value in message.message_headers.items()}
    recipients = "; ".join(each.name or each.email_address for each in message.recipients)
    date = message.sent_date
    headers = {
        "From": message.sender or "",
        "To": known.get("to") or recipients,
        "Cc": known.get("cc", ""),
        "Date": known.get("date") or (date.isoformat() if date else ""),
    }
    body = (message.body or "").strip() or read_html(message.html_body or "").text
    attached = ((each.file_name or _NAMELESS, each.file_bytes) for each in message.attachments)
    told = {name: flat(value) for name, value in headers.items() if value}
    return _mail(file, message.subject, told, body, attached)


FORMATS = (
    Format.of(".eml", read_mail),
    Format.of(".mbox .mbx", read_mailbox),
    Format.of(".msg", read_outlook),
)
