// What went wrong lately: warnings and errors of the process, with the requests that met them.
import { get, withQuery } from "../api.js";
import { h, renew, show } from "../dom.js";
import { clock, count, date } from "../format.js";
import { empty, fault, loading, moment, panel, segmented, withheld } from "../parts.js";
import { poll } from "../polling.js";
import { complain } from "../toasts.js";

const PERIOD = 5;
const LISTED = 500; // as many as the server keeps
const DAY = 86400;
const LEVELS = [
  ["", "All"],
  ["error", "Errors"],
  ["warning", "Warnings"],
];

export const log = {
  id: "log",
  title: "Log",
  about: "Warnings and errors of this process, the newest first. They go when it ends.",
  mount,
};

function mount({ body, actions, signal, parameters }) {
  const view = { level: "", request: parameters.get("request"), open: new Set(), signal };
  const list = h("div");
  let shown = false;
  const read = async () => {
    const { items, total } = await get(withQuery("log", { level: view.level, limit: LISTED }), {
      signal,
    });
    if (!shown) show(body, view.request && only(view.request), list);
    shown = true;
    const chosen = items.filter(({ request }) => !view.request || request === view.request);
    renew(list, entries(view, chosen, total));
  };
  const failed = (error) => {
    if (error.status === 403) show(body, withheld("log"));
    else if (shown) complain(error);
    else show(body, fault(error));
  };
  show(
    actions,
    segmented("Level", LEVELS, view.level, (value) => {
      view.level = value;
      read().catch(failed);
    }),
  );
  show(body, loading());
  poll(signal, PERIOD, read, failed);
}

function only(request) {
  return h(
    "p",
    { class: "only" },
    "Of the request ",
    h("code", {}, request),
    " ",
    h("a", { href: "#/log" }, "Show all"),
  );
}

function entries(view, items, total) {
  if (!items.length)
    return empty(
      view.request || view.level ? "Nothing of this kind" : "Nothing went wrong",
      view.request || view.level
        ? "Other entries may be there."
        : "Warnings and errors appear here as they happen.",
    );
  const lines = items.map((entry) => line(view, entry));
  return panel(
    "Entries",
    { note: total > items.length ? `${count(items.length)} of ${count(total)}` : count(total) },
    h("ol", { class: "entries", "aria-label": "Log" }, lines),
  );
}

function line(view, entry) {
  return h(
    "li",
    { "data-level": entry.level, "data-number": entry.number },
    h("span", { class: `state ${entry.level}` }, entry.level),
    h(
      "div",
      { class: "said" },
      h("p", { class: "message" }, entry.message),
      h(
        "p",
        { class: "muted num" },
        moment(entry.at, at(entry.at)),
        ` · ${entry.logger}`,
        entry.request && [
          " · request ",
          h(
            "a",
            { href: withQuery("#/log", { request: entry.request }) },
            h("code", {}, entry.request),
          ),
        ],
      ),
      entry.traceback && traceback(view, entry),
    ),
  );
}

// Today a time is enough.
function at(seconds) {
  return Date.now() / 1000 - seconds < DAY ? clock(seconds, true) : date(seconds);
}

function traceback({ open }, { number, traceback: text }) {
  const node = h(
    "details",
    { open: open.has(number) },
    h("summary", {}, "Traceback"),
    h("pre", { class: "text", tabindex: "0" }, text),
  );
  node.addEventListener("toggle", () => (node.open ? open.add(number) : open.delete(number)));
  return node;
}
