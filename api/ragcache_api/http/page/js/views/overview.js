// The state of the server at a glance.
import { get, withQuery } from "../api.js";
import { timeChart, legend } from "../charts/frame.js";
import { fillBar } from "../charts/bars.js";
import { timesOver } from "../charts/lines.js";
import { slots } from "../charts/series.js";
import { stacked } from "../charts/stacked.js";
import { h, show } from "../dom.js";
import { evictions } from "../evicted.js";
import { bytes, compact, count, percent, plural, seconds, span } from "../format.js";
import { empty, fault, figure, loading, panel, segmented, withheld } from "../parts.js";
import { poll } from "../polling.js";
import { SOURCES, keptShare, source } from "../sources.js";
import { complain } from "../toasts.js";
import { memoryLines } from "../memory.js";
import { modeLines } from "../modes.js";

const PERIOD = 5;
const EVICTIONS = 6; // listed one by one
const LINES = [
  { name: "ttft_hit_p50", label: "Hit p50", color: "var(--device)", dashed: false },
  { name: "ttft_hit_p95", label: "Hit p95", color: "var(--device)", dashed: true },
  { name: "ttft_miss_p50", label: "Miss p50", color: "var(--computed)", dashed: false },
  { name: "ttft_miss_p95", label: "Miss p95", color: "var(--computed)", dashed: true },
];

export const overview = {
  id: "overview",
  title: "Overview",
  about: "What the cache holds, and what it saves.",
  mount,
};

function mount({ body, actions, signal }) {
  show(body, loading());
  let minutes = 60;
  let parts = null;
  let stats = null;
  const choices = [
    [5, "5 min"],
    [15, "15 min"],
    [60, "1 h"],
  ];
  const draw = () => stats && drawSeries(parts, stats, minutes);
  show(
    actions,
    segmented("Time shown", choices, minutes, (value) => {
      minutes = value;
      draw();
    }),
  );
  const read = async () => {
    const [next, state, memory, gone] = await Promise.all([
      get("stats", { signal }),
      get("state", { signal }),
      get("memory", { signal }).catch(unlessForbidden),
      get(withQuery("evictions", { limit: EVICTIONS }), { signal }),
    ]);
    stats = next;
    parts ??= skeleton(body, signal);
    show(parts.figures, figures(stats));
    show(parts.tiers, memory ? memory.tiers.map(tierLine) : withheld("tiers"));
    show(parts.memory, memory ? memoryLines(memory) : withheld("memory"));
    show(parts.modes, modeLines(state));
    show(parts.evictions, evictions(stats, gone.items));
    show(parts.counters, counters(stats));
    draw();
  };
  poll(signal, PERIOD, read, (error) => (parts ? complain(error) : show(body, fault(error))));
}

// A key of one namespace may not see what all of them share.
function unlessForbidden(error) {
  if (error.status === 403) return null;
  throw error;
}

function skeleton(body, signal) {
  const node = (tag = "div", kind = "") => h(tag, { class: kind });
  const parts = {
    figures: node("dl", "figures"),
    tiers: node("div", "tiers"),
    memory: node("div", "tiers"),
    modes: node("div", "tiers"),
    evictions: node("div", "evictions"),
    counters: node("dl", "counters"),
  };
  const tokens = node();
  const times = node();
  show(
    body,
    parts.figures,
    h(
      "div",
      { class: "panels" },
      panel("Prompt tokens by source", { aside: legend(SOURCES) }, tokens),
      panel("Time to first token", { aside: legend(LINES) }, times),
      panel("Tiers", { note: "hatched: pinned" }, parts.tiers),
      panel("Memory", { note: "of this process, its machine and its GPU" }, parts.memory),
      panel("Modes", { note: "how far from exact on this model" }, parts.modes),
      panel("Evictions by reason", { note: "of all time" }, parts.evictions),
      panel("Engine and requests", {}, parts.counters),
    ),
  );
  parts.tokens = timeChart(tokens, {
    label: "Prompt tokens over time, by source. Arrow keys read values.",
    signal,
  });
  parts.times = timeChart(times, {
    label: "Time to first token over time, hits against misses. Arrow keys read values.",
    signal,
  });
  return parts;
}

function drawSeries(parts, stats, minutes) {
  const shown = slots(stats.series, minutes);
  const quiet = empty(
    "Nothing was asked in this time",
    "Prompt tokens appear here with the first question.",
    h("a", { href: "#/ask", class: "button" }, "Ask a question"),
  );
  parts.tokens.update(stacked(shown, quiet));
  parts.times.update(
    timesOver(
      shown,
      LINES,
      empty("No first tokens yet", "Times of hits and misses appear here once requests have run."),
    ),
  );
}

function figures(stats) {
  const { hit, miss } = stats.ttft;
  const documents = Object.values(stats.collections).reduce((sum, number) => sum + number, 0);
  return [
    figure(
      "Tokens not computed",
      percent(keptShare(stats.tokens)),
      `of ${compact(Object.values(stats.tokens).reduce((sum, number) => sum + number, 0))} tokens`,
      "kept",
    ),
    figure("First token, hit (p50)", seconds(hit.p50), compared(hit, miss)),
    figure(
      "First token, miss (p50)",
      seconds(miss.p50),
      miss.count ? `p95 ${seconds(miss.p95)}` : "no misses yet",
    ),
    figure(
      "Requests now",
      count(stats.requests.running),
      `${count(stats.requests.waiting)} waiting`,
      "running",
    ),
    figure(
      "Documents",
      count(documents),
      `in ${plural(Object.keys(stats.collections).length, "collection")}`,
      "documents",
    ),
  ];
}

function compared(hit, miss) {
  if (!hit.count) return "no hits yet";
  if (!hit.p50 || !miss.p50) return "no misses to compare with";
  const [times, word] =
    hit.p50 <= miss.p50 ? [miss.p50 / hit.p50, "faster"] : [hit.p50 / miss.p50, "slower"];
  return `${times.toFixed(1)} × ${word} than a miss`;
}

function tierLine(tier) {
  const { label, color } = source(tier.name);
  const budget = tier.budget_bytes;
  const fill = budget ? percent(tier.used_bytes / budget) : "no limit";
  const says = `${label}: ${bytes(tier.used_bytes)} used${budget ? ` of ${bytes(budget)}` : ""}, ${bytes(tier.pinned_bytes)} pinned`;
  return h(
    "div",
    { class: "tier", "data-tier": tier.name },
    h(
      "div",
      { class: "line" },
      h("strong", {}, label),
      h(
        "span",
        { class: "num" },
        bytes(tier.used_bytes),
        h("span", { class: "muted" }, budget ? ` of ${bytes(budget)}` : ""),
        h("b", {}, fill),
      ),
    ),
    fillBar({ used: tier.used_bytes, pinned: tier.pinned_bytes, budget, color, label: says }),
    h(
      "div",
      { class: "line muted" },
      h("span", {}, `${plural(tier.states, "state")} · ${bytes(tier.pinned_bytes)} pinned · ${bytes(tier.conversation_bytes)} of conversations`),
      h("span", {}, plural(tier.hits, "hit"), tier.persistent ? " · kept over restarts" : ""),
    ),
  );
}

function counters({ requests, engine, uptime }) {
  return [
    figure("Finished", count(requests.finished), null, "finished"),
    figure("Failed", count(requests.failed)),
    figure("Cancelled", count(requests.cancelled)),
    figure("Steps", count(engine.steps)),
    figure("Rows per step", engine.batch_mean?.toFixed(1) ?? "–"),
    figure("Waited in queue", seconds(engine.queued_s), "all requests together"),
    figure("Preempted", count(engine.preempted)),
    figure("Up for", span(uptime)),
  ];
}
