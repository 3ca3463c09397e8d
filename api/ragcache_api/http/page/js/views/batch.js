// What the engine does now: requests, and the segments that they share.
import { get, withQuery } from "../api.js";
import { partsBar } from "../charts/bars.js";
import { h, renew, show } from "../dom.js";
import { clock, count, plural, seconds } from "../format.js";
import {
  empty,
  fault,
  figure,
  loading,
  moduleName,
  moment,
  panel,
  plainTable,
  tierChip,
  withheld,
} from "../parts.js";
import { poll } from "../polling.js";
import { complain } from "../toasts.js";

const PERIOD = 1;
const SEGMENTS = 60;

export const batch = {
  id: "batch",
  title: "Batch",
  about:
    "Requests that run now, and the segments whose states one read serves for several of them.",
  mount,
};

function mount({ body, signal }) {
  show(body, loading());
  const nodes = {
    figures: h("dl", { class: "figures" }),
    segments: h("div"),
    running: h("div"),
    recent: h("div"),
  };
  let shown = false;
  const read = async () => {
    const requests = await get("requests", { signal });
    if (!shown) {
      show(
        body,
        nodes.figures,
        h(
          "div",
          { class: "panels" },
          panel(
            "Segments",
            { note: "how many requests read each, with how many rows" },
            nodes.segments,
          ),
          panel("Running", {}, nodes.running),
        ),
        panel("Ended lately", { note: "the last 100" }, nodes.recent),
      );
      shown = true;
    }
    // what all namespaces share is told to the operator alone
    nodes.figures.hidden = !requests.batch;
    if (requests.batch) show(nodes.figures, figures(requests));
    renew(nodes.segments, requests.batch ? segments(requests.batch) : withheld("batch"));
    renew(nodes.running, running(requests.running));
    renew(nodes.recent, recent(requests.recent));
  };
  poll(signal, PERIOD, read, (error) => (shown ? complain(error) : show(body, fault(error))));
}

function figures({ batch: now }) {
  const read = now.segments.reduce((sum, each) => sum + each.tokens, 0);
  const alone = now.segments.reduce((sum, each) => sum + each.tokens * each.requests, 0);
  return [
    figure("Rows in the step", count(now.rows), "query rows of all requests", "rows"),
    figure("Requests in the step", count(now.requests), encoding(now.encodings), "batched"),
    figure(
      "Segments read",
      count(now.segments.length),
      `${plural(now.segments.filter((each) => each.requests > 1).length, "segment")} shared`,
    ),
    figure(
      "Reads saved by sharing",
      alone ? `${(alone / read).toFixed(2)} ×` : "–",
      alone ? `${count(alone - read)} tokens not read again` : "nothing is shared now",
    ),
  ];
}

function segments({ segments: all }) {
  if (!all.length) return empty("The engine is idle", "Segments appear here while requests run.");
  const sorted = [...all]
    .sort((a, b) => b.requests - a.requests || b.tokens - a.tokens)
    .slice(0, SEGMENTS);
  const most = sorted[0].requests;
  const lines = sorted.map((each) =>
    h(
      "li",
      { "data-segment": each.name },
      named(each),
      h("span", { class: "num muted" }, `${count(each.tokens)} tokens`),
      h(
        "span",
        { class: "track", "aria-hidden": "true" },
        h("i", { style: { "--share": `${(each.requests / most) * 100}%` } }),
      ),
      h("b", { class: "num", title: plural(each.requests, "request") }, count(each.requests)),
      h("span", { class: "num muted" }, plural(each.rows, "row")),
    ),
  );
  return h("ul", { class: "segments" }, lines);
}

// What is no module is told by the digest of its states.
function named({ name, module }) {
  if (module) return moduleName(module, `${module}, states ${name}`);
  return h(
    "span",
    { class: "name", title: `States ${name} of a preamble, a scaffold or a schema` },
    h("code", {}, name.slice(0, 8)),
    h("span", { class: "muted" }, " not a module"),
  );
}

function running(requests) {
  if (!requests.length)
    return empty("No request is running", "Requests of every client appear here.");
  const columns = [
    { title: "Request", cell: ({ id }) => h("code", { title: id }, short(id)) },
    {
      title: "Collection",
      cell: ({ collection, kind }) => collection ?? h("span", { class: "muted" }, kind),
    },
    { title: "State", cell: ({ state }) => h("span", { class: `state ${state}` }, state) },
    { title: "Age", num: true, cell: ({ age }) => seconds(age) },
    { title: "Prompt", num: true, cell: ({ prompt_tokens: tokens }) => count(tokens) },
    { title: "Generated", num: true, cell: ({ generated }) => count(generated) },
  ];
  return plainTable(columns, requests, "Running requests");
}

function recent(requests) {
  if (!requests.length)
    return empty(
      "No request has ended yet",
      "The last hundred are listed here, with what each reused.",
    );
  const columns = [
    { title: "Ended", cell: ({ at }) => moment(at, clock(at, true)) },
    { title: "Kind", cell: ({ kind }) => kind },
    { title: "Collection", cell: ({ collection }) => clipped(collection || "–") },
    { title: "Outcome", cell: outcomeOf },
    { title: "First token", num: true, cell: ({ ttft }) => seconds(ttft) },
    { title: "Total", num: true, cell: ({ total }) => seconds(total) },
    { title: "Cached", num: true, cell: ({ cached_tokens: tokens }) => count(tokens) },
    { title: "Computed", num: true, cell: ({ computed_tokens: tokens }) => count(tokens) },
    { title: "", cell: (each) => h("div", { class: "inbar" }, partsBar(cost(each), "Tokens")) },
    { title: "Modules", wide: true, cell: ({ modules }) => uses(modules) },
  ];
  return plainTable(columns, requests, "Requests that ended lately");
}

const clipped = (text) => h("span", { class: "clip", title: text }, text);

// Where a request failed, the log says why.
function outcomeOf({ outcome, request }) {
  const state = h("span", { class: `state ${outcome}` }, outcome);
  const why = request && withQuery("#/log", { request });
  return outcome === "failed" && why ? h("a", { href: why, title: "See the log" }, state) : state;
}

function cost({ cached_tokens: cached, computed_tokens: computed }) {
  return [
    { label: "Cached", color: "var(--device)", value: cached ?? 0 },
    { label: "Computed", color: "var(--computed)", value: computed ?? 0 },
  ];
}

function uses(modules) {
  return h(
    "span",
    { class: "uses" },
    (modules ?? []).map(({ name, tier }) => h("span", { title: name }, tierChip(tier), ` ${name}`)),
  );
}

const encoding = (number) => (number ? `and ${plural(number, "module")} being encoded` : "");
const short = (id) => (id.length > 12 ? `${id.slice(0, 12)}…` : id);
