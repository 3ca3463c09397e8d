// One answer as it comes: text, sources, tokens, times.
import { partsBar, tokenBars } from "./charts/bars.js";
import { legend } from "./charts/frame.js";
import { openModule } from "./document.js";
import { h, show } from "./dom.js";
import { count, percent, plural, seconds } from "./format.js";
import { empty, panel, plainTable, tierChip } from "./parts.js";
import { quotations } from "./quotations.js";

const STAGES = [
  ["queued", "Queued", "var(--shared)"],
  ["retrieve", "Retrieve", "var(--disk)"],
  ["assemble", "Assemble", "var(--host)"],
  ["prefill", "First token", "var(--encoded)"],
  ["decode", "Rest", "var(--device)"],
];

const SCORES = [
  ["bm25", "BM25", 1],
  ["cosine", "Cosine", 2],
];

/** Draws into `stage`; answers what takes the events of the stream. */
export function account(stage, { question, collection }) {
  const nodes = laidOut(stage, question);
  const cursor = h("i", { class: "caret" });
  const times = [];
  let frame = 0;
  show(nodes.text, cursor);
  const drawGaps = () => {
    frame = 0;
    show(nodes.gaps, gapChart(times, nodes.gaps.clientWidth));
  };
  return {
    sources: (list) => show(nodes.sources, sourceTable(list, collection)),
    token({ text, at }) {
      cursor.before(text);
      times.push(at);
      frame ||= requestAnimationFrame(drawGaps);
    },
    answer(answer) {
      show(
        nodes.text,
        answer.text.trim() || h("span", { class: "muted" }, "The model said nothing."),
        cursor,
        quotations(collection, answer),
        sureness(answer),
      );
      show(nodes.sources, sourceTable(answer.sources, collection));
      show(nodes.cost, cost(answer.reuse, answer.mode));
      show(nodes.times, waterfall(answer.timings));
    },
    failed: (problem) => nodes.text.append(failure(problem)),
    stopped: () => nodes.text.append(h("p", { class: "muted" }, "Stopped.")),
    ended() {
      cursor.remove();
      if (!times.length) show(nodes.gaps, empty("No tokens", "Nothing was generated."));
    },
  };
}

function laidOut(stage, question) {
  const text = h("div", { class: "said", "aria-live": "polite" });
  const [sources, cost, times] = [h("div"), h("div"), h("div")];
  const gaps = h("div", { class: "gaps" });
  const panels = [
    panel("Modules used", {}, sources),
    panel("Prompt tokens", {}, cost),
    panel("Time of each token", {}, gaps),
    panel("Where the time went", {}, times),
  ];
  const answer = panel("Answer", { kind: "answer" }, h("p", { class: "question" }, question), text);
  show(stage, answer, h("div", { class: "panels" }, panels));
  answer.scrollIntoView({ block: "nearest" });
  return { text, sources, cost, gaps, times };
}

function failure({ title, detail }) {
  const said = [h("strong", {}, title ?? "Failed"), ` ${detail ?? ""}`];
  return h("p", { class: "fault", role: "alert" }, said);
}

function sureness({ confidence, finish_reason: reason }) {
  if (confidence == null) return null;
  const refused = reason === "no_answer" ? "Refused: " : "";
  return h(
    "p",
    { class: "muted num", "data-figure": "confidence" },
    `${refused}confidence ${percent(confidence)}`,
  );
}

function sourceTable(sources, collection) {
  if (!sources.length) return empty("No modules", "The answer used none.");
  const columns = [
    {
      title: "Module",
      wide: true,
      cell: ({ document, module, uri, page, headings, text }) => [
        h(
          "a",
          {
            href: `#/modules?search=${encodeURIComponent(module)}`,
            title: [uri || module, ...(headings ?? [])].join(" › "),
            onclick: (event) => {
              if (!text) return; // a module of a PML prompt
              event.preventDefault();
              openModule(collection, { document, module, text });
            },
          },
          module,
        ),
        page != null && h("span", { class: "muted" }, ` page ${page}`),
      ],
    },
    {
      title: "From",
      cell: ({ tier, scaffold }) =>
        h(
          "span",
          { class: "chips" },
          tierChip(tier),
          scaffold && h("span", { class: "chip plain", title: String(scaffold) }, "scaffold"),
        ),
    },
    ...SCORES.filter(([name]) => sources.some((each) => each[name] != null)).map(
      ([name, title, digits]) => ({
        title,
        num: true,
        cell: ({ [name]: score }) => score?.toFixed(digits) ?? "–",
      }),
    ),
  ];
  return plainTable(columns, sources, "Modules used");
}

function cost(reuse, mode) {
  if (!reuse.prompt_tokens) return empty("No prompt", "The model was not asked.");
  const parts = [
    { label: "Cached", color: "var(--device)", value: reuse.cached_tokens },
    { label: "Shared", color: "var(--shared)", value: reuse.shared_tokens ?? 0 },
    { label: "Computed", color: "var(--computed)", value: reuse.computed_tokens },
  ];
  const kept = 1 - reuse.computed_tokens / reuse.prompt_tokens;
  return [
    h(
      "p",
      { class: "headline" },
      h("b", { class: "num", "data-figure": "kept" }, percent(kept)),
      ` of ${plural(reuse.prompt_tokens, "token")} not computed`,
    ),
    partsBar(parts, "Prompt tokens"),
    legend(
      parts
        .filter(({ value }) => value)
        .map((part) => ({ ...part, label: `${part.label} ${count(part.value)}` })),
    ),
    h("p", { class: "muted" }, `mode ${mode}`),
  ];
}

// The first token stands for itself: its time is not one of the gaps between tokens.
function gapChart(times, width) {
  const gaps = times.slice(1).map((at, index) => Math.max(0, at - times[index]));
  const sorted = [...gaps].sort((a, b) => a - b);
  const at = (share) => sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * share))];
  const middle = gaps.length
    ? ` · then ${seconds(at(0.5))} a token (p50), ${seconds(at(0.95))} (p95)`
    : "";
  return [
    h(
      "p",
      { class: "num" },
      h("b", { "data-figure": "tokens" }, plural(times.length, "token")),
      ` · first after ${seconds(times[0])}${middle}`,
    ),
    width > 0 && tokenBars(gaps, { width }),
  ];
}

function waterfall({ retrieve, assemble, first_token: first, total, queued = 0 }) {
  const begun = retrieve + assemble;
  const waited = Math.min(queued, Math.max(0, first - begun));
  const lengths = {
    retrieve,
    assemble,
    queued: waited,
    prefill: Math.max(0, first - begun - waited),
    decode: Math.max(0, total - first),
  };
  const order = ["retrieve", "assemble", "queued", "prefill", "decode"];
  const starts = Object.fromEntries(
    order.map((name, index) => [
      name,
      order.slice(0, index).reduce((sum, each) => sum + lengths[each], 0),
    ]),
  );
  const whole = Math.max(total, 1e-9);
  const lines = order.map((name) => {
    const [, label, color] = STAGES.find(([id]) => id === name);
    return h(
      "li",
      {},
      h("span", {}, label),
      h(
        "span",
        { class: "track", "aria-hidden": "true" },
        h("i", {
          style: {
            "--fill": color,
            "--from": `${(starts[name] / whole) * 100}%`,
            "--share": `${(lengths[name] / whole) * 100}%`,
          },
        }),
      ),
      h("span", { class: "num" }, seconds(lengths[name])),
    );
  });
  return [
    h("ul", { class: "waterfall" }, lines),
    h("p", { class: "muted num" }, `first token ${seconds(first)} · total ${seconds(total)}`),
  ];
}
