// Numbers as people read them. Every function takes null for "not known" and answers a dash.
const NONE = "–";
const whole = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 0 });
const missing = (value) => value === null || value === undefined || Number.isNaN(value);

/** 12345 → "12,345" */
export function count(value) {
  return missing(value) ? NONE : whole.format(value);
}

/** 12345 → "12.3 k" */
export function compact(value) {
  if (missing(value)) return NONE;
  return scaled(value, 1000, ["", "k", "M", "G", "T"]);
}

/** Bytes, in powers of 1024: 1536 → "1.5 KiB" */
export function bytes(value) {
  if (missing(value)) return NONE;
  return scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
}

function scaled(value, base, units) {
  let power = 0;
  while (Math.abs(value) >= base && power < units.length - 1) {
    value /= base;
    power += 1;
  }
  const digits = power === 0 || Math.abs(value) >= 100 ? 0 : 1;
  return `${value.toFixed(power === 0 && !Number.isInteger(value) ? 1 : digits)} ${units[power]}`.trim();
}

/** Seconds, short: 0.0382 → "38.2 ms", 1.5 → "1.50 s", 90 → "1 min 30 s" */
export function seconds(value) {
  if (missing(value)) return NONE;
  if (value === 0) return "0 ms";
  if (value < 0.01) return `${(value * 1e3).toFixed(2)} ms`;
  if (value < 0.1) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1e3)} ms`;
  if (value < 10) return `${value.toFixed(2)} s`;
  if (value < 60) return `${value.toFixed(1)} s`;
  return span(value);
}

/** Seconds, in the two largest units: 19.4 → "19 s", 90061 → "1 d 1 h" */
export function span(value) {
  const units = [
    ["d", 86400],
    ["h", 3600],
    ["min", 60],
    ["s", 1],
  ];
  if (missing(value) || value < 1) return missing(value) ? NONE : "0 s";
  const first = units.findIndex(([, size]) => value >= size);
  const [name, size] = units[first];
  const rest = units[first + 1];
  const parts = [`${Math.floor(value / size)} ${name}`];
  const left = rest ? Math.floor((value % size) / rest[1]) : 0;
  if (left) parts.push(`${left} ${rest[0]}`);
  return parts.join(" ");
}

/** Unix seconds → "3 min ago", and the date where that is more than a week */
export function ago(at, now = Date.now() / 1000) {
  if (missing(at) || at === 0) return NONE;
  const age = now - at;
  if (age < 1) return "now";
  if (age < 60) return `${Math.floor(age)} s ago`;
  if (age < 3600) return `${Math.floor(age / 60)} min ago`;
  if (age < 86400) return `${Math.floor(age / 3600)} h ago`;
  if (age < 7 * 86400) return `${Math.floor(age / 86400)} d ago`;
  return date(at);
}

/** Unix seconds → "2026-11-23T14:05:09+01:00", the local time by ISO 8601 */
export function iso(at) {
  const offset = -new Date(at * 1000).getTimezoneOffset(); // minutes
  const local = new Date((at + offset * 60) * 1000).toISOString().slice(0, 19);
  const two = (number) => String(Math.floor(number)).padStart(2, "0");
  const zone = `${two(Math.abs(offset) / 60)}:${two(Math.abs(offset) % 60)}`;
  return `${local}${offset < 0 ? "-" : "+"}${zone}`;
}

/** Unix seconds → "14:05", with seconds if asked for */
export function clock(at, withSeconds = false) {
  const parts = { hour: "2-digit", minute: "2-digit", ...(withSeconds && { second: "2-digit" }) };
  return new Date(at * 1000).toLocaleTimeString("en-GB", parts);
}

/** Unix seconds → "21 Nov 2026, 14:05" */
export function date(at) {
  if (missing(at)) return NONE;
  return new Date(at * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
}

/** 0.123 → "12 %" */
export function percent(share) {
  if (missing(share)) return NONE;
  const digits = share > 0 && share < 0.1 ? 1 : 0;
  return `${(share * 100).toFixed(digits)} %`;
}

/** 1, "module" → "1 module"; 1200 → "1,200 modules" */
export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}
