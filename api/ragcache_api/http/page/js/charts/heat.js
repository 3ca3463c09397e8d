// Reuse of modules over time: a row a module, a column a slot of time, the stronger the more.
import { s, show } from "../dom.js";
import { clock, count } from "../format.js";
import { timeTicks } from "./scales.js";

const ROW = 20;
const NAME = 18; // of a name above its row, where there is no room beside it
const ROOM = 520;
const TOP = 22;
const LEVELS = 5;
const COLUMNS = 60;
const LETTER = 6.6; // pixels of a letter of a row's name, on average

/** The map in `host`. chosen: called with a module's name when its label is chosen. */
export function heatMap(host, { signal, chosen }) {
  let heat = null;
  const watcher = new ResizeObserver(() => heat && draw(host, heat, chosen));
  watcher.observe(host);
  signal.addEventListener("abort", () => watcher.disconnect());
  return {
    update(next) {
      heat = next;
      draw(host, heat, chosen);
    },
  };
}

/** 0 for none, 1 to 5 by the square root of the share of the most: few stay visible. */
export function level(number, most) {
  return number ? Math.max(1, Math.ceil(Math.sqrt(number / most) * LEVELS)) : 0;
}

/** The same over at most COLUMNS slots, neighbors summed up. */
export function gathered({ modules, buckets, counts }) {
  const each = Math.ceil(buckets.length / COLUMNS);
  const starts = buckets.map((_, index) => index).filter((index) => index % each === 0);
  const sums = (row) =>
    starts.map((from) => row.slice(from, from + each).reduce((sum, number) => sum + number, 0));
  return { modules, buckets: starts.map((from) => buckets[from]), counts: counts.map(sums) };
}

function draw(host, heat, chosen) {
  const { modules, buckets, counts } = gathered(heat);
  const longest = Math.max(...modules.map((name) => name.length));
  const width = host.clientWidth;
  if (width < 200) return;
  const above = width < ROOM;
  const label = above ? 0 : Math.min(280, width * 0.3, 24 + longest * LETTER);
  const step = ROW + (above ? NAME : 0);
  const cell = (width - label - 60) / buckets.length;
  const most = Math.max(...counts.flat());
  const height = TOP + modules.length * step + 4;
  const rows = modules.map((name, row) =>
    line({
      name,
      top: TOP + row * step,
      width,
      label,
      above,
      cell,
      most,
      counts: counts[row],
      buckets,
      chosen,
    }),
  );
  const summary = `Reuse of ${modules.length} modules over ${buckets.length} slots of time; at most ${count(most)} in one`;
  const kept = host.contains(document.activeElement) ? document.activeElement.dataset.name : null;
  show(
    host,
    s(
      "svg",
      { width, height, class: "heat", role: "group", "aria-label": summary },
      times(buckets, label, cell),
      rows,
    ),
  );
  if (kept) host.querySelector(`[data-name="${CSS.escape(kept)}"]`)?.focus();
}

function times(buckets, label, cell) {
  const slot = buckets.length > 1 ? buckets[1] - buckets[0] : 60;
  const end = buckets.at(-1) + slot;
  const room = Math.max(2, Math.floor((cell * buckets.length) / 80));
  return timeTicks(buckets[0], end, room).map((at) =>
    s("text", { class: "tick", x: label + ((at - buckets[0]) / slot) * cell, y: 12 }, clock(at)),
  );
}

function line({ name, top, width, label, above, cell, most, counts, buckets, chosen }) {
  const y = top + (above ? NAME : 0);
  const all = counts.reduce((sum, number) => sum + number, 0);
  const pick = () => chosen(name);
  const room = Math.floor(((above ? width : label) - 20) / LETTER);
  const shown = name.length > room ? `…${name.slice(1 - room)}` : name;
  const text = s(
    "text",
    {
      class: "rowname",
      "data-name": name,
      x: above ? 0 : label - 10,
      y: top + 14,
      "text-anchor": above ? "start" : "end",
      tabindex: "0",
      role: "link",
      "aria-label": `${name}: ${count(all)} reuses`,
      onclick: pick,
      onkeydown: (event) => event.key === "Enter" && pick(),
    },
    shown,
    s("title", {}, name),
  );
  const cells = counts.map((number, column) =>
    s(
      "rect",
      {
        class: `cell l${level(number, most)}`,
        x: label + column * cell + 0.5,
        y: y + 0.5,
        width: Math.max(1, cell - 1),
        height: ROW - 1,
        rx: 2,
      },
      s("title", {}, `${name}, ${clock(buckets[column])}: ${count(number)}`),
    ),
  );
  const sum = s(
    "text",
    { class: "tick num", x: label + cell * counts.length + 52, y: y + 14, "text-anchor": "end" },
    count(all),
  );
  return s("g", {}, text, cells, sum);
}
