"""The encoding of texts in 17 languages, in three lengths."""

from __future__ import annotations

import pytest

from ragcache.documents.charset import decode_text, detect_encoding
from ragcache.errors import UnreadableDocument

CENTRAL, CYRILLIC = ("cp1250", "iso8859-2"), ("cp1251", "koi8-r", "iso8859-5")
WESTERN = ("latin-1", "cp1252")
TEXTS: dict[str, tuple[tuple[str, ...], str]] = {
    "French": (
        WESTERN,
        "Le garçon naïf passait l'été près de la forêt, où il lisait. "
        "La clé du hangar à bateaux est accrochée derrière la fenêtre. "
        "Chaque élève reçoit un goûter.",
    ),
    "German": (
        WESTERN,
        "Der Schlüssel hängt im Flur, fragt vorher Herrn Größer. "
        "Für den Ausflug brauchen wir drei Körbe Äpfel. "
        "Die Straße ist wegen Bauarbeiten gesperrt.",
    ),
    "Spanish": (
        WESTERN,
        "Mañana empieza el año escolar y los niños están contentos. "
        "¿Dónde está la llave del almacén? La reunión será el miércoles después del café.",
    ),
    "Italian": (
        WESTERN,
        "La città è più bella di sera, però fa freddo. "
        "Perché la chiave non è al suo posto? Giovedì la riunione sarà in biblioteca.",
    ),
    "Portuguese": (
        WESTERN,
        "A reunião não é amanhã, é na próxima terça. "
        "As crianças estão no jardim com o avô. "
        "O café da manhã começa às sete horas.",
    ),
    "Dutch": (
        WESTERN,
        "De coördinator heeft één idee voor het reünieboek. "
        "België en Zeeland liggen naast elkaar. "
        "De financiën zijn geregeld.",
    ),
    "Swedish": (
        WESTERN,
        "Nyckeln hänger på väggen bredvid dörren. "
        "Båten ligger vid bryggan över sommaren. "
        "Möten hålls på måndagar.",
    ),
    "Danish": (
        WESTERN,
        "Nøglen hænger på væggen ved døren. "
        "Båden ligger i havnen hele året. "
        "Mødet begynder klokken tolv på lørdag.",
    ),
    "Finnish": (
        WESTERN,
        "Avain on seinällä oven vieressä. "
        "Kesällä vene pidetään järven rannalla. "
        "Kokous alkaa yhdeltätoista päivällä.",
    ),
    "Polish": (
        CENTRAL,
        "Klucz do łodzi wisi w żółtej szafce. "
        "Proszę wcześniej zapytać kierownika o zgodę. "
        "Łódź wraca w październiku, a święta są później.",
    ),
    "Czech": (
        CENTRAL,
        "Klíč od loděnice visí v červené skříni. "
        "Žádost podejte dříve, než začne měsíc. "
        "Příští schůzka je ve čtvrtek večer.",
    ),
    "Hungarian": (
        CENTRAL,
        "A csónakház kulcsa a piros szekrényben lóg. "
        "Kérdezze meg előbb az őrt, mert később zárva van. "
        "A gyűlés csütörtökön kezdődik.",
    ),
    "Russian": (
        (*CYRILLIC, "cp866"),
        "Ключ от лодочного сарая висит в красном шкафу. "
        "Сначала спросите сторожа. "
        "Собрание начнётся в четверг вечером.",
    ),
    "Ukrainian": (
        ("cp1251", "koi8-u"),
        "Ключ від човна висить у червоній шафі. "
        "Спочатку запитайте сторожа. "
        "Її збори розпочнуться в четвер.",
    ),
    "Bulgarian": (
        ("cp1251", "iso8859-5"),
        "Ключът от лодката виси в червения шкаф. "
        "Първо попитайте пазача. "
        "Събранието започва в четвъртък.",
    ),
    "Greek": (
        ("cp1253", "iso8859-7"),
        "Το κλειδί της βάρκας κρέμεται στο κόκκινο ντουλάπι. "
        "Ρωτήστε πρώτα τον φύλακα. "
        "Η συνάντηση αρχίζει την Πέμπτη.",
    ),
    "Turkish": (
        ("cp1254",),
        "Kayıkhanenin anahtarı kırmızı dolapta asılı. "
        "Önce bekçiye sorun, çünkü öğleden sonra kapalı. "
        "Toplantı perşembe günü başlıyor.",
    ),
    "Lithuanian": (
        ("cp1257",),
        "Valties raktas kabo raudonoje spintoje šalia durų. "
        "Pirmiausia paklauskite sargo, ar galima įeiti. "
        "Susirinkimas prasidės ketvirtadienį.",
    ),
}
"""Encodings of each language, and three sentences in it."""
CASES = [
    pytest.param(text, encoding, id=f"{language} in {encoding}")
    for language, (encodings, text) in TEXTS.items()
    for encoding in encodings
]


@pytest.mark.parametrize(("text", "encoding"), CASES)
def test_a_text_is_read_as_it_was_written(text: str, encoding: str) -> None:
    """A sentence, three sentences, and a page of them."""
    sentence = text.partition(". ")[0] + "."
    for each in (sentence, text, f"{text}\n" * 20):
        assert decode_text(each.encode(encoding)) == each


def test_typographic_marks_are_no_letters() -> None:
    text = "The key’s place – a “red” cupboard – is known…"
    assert detect_encoding(text.encode("cp1252")) == "cp1252"


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("shift_jis", "ボート小屋の鍵は赤い戸棚に掛かっています。借りる前に聞いてください。"),
        ("shift_jis", "会議録 第3回 東京湾岸整備計画について(抄)"),
        ("euc_jp", "灯台の鍵は赤い戸棚にあります。"),
        ("gb18030", "灯塔的钥匙在红色的柜子里。请先问一下。"),
        ("big5", "燈塔的鑰匙在紅色的櫃子裡。請先問一下。"),
        ("cp949", "등대의 열쇠는 빨간 찬장에 있습니다. 먼저 물어보세요."),
        ("gb18030", "船屋的钥匙挂在红色的柜子里。借用之前请先问管理员。会议在星期四开始。"),
        ("euc_kr", "보트 창고의 열쇠는 빨간 찬장에 걸려 있습니다. 빌리기 전에 물어보세요."),
    ],
)
def test_texts_of_east_asia_are_told_by_frequent_characters(encoding: str, text: str) -> None:
    raw = (text * 5).encode(encoding)
    assert raw.decode(detect_encoding(raw)) == text * 5


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(UnreadableDocument, match="no encoding of text"):
        detect_encoding(bytes(range(1, 256)) * 9)
