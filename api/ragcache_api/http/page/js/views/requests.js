// Requests that run now, and those that ended last.
import { get } from "../api.js";
import { partsBar } from "../charts/bars.js";
import { h, renew, show } from "../dom.js";
import { clock, count, seconds } from "../format.js";
import { empty, fault, loading, moment, panel, plainTable, tierChip } from "../parts.js";
import { poll } from "../polling.js";
import { complain } from "../toasts.js";

const PERIOD = 1;

export const requests = {
  id: "requests",
  title: "Requests",
  about: "Requests that run now, and what those that ended last reused.",
  mount,
};

function mount({ body, signal }) {
  show(body, loading());
  const nodes = { running: h("div"), recent: h("div") };
  let shown = false;
  const read = async () => {
    const listed = await get("requests", { signal });
    if (!shown)
      show(
        body,
        panel("Running", {}, nodes.running),
        panel("Ended lately", { note: "the last 100" }, nodes.recent),
      );
    shown = true;
    renew(nodes.running, running(listed.running));
    renew(nodes.recent, recent(listed.recent));
  };
  poll(signal, PERIOD, read, (error) => (shown ? complain(error) : show(body, fault(error))));
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

// The log names a request by its id.
const outcomeOf = ({ outcome, request }) =>
  h("span", { class: `state ${outcome}`, title: `Request ${request}` }, outcome);

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

const short = (id) => (id.length > 12 ? `${id.slice(0, 12)}…` : id);
