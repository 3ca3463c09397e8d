// Words in the reader's language, and numbers as people read them.
import STRINGS from "./strings.json" with { type: "json" };

export const LANGUAGES = { en: "English", de: "Deutsch" };
const STORED = "ragcache.language";
const NONE = "–";

export const language = chosenLanguage();
document.documentElement.lang = language;
const locale = language === "en" ? "en-GB" : language;
const column = Object.keys(LANGUAGES).indexOf(language);
// Made once: a table of 100 rows would take longer to make them than to draw.
const decimals = [0, 1, 2, 3].map((digits) => new Intl.NumberFormat(locale, { minimumFractionDigits: digits, maximumFractionDigits: digits }));
const moments = new Intl.DateTimeFormat(locale, { dateStyle: "medium", timeStyle: "short" });
// A format of numbers, which shows those that are missing as a dash.
const shown = (format) => (value, ...more) =>
  value === null || value === undefined || Number.isNaN(value) ? NONE : format(value, ...more);

function chosenLanguage() {
  const wanted = [localStorage.getItem(STORED), ...navigator.languages];
  const known = wanted.map((each) => each?.slice(0, 2)).find((each) => each in LANGUAGES);
  return known ?? "en";
}

/** Remembers the language, and shows the page in it. */
export const speak = (name) => (localStorage.setItem(STORED, name), location.reload());

/** The words of a key. `{name}` is replaced by a value; with `n`, "one|many" chooses its form. */
export function t(key, values = {}) {
  const forms = (STRINGS[key]?.[column] ?? key).split("|");
  const text = forms.length > 1 && values.n !== 1 ? forms[1] : forms[0];
  return text.replace(/\{(\w+)\}/g, (_, name) => (name === "n" ? count(values.n) : String(values[name] ?? "")));
}

/** The words of what the server named (`status`, `done`), or its own name. */
export const word = (kind, name) => (`${kind}_${name}` in STRINGS ? t(`${kind}_${name}`) : name);

const decimal = (value, digits) => decimals[digits].format(value);

/** 12345 → "12,345" */
export const count = shown((value) => decimal(value, 0));

/** 12345 → "12.3 k" */
export const compact = shown((value) => scaled(value, 1000, ["", "k", "M", "G", "T"]));

/** Bytes, in powers of 1024: 1536 → "1.5 KiB" */
export const bytes = shown((value) => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]));

function scaled(value, base, units) {
  let power = 0;
  for (; Math.abs(value) >= base && power < units.length - 1; power += 1) value /= base;
  return `${decimal(value, power === 0 || Math.abs(value) >= 100 ? 0 : 1)} ${units[power]}`.trim();
}

/** 0.123 → "12 %" */
export const percent = shown((share) => `${decimal(share * 100, share > 0 && share < 0.1 ? 1 : 0)} %`);

export const fixed = shown((value, digits = 2) => decimal(value, digits));

/** Seconds, short: 0.0382 → "38 ms", 1.5 → "1.5 s", 90 → "1 min 30 s" */
export const seconds = shown((value) => {
  if (value < 0.9995) return `${decimal(value * 1e3, value > 0 && value < 0.01 ? 2 : 0)} ms`;
  return value < 60 ? `${decimal(value, value < 10 ? 2 : 1)} s` : span(value);
});

/** Seconds, in the two largest units: 90061 → "1 d 1 h" */
export const span = shown((value) => {
  const units = Object.entries({ [t("day")]: 86400, h: 3600, min: 60, s: 1 });
  const first = units.findIndex(([, size]) => value >= size);
  if (first < 0) return "0 s";
  const [name, size] = units[first];
  const [next, part] = units[first + 1] ?? ["", 1];
  const left = next ? Math.floor((value % size) / part) : 0;
  return `${Math.floor(value / size)} ${name}${left ? ` ${left} ${next}` : ""}`;
});

/** Unix seconds → "3 min ago", and the date where that is more than a week */
export const ago = shown((at) => {
  const age = Date.now() / 1000 - at;
  if (age < 1) return t("now");
  return age < 7 * 86400 ? t("ago", { time: span(age).split(" ").slice(0, 2).join(" ") }) : date(at);
});

/** Unix seconds → "21 Nov 2026, 14:05" */
export const date = shown((at) => moments.format(at * 1000));

/** Unix seconds → "2026-11-23T13:05:09Z", for programs */
export const iso = (at) => `${new Date(at * 1000).toISOString().slice(0, 19)}Z`;

/** A name from outside: characters that would turn the order of letters around become visible. */
export const plain = (text) => String(text ?? "").replace(/[\u202a-\u202e\u2066-\u2069]/g, "\ufffd");
