"""Tables as text: CSV and TSV."""

from __future__ import annotations

import csv
import io

from ragcache.documents.charset import decode_text
from ragcache.documents.formats.base import Content, Format, RawFile
from ragcache.documents.markdown import write_table
from ragcache.documents.source import DocumentPart

_DELIMITERS = ",;\t|"


def read_csv(file: RawFile) -> Content:
    """Read a table. The delimiter is found."""
    text = decode_text(file.raw)
    try:
        mark = csv.Sniffer().sniff(text[:65536], delimiters=_DELIMITERS).delimiter
    except csv.Error:  # use the delimiter that occurs most often in the header
        header = text.partition("\n")[0]
        mark = "\t" if file.suffix == ".tsv" else max(_DELIMITERS, key=header.count)
    # the sniffer's other guesses are ignored: it reads only the start
    return Content([DocumentPart(write_table(list(csv.reader(io.StringIO(text), delimiter=mark))))])


FORMATS = (Format.of(".csv .tsv", read_csv),)
