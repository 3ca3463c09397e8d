"""Register entries: short documents of one shape that differ in their facts alone.

A thousand clinics, ships or contracts described alike are what a retriever confuses: each question
names its entry, and the entries around it share sentences, names and numbers. In English and Chinese.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from slots import TYPES
from templates import Filled

Value = Callable[[random.Random], str]


@dataclass(frozen=True)
class Fact:
    """A statement of an entry, and the questions for it. `{n}` is the entry's name, `{v}` the
    value, which the statements hold word for word."""

    value: Value
    statements: tuple[str, ...]
    questions: tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    name: Value
    facts: tuple[Fact, ...]


def _slot(kind: str, arguments: str = "") -> Value:
    return lambda rng: TYPES[kind](rng, arguments)[""]


def _of(choices: str) -> Value:
    listed = choices.split("|")
    return lambda rng: rng.choice(listed)


def _fact(value: Value, statements: str, questions: str) -> Fact:
    return Fact(value, tuple(statements.split("|")), tuple(questions.split("|")))


_SURNAMES = "王李张刘陈杨黄赵吴周徐孙马朱胡郭何高林罗郑梁谢宋唐许韩冯邓曹彭曾肖田董袁潘蒋蔡余杜叶程苏魏吕丁任沈姚卢姜崔钟谭陆汪范金石廖贾夏韦付方白邹孟熊秦邱江尹薛闫段雷侯龙史陶黎贺顾毛郝龚邵万钱严"
_GIVEN = "伟芳娜敏静丽强磊军洋勇艳杰娟涛明超秀霞平刚桂英华玉兰志文建国海燕春梅鹏飞宇浩然子涵欣怡雨晨思远嘉诚晓东立新红云峰博琳婷雪梓轩一鸣书瑶清岚正阳青松"
_PLACE = "云石清江龙凤南北东西金银白青安和兴平长新永丰泰宁临海山川湖河林桥泉溪州城阳岭门口塘湾"
_HAN_DIGITS = "零一二三四五六七八九"


def han_person(rng: random.Random) -> str:
    return rng.choice(_SURNAMES) + "".join(rng.sample(_GIVEN, rng.choice([1, 2, 2])))


def han_place(rng: random.Random) -> str:
    return "".join(rng.sample(_PLACE, 2)) + rng.choice("市县镇区村")


def han_number(low: int, high: int) -> Value:
    def number(rng: random.Random) -> str:
        value = rng.randint(low, high)
        if value < 100 and rng.random() < 0.3:
            tens, ones = divmod(value, 10)
            head = ("" if tens == 1 else _HAN_DIGITS[tens]) + "十" if tens else ""
            return head + (_HAN_DIGITS[ones] if ones or not tens else "")
        return str(value)

    return number


def han_date(rng: random.Random) -> str:
    year = f"{rng.randint(1900, 2025)}年"
    return rng.choice([year, f"{year}{rng.randint(1, 12)}月", f"{year}{rng.randint(1, 12)}月{rng.randint(1, 28)}日"])


def _with(unit: str, value: Value) -> Value:
    return lambda rng: value(rng) + unit


def _named(shape: str, *parts: Value) -> Value:
    return lambda rng: shape.format(*(part(rng) for part in parts))


_PERSON, _DATE, _YEAR, _TOWN = _slot("person"), _slot("date"), _slot("year"), _slot("town")

KINDS: tuple[Kind, ...] = (
    Kind(_named("{} {}", _slot("town"), _of("Clinic|Surgery|Medical Centre|Dental Practice|Pharmacy")), (
        _fact(_slot("time"), "{n} opens at {v} on weekdays.|On weekdays the doors of {n} are unlocked at {v}.", "When does {n} open?|At what time can patients first come to {n}?"),
        _fact(_PERSON, "Its practice manager is {v}.|It is run by {v}.", "Who manages {n}?|Who runs {n}?|Who is the practice manager of {n}?"),
        _fact(_slot("phone"), "Appointments are made by calling {v}.|The number for appointments is {v}.", "Which number do I call for an appointment at {n}?|What is the phone number of {n}?"),
        _fact(_slot("address"), "It stands at {v}.|The building is at {v}.", "Where is {n}?|What is the address of {n}?"),
        _fact(_slot("int", "3 40"), "There are {v} parking spaces behind it.|Behind the house are {v} parking spaces.", "How many parking spaces does {n} have?|How many cars can park at {n}?"),
    )),
    Kind(_slot("ship"), (
        _fact(_YEAR, "{n} was built in {v}.|The vessel {n} was launched in {v}.", "When was {n} built?|In what year was {n} launched?"),
        _fact(_PERSON, "Her captain is {v}.|She sails under {v}.", "Who is the captain of {n}?|Who commands {n}?"),
        _fact(_slot("measure", "metres 20 190"), "She is {v} long.|From bow to stern she measures {v}.", "How long is {n}?|What is the length of {n}?"),
        _fact(_TOWN, "Her home port is {v}.|She is registered in {v}.", "What is the home port of {n}?|Where is {n} registered?"),
        _fact(_slot("int", "4 60"), "A crew of {v} works on board.|On board is a crew of {v}.", "How large is the crew of {n}?|How many people work on {n}?"),
    )),
    Kind(_PERSON, (
        _fact(_slot("role"), "{n} works as {v}.|{n} has been {v} for some years.", "What does {n} do?|What is the job of {n}?"),
        _fact(_slot("room"), "The desk is in {v}.|Visitors find the office in {v}.", "In which room does {n} work?|Where is the office of {n}?"),
        _fact(_slot("phone"), "The extension is {v}.|Calls are taken on {v}.", "What is the extension of {n}?|On which number can I reach {n}?"),
        _fact(_DATE, "The contract began on {v}.|The first working day was {v}.", "When did {n} start?|When did the contract of {n} begin?"),
        _fact(_PERSON, "During holidays {v} stands in.|The deputy is {v}.", "Who stands in for {n}?|Who is the deputy of {n}?"),
        _fact(_slot("language"), "Besides English, {v} is spoken.|The second language is {v}.", "Which language besides English does {n} speak?|What is the second language of {n}?"),
    )),
    Kind(_slot("product"), (
        _fact(_slot("money", "5 900"), "{n} costs {v}.|The list price of {n} is {v}.", "How much is {n}?|What does {n} cost?"),
        _fact(_slot("duration", "months 6 60"), "The warranty lasts {v}.|It is guaranteed for {v}.", "How long is the warranty of {n}?|For how long is {n} guaranteed?"),
        _fact(_slot("measure", "grams 90 9000"), "It weighs {v}.|Its weight is {v}.", "How heavy is {n}?|What does {n} weigh?"),
        _fact(_slot("colour"), "The housing is {v}.|It comes in {v} only.", "What colour is {n}?|In which colour does {n} come?"),
        _fact(_slot("org"), "It is made by {v}.|The maker is {v}.", "Who makes {n}?|Which company makes {n}?"),
        _fact(_slot("code"), "Spare parts are ordered under {v}.|Its part number is {v}.", "What is the part number of {n}?|Under which number are spare parts of {n} ordered?"),
    )),
    Kind(_named("the {} {}", _slot("town"), _of("bridge|reservoir|museum|library|observatory|tunnel|market hall|station")), (
        _fact(_YEAR, "{n} was opened in {v}.|The public was first let into {n} in {v}.", "When was {n} opened?|In what year did {n} open?"),
        _fact(_PERSON, "It was designed by {v}.|The plans were drawn by {v}.", "Who designed {n}?|Who drew the plans of {n}?"),
        _fact(_slot("money", "20000 900000"), "Building it cost {v}.|The work came to {v}.", "How much did {n} cost?|What was the cost of {n}?"),
        _fact(_slot("org"), "It belongs to {v}.|The owner is {v}.", "Who owns {n}?|To whom does {n} belong?"),
        _fact(_slot("int", "1200 90000"), "Last year {v} people visited it.|The visitors of the last year numbered {v}.", "How many people visited {n} last year?|How many visitors did {n} have last year?"),
    )),
    Kind(_named("{} {}", _of("Contract|Order|Case|Ticket|Policy|Permit"), _slot("code")), (
        _fact(_DATE, "{n} was signed on {v}.|{n} carries the date of {v}.", "When was {n} signed?|What is the date of {n}?"),
        _fact(_slot("org"), "The other party is {v}.|It was made with {v}.", "With whom was {n} made?|Who is the other party of {n}?"),
        _fact(_slot("money", "200 90000"), "Its value is {v}.|It is worth {v}.", "What is {n} worth?|What is the value of {n}?"),
        _fact(_PERSON, "{v} is responsible for it.|Questions about it go to {v}.", "Who is responsible for {n}?|Who handles {n}?"),
        _fact(_slot("duration", "days 5 90"), "The notice period is {v}.|It can be ended with {v} of notice.", "What is the notice period of {n}?|How much notice does {n} require?"),
    )),
    Kind(_named("{}{}", han_place, _of("医院|图书馆|中学|博物馆|派出所|体育馆|养老院|幼儿园")), (
        _fact(han_date, "{n}成立于{v}。|{n}于{v}建成。", "{n}是什么时候成立的？|{n}何时建成？"),
        _fact(han_person, "负责人是{v}。|由{v}担任负责人。", "{n}的负责人是谁？|谁负责{n}？"),
        _fact(_with("名", han_number(12, 900)), "现有员工{v}。|共有{v}工作人员。", "{n}有多少员工？|{n}有多少名工作人员？"),
        _fact(_with("平方米", han_number(300, 90000)), "占地面积{v}。|总面积为{v}。", "{n}的面积是多少？|{n}占地多大？"),
        _fact(_named("{}{}路{}号", han_place, _of("人民|解放|中山|建设|和平|朝阳|文化|光明"), han_number(1, 300)), "地址是{v}。|位于{v}。", "{n}在哪里？|{n}的地址是什么？"),
        _fact(_named("{}:{}0", han_number(6, 10), han_number(0, 5)), "每天{v}开门。|开放时间从{v}开始。", "{n}几点开门？|{n}从几点开始开放？"),
    )),
    Kind(han_person, (
        _fact(han_date, "{n}生于{v}。|{n}出生在{v}。", "{n}是什么时候出生的？|{n}何时出生？"),
        _fact(han_place, "家乡是{v}。|老家在{v}。", "{n}的家乡在哪里？|{n}是哪里人？"),
        _fact(_of("教师|医生|工程师|会计|律师|记者|司机|厨师|护士|设计师|翻译|研究员"), "职业是{v}。|现在是一名{v}。", "{n}的职业是什么？|{n}做什么工作？"),
        _fact(_named("{}大学", han_place), "毕业于{v}。|曾在{v}学习。", "{n}毕业于哪所大学？|{n}在哪里上的大学？"),
        _fact(_with("年", han_number(2, 40)), "工作已有{v}。|从业{v}。", "{n}工作多少年了？|{n}从业多久？"),
    )),
    Kind(_named("第{}号{}", han_number(100, 9999), _of("合同|项目|订单|决定|通知|文件")), (
        _fact(han_date, "{n}签订于{v}。|{n}的日期是{v}。", "{n}是什么时候签订的？|{n}的日期是什么？"),
        _fact(_with("万元", han_number(2, 9000)), "金额为{v}。|总价{v}。", "{n}的金额是多少？|{n}总价多少？"),
        _fact(han_person, "由{v}负责。|联系人是{v}。", "谁负责{n}？|{n}的联系人是谁？"),
        _fact(_with("天", han_number(5, 90)), "期限为{v}。|须在{v}内完成。", "{n}的期限是多少天？|{n}须在多久内完成？"),
        _fact(_named("{}{}有限公司", han_place, _of("建筑|科技|贸易|食品|物流|电子|环保")), "对方是{v}。|承办方为{v}。", "{n}的对方是谁？|{n}由哪家公司承办？"),
    )),
)  # fmt: skip


def draw_entries(rng: random.Random, count: int) -> list[Filled]:
    """Entries of one kind in one shape: the same facts in the same order and wording. Each lacks the
    fact that its unanswerable question asks for."""
    kind = rng.choice(KINDS)
    size = rng.randint(3, len(kind.facts))
    facts = rng.sample(kind.facts, size)
    wordings = [rng.choice(fact.statements) for fact in facts]
    facts_left = [fact for fact in kind.facts if fact not in facts]
    entries = []
    for _ in range(count):
        name = kind.name(rng)
        shown, questions = [], []
        for fact, wording in zip(facts, wordings, strict=True):
            value = fact.value(rng)
            shown.append(wording.format(n=name, v=value))
            questions.append((rng.choice(fact.questions).format(n=name), value))
        vain = [rng.choice(fact.questions).format(n=name) for fact in facts_left]
        title = name[:1].upper() + name[1:]
        text = ("" if "\u4e00" <= title[-1] <= "\u9fff" else " ").join(s[:1].upper() + s[1:] for s in shown)
        entries.append(Filled(title, text, tuple(questions), tuple(vain)))
    return entries
