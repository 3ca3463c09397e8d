// Pieces that several views show.
import { forgetKey } from "./api.js";
import { h } from "./dom.js";
import { ago, iso } from "./format.js";
import { icon } from "./icons.js";
import { TIERS, source } from "./sources.js";

/** A panel with a title. note: a line beside it; aside: controls at its right. */
export function panel(title, { note, aside, kind = "" } = {}, ...children) {
  return h(
    "section",
    { class: `panel ${kind}`, "aria-label": title },
    h(
      "header",
      {},
      h("h2", {}, title),
      note && h("span", { class: "muted note" }, note),
      aside && h("div", { class: "aside" }, aside),
    ),
    ...children,
  );
}

/** What to see where nothing is, and what to do about it. */
export function empty(title, advice, action) {
  return h("div", { class: "empty" }, h("strong", {}, title), h("p", {}, advice), action);
}

/** In place of what a key of one namespace may not see: what all of them share. */
export function withheld(what) {
  return empty(
    "Not for this key",
    `All namespaces share the ${what}, which admin keys of the default one may see.`,
  );
}

export function loading(what = "Loading…") {
  return h("div", { class: "loading", role: "status" }, h("i", { class: "spinner" }), what);
}

/** A view that could not be read: the server's words, and where a key is at fault, another one. */
export function fault(error) {
  return h(
    "div",
    { class: "empty fault", role: "alert" },
    h("strong", {}, error.title ?? "Something went wrong"),
    h("p", {}, error.message),
    logged(error),
    [401, 403].includes(error.status) && h("button", { onclick: otherKey }, "Use another key"),
  );
}

/** The id by which the service's log names a request that failed; null for other errors. */
export function logged({ status, request }) {
  return status >= 500 && request
    ? h("span", { class: "muted" }, "In the log: request ", h("code", {}, request))
    : null;
}

function otherKey() {
  forgetKey();
  location.reload();
}

const TAIL = 8; // characters: modules of one document differ at their end

/** A module's name; where it is too long for its place, its end stays in sight. */
export function moduleName(name, title = name) {
  if (name.length < 2 * TAIL) return h("span", { class: "name", title }, name);
  const head = h("span", { class: "head" }, name.slice(0, -TAIL));
  return h("span", { class: "name long", title }, head, name.slice(-TAIL));
}

/** The tier or source of states, in its color. */
export function tierChip(name) {
  const { label, color } = source(name);
  return h("span", { class: "chip", style: { "--fill": color } }, label.toLowerCase());
}

/** Several tiers, the nearest first. */
export function tierChips(names) {
  const place = (name) => TIERS.indexOf(name) >>> 0; // unknown ones last
  return h(
    "span",
    { class: "chips" },
    [...names].sort((a, b) => place(a) - place(b)).map(tierChip),
  );
}

/** A moment in Unix seconds, as `text`, with its exact time as title; without one, never. */
export function moment(at, text = ago(at)) {
  if (!at) return h("span", { class: "faint" }, "never");
  return h("time", { datetime: iso(at), title: iso(at) }, text);
}

export function pinMark() {
  return h(
    "span",
    { class: "pinmark", title: "Pinned", role: "img", "aria-label": "pinned" },
    icon("pin"),
  );
}

/** One of several, as a row of buttons. choices: [[value, label]]; chosen(value) on a change. */
export function segmented(label, choices, current, chosen) {
  const buttons = choices.map(([value, text]) =>
    h(
      "button",
      {
        type: "button",
        "aria-pressed": String(value === current),
        "data-value": value,
        onclick: () => pick(value),
      },
      text,
    ),
  );
  const pick = (value) => {
    buttons.forEach((button, index) =>
      button.setAttribute("aria-pressed", String(choices[index][0] === value)),
    );
    chosen(value);
  };
  return h("div", { class: "segmented", role: "group", "aria-label": label }, buttons);
}

const FEW = 4; // columns of short values, for which there is always room

/** A table of plain rows; where there is no room for columns, each row is a list of its cells with
 *  their titles. columns: [{title, num?, cell: (row) → nodes, wide?}] */
export function plainTable(columns, rows, label) {
  const head = columns.map(({ title, num, wide }) =>
    h("th", { scope: "col", class: `${num ? "num" : ""} ${wide ? "wide" : ""}` }, title),
  );
  const body = rows.map((row) =>
    h(
      "tr",
      {},
      columns.map(({ title, num, cell, wide }) =>
        h(
          "td",
          { class: `${num ? "num" : ""} ${wide ? "wide" : ""}`, "data-title": title || null },
          cell(row),
        ),
      ),
    ),
  );
  const stacks = columns.length > FEW || columns.some(({ wide }) => wide);
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      { class: stacks ? "plain stacks" : "plain", "aria-label": label },
      h("thead", {}, h("tr", {}, head)),
      h("tbody", {}, body),
    ),
  );
}

/** A figure with its name, and a line that says more. */
export function figure(label, value, more, name) {
  return h(
    "div",
    { class: "figure", "data-figure": name ?? label },
    h("dt", {}, label),
    h("dd", { class: "num" }, value),
    more && h("p", { class: "muted" }, more),
  );
}
