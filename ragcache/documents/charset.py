"""Text from bytes. Language priors find an encoding that nothing declares, then charset-normalizer.

charset-normalizer reads French in Latin-1 as Baltic, and Polish in ISO-8859-2 or Russian in KOI8-R
as one of their neighbors. Bytes are therefore decoded in every encoding of one byte a character
that is in use, and each text is scored by the frequencies of letters in the languages of the
encoding. The best score wins if its language explains the characters beyond ASCII.

Chinese, Japanese and Korean are told by their most frequent characters, since charset-normalizer
reads Shift-JIS as Korean. Other texts are left to charset-normalizer.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, log

from ragcache.errors import UnreadableDocument

LANGUAGES = {
    "en": "etaoinshrdlcumwfgypbvkjxqzé",
    "fr": "esaitnrulodcpmévqfbghjàxèyêzçôùâîûœkwïëüæ",
    "de": "enisratdhulcgmobwfkzvpüäößjyxqé",
    "es": "eaosrnidlctumpbgyíóvqáhféjzñúxükw",
    "it": "eaionlrtscdupmvghfbqzòàèùéìkjwxy",
    "pt": "aeosrindmutclpvgqbfhãçéjázíóêxúôõâàkwy",
    "nl": "enatirodslghvkmubpwjczfxyëéqïöü",
    "sv": "eantrslidomgkväfhupåöbcyjxwzqé",
    "da": "erntdiaslogkmfvubhpåøyæjczwxqé",
    "fi": "aintesloukämvrjhypdögbfcwåzqx",
    "is": "anriestðuglmkfhvoáþíjdpóæyöbéúýxcwzq",
    "pl": "iaoezncrwystkdpmłujlębągóżśhćfńźvqx",
    "cs": "oeantilvsrkdumpázcěhšyíjčřbžéýůfúgňťóďxwq",
    "sk": "aoeintvrslkdpmuáczhyíbjčšžéľýťúňgďôfóäŕĺxwq",
    "hu": "eatlnskorizáégmydvbhjöfpuócüíúűőwxq",
    "ro": "eiarntulcosdpmăşţfvbgîâzhjxkwyq",
    "hr": "aieonsrjtudklvmpgzbčšžćhđcfxyqw",
    "tr": "aeinrlıdkmuytsbzoçşügcvpöhğfjâîwxq",
    "lt": "iasoretnukmlpvdjgėybšžųązčūįęcfhxwq",
    "lv": "aiestrunkmoāpldvīzējšgbcļģņžčūķfhxwyq",
    "et": "aieslutdnkomrvgpjhäõbüöfšžczxwyq",
    "ru": "оеаинтсрвлкмдпуяыьгзбчйхжшюцщэфъё",
    "uk": "оанивеітрслкдмупяьзгбчйхжїшєюцщфґ",
    "bg": "аоиетнрсвлкдпмзгуъбчящцжхюшйфь",
    "sr": "аоиенртсјукдвмплзбгчшцњћжљхђфџ",
    "el": "αοιετσνρπκμυληςωδγχάόθίέήφύβώξζψϊϋΐΰ",
    "he": "יוהלאמרתבנשדכעקפחצטגזסםןךףץ",
    "ar": "اليمنورتبةعدسفهكقحجشطصخأذئضإثزىغءظؤآ",
}
"""Letters of each language, the most frequent first."""
_WESTERN = "en fr de es it pt nl sv da fi is"
_CENTRAL = "pl cs sk hu ro hr"
ENCODINGS = {
    "cp1252": (0, _WESTERN),
    "cp1250": (2, _CENTRAL),
    "iso8859-2": (2, _CENTRAL),
    "cp1251": (2, "ru uk bg sr"),
    "koi8-r": (2, "ru"),
    "koi8-u": (3, "uk"),
    "cp1253": (2, "el"),
    "iso8859-7": (3, "el"),
    "cp1254": (2, "tr"),
    "cp1257": (2, "lt lv et"),
    "iso8859-15": (3, "fr fi et"),
    "iso8859-5": (3, "ru bg sr"),
    "cp866": (3, "ru"),
    "cp1255": (3, "he"),
    "cp1256": (3, "ar"),
    "iso8859-6": (4, "ar"),
    "iso8859-13": (4, "lt lv"),
    "cp850": (8, _WESTERN),
    "mac-roman": (8, _WESTERN),
    "cp852": (8, _CENTRAL),
}
"""Encodings of one byte a character: how much less likely than cp1252, in nats, and the languages
that are written in it."""
_LATIN = frozenset("en fr de es it pt nl sv da fi is pl cs sk hu ro hr tr lt lv et".split())
_MARKS = frozenset("“”‘’„‚–—…«»‹›°§€£·•©®™½¼¾²³±µ¿¡№ªº\u00a0×")
_PUNCTUATION = frozenset("“”‘’„‚–—…«»‹›")
_APART = frozenset("£¥¼½¾±¶¦¬¤¯¸")
_MARK, _FOREIGN, _UNKNOWN = log(5e-3), log(1e-5), log(1e-6)
_DECAY = 6.5  # ranks over which a letter becomes e times rarer
_OTHER_SCRIPT = 1.5  # by which a Latin letter is rarer in languages of other scripts, in nats
_ODD = re.compile(
    "(?<=[aä])Ä|(?<=[aA])[яЯ]|(?<=[яЯ])[aA]|(?<=[aäя])[+](?=[aäя])|(?<=я)Я|(?<=[aäя])[#]|[#](?=[aäя])"
)
"""Odd places of a shape (`_shape`): capitals and marks inside of words, letters of two scripts."""
_ODD_PENALTY = 4.0
_EAST_ASIAN = {
    "ja": ("cp932", "euc_jp", "euc_jis_2004"),
    "zh": ("gb18030", "big5", "big5hkscs"),
    "ko": ("cp949",),
}
"""Encodings of two bytes a character, by language."""
_KANA = "".join(map(chr, range(0x3041, 0x30FF)))
_FREQUENT = {
    "ja": frozenset(_KANA + "、。「」日本人年大一中"),
    "zh": frozenset(
        "的一是不了在人有我他中上大和地到以要就出可也你能而子那得下自之年作，。、：；"
        "这个们来为国说时会对生于着过发后里這個們來為國說時會對於著過發後裡"
    ),
    "ko": frozenset(
        "이다는을의에가하고지은로를한서도기사어니리나그대라자인시해정아수일보여부장상전제"
    ),
}
"""Frequent characters of each language."""
_SAMPLE = 65_536
"""Bytes that are scored, of lines that are not ASCII."""
_EXPLAINED = 0.85
"""Least share of the characters beyond ASCII that are letters of the language, or usual marks."""
_COHERENT = 0.1
"""Least coherence of a guess of charset-normalizer for a text that is mostly ASCII."""


_SIGNATURES = {
    b"%PDF-": "a PDF",
    b"PK\x03\x04": "a ZIP archive or an office document",
    b"\x89PNG": "a picture",
    b"GIF8": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"\x1f\x8b": "a gzip archive",
    b"7z\xbc\xaf": "a 7z archive",
    b"BZh": "a bzip2 archive",
    b"\xfd7zXZ": "an xz archive",
    b"Rar!": "a RAR archive",
    b"\x7fELF": "a program",
    b"OggS": "sound",
    b"ID3": "sound",
    b"SQLite format 3": "a database",
}
_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True, slots=True)
class _Guess:
    encoding: str
    score: float
    explained: float
    """Share of the characters beyond ASCII that the language explains."""


def decode_text(raw: bytes, declared: str = "") -> str:
    """Decode the text of a file.

    Tries its byte order mark, UTF-8, the encoding that it declares, and the likeliest encoding
    (`detect_encoding`). Raises `UnreadableDocument`.
    """
    for bom, encoding in _BOMS:
        if raw.startswith(bom):
            return _decode(raw, encoding)
    for signature, kind in _SIGNATURES.items():
        if raw.startswith(signature):
            raise UnreadableDocument(f"a binary file: {kind}")
    if b"\0" in raw:
        raise UnreadableDocument("a binary file")
    for encoding in ("utf-8", declared):
        try:
            if encoding:
                return raw.decode(encoding)
        except (UnicodeDecodeError, LookupError):
            continue
    return raw.decode(detect_encoding(raw))


def _decode(raw: bytes, encoding: str) -> str:
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        message = f"it begins as {encoding.removesuffix('-sig').upper()}, but is not at byte"
        raise UnreadableDocument(f"{message} {error.start}") from error


def detect_encoding(raw: bytes) -> str:
    """Return the likeliest encoding of a text that is not UTF-8.

    Raises:
        UnreadableDocument: No encoding of text explains the bytes.
    """
    if encoding := _east_asian_guess(raw, 0.35):
        return encoding
    sample = _sample(raw)
    guesses = [guess for encoding in ENCODINGS if (guess := _guess(sample, encoding)) is not None]
    for guess in sorted(guesses, key=lambda each: -each.score):
        if guess.explained < _EXPLAINED:
            break
        if _decodes(raw, guess.encoding):
            return guess.encoding
    return _east_asian_guess(raw, 0.15) or _library_guess(raw)


def _east_asian_guess(raw: bytes, least: float) -> str:
    """Return the encoding of two bytes a character whose text has most frequent characters.

    Their share of the characters beyond ASCII must be more than `least`.
    """
    best, encoding = least, ""
    for name, frequent in _FREQUENT.items():
        for each in _EAST_ASIAN[name]:
            try:
                text = raw.decode(each)
            except UnicodeDecodeError:
                continue
            beyond = [char for char in text if char > "\x7f"]
            share = sum(char in frequent for char in beyond) / max(1, len(beyond))
            if share > best:
                best, encoding = share, each
    return encoding


def _library_guess(raw: bytes) -> str:
    from charset_normalizer import from_bytes

    best = from_bytes(raw).best()
    if best is None:
        raise UnreadableDocument("a binary file: no encoding of text explains its bytes")
    ascii_share = sum(byte < 128 for byte in raw[:_SAMPLE]) / min(len(raw), _SAMPLE)
    if best.coherence < _COHERENT and ascii_share > 0.9 and _decodes(raw, "cp1252"):
        return "cp1252"
    return str(best.encoding)


def _sample(raw: bytes) -> bytes:
    """The lines that are not ASCII, up to a limit."""
    lines = (line for line in raw.splitlines() if not line.isascii())
    found, size = [], 0
    for line in lines:
        found.append(line[:_SAMPLE])
        size += len(line)
        if size > _SAMPLE:
            break
    return b"\n".join(found)


def _decodes(raw: bytes, encoding: str) -> bool:
    try:
        raw.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def _guess(sample: bytes, encoding: str) -> _Guess | None:
    """The best score of a sample over the languages of an encoding, or None if it is not in it."""
    try:
        text = sample.decode(encoding)
    except UnicodeDecodeError:
        return None
    unlikely, languages = ENCODINGS[encoding]
    counts = Counter(text)
    beyond = sum(count for char, count in counts.items() if not char.isascii())
    odd = len(_ODD.findall(text.translate({ord(char): _shape(char) for char in counts})))
    score, explained = max(_score(counts, language) for language in languages.split())
    score -= unlikely + _ODD_PENALTY * odd
    return _Guess(encoding, score, (explained - odd) / max(1, beyond))


def _shape(char: str) -> str:
    """A letter for the script and case of a character, `#` for marks that touch no letter, and `+`
    for marks such as `²` and `°`."""
    if char in _APART:
        return "#"
    if not char.isalpha():
        return "+" if not char.isascii() and char not in _PUNCTUATION else " "
    letter = "a" if char.isascii() else "я" if char > "\u036f" else "ä"
    return letter.upper() if char.isupper() else letter


def _score(counts: Counter[str], language: str) -> tuple[float, int]:
    """Logarithm of the likelihood of the characters, and how many beyond ASCII are explained."""
    weights, total, explained = _weights(language), 0.0, 0
    for char, count in counts.items():
        weight = weights.get(char.lower())
        if weight is None and char.isascii():
            if char < " " and char not in "\t\n\r\f":
                total += count * _UNKNOWN
            continue
        if weight is None and char in _MARKS:
            weight = _MARK
        if weight is None:
            total += count * (_FOREIGN if char.isalpha() else _UNKNOWN)
            continue
        total += count * weight
        explained += 0 if char.isascii() else count
    return total, explained


def letter_likelihood(letters: Sequence[str]) -> float:
    """Return the mean logarithm of the likelihood of letters in the language that fits best.

    Args:
        letters: Letters in lower case, at least one.
    """
    counts = Counter(letters)
    return max(
        sum(count * _weights(language).get(letter, _FOREIGN) for letter, count in counts.items())
        for language in LANGUAGES
    ) / len(letters)


@cache
def _weights(language: str) -> dict[str, float]:
    """Logarithm of each letter's frequency. ASCII letters have the frequencies of English in
    languages of other scripts."""
    weights: dict[str, float] = {}
    if language not in _LATIN:
        weights = {char: each - _OTHER_SCRIPT for char, each in _weights("en").items()}
        weights.pop("é")
    letters = LANGUAGES[language]
    norm = log(sum(exp(-rank / _DECAY) for rank in range(len(letters))))
    weights.update({letter: -rank / _DECAY - norm for rank, letter in enumerate(letters)})
    return weights
