// One module in full, at the right of the table.
import { modulePath } from "./actions.js";
import { get, withQuery } from "./api.js";
import { openDocument } from "./document.js";
import { h, show } from "./dom.js";
import { ago, bytes, count, date } from "./format.js";
import { icon } from "./icons.js";
import { fault, loading, moment, plainTable, tierChip, tierChips } from "./parts.js";
import { TIERS } from "./sources.js";

/** A drawer that stays beside the table. acts: [[label, kind, (row) → Promise, (row) → shown?]] */
export function drawer(acts, closed) {
  const title = h("h2", {});
  const body = h("div", { class: "drawerbody" });
  const close = h(
    "button",
    { class: "ghost icon", "aria-label": "Close", onclick: () => node.close() },
    icon("close"),
  );
  const node = h(
    "dialog",
    { class: "drawer", "aria-label": "Module" },
    h("header", {}, title, close),
    body,
  );
  let current = null;
  node.addEventListener("close", () => {
    current = null;
    closed();
  });
  node.addEventListener("keydown", (event) => event.key === "Escape" && node.close());
  document.body.append(node);

  const draw = async (row) => {
    current = row.id;
    show(title, row.name);
    if (!node.open) {
      show(body, loading());
      node.show();
    }
    try {
      const detail = { ...row, ...(await get(modulePath(row.id))) };
      if (current === row.id) show(body, content(detail, acts));
    } catch (error) {
      if (current === row.id) show(body, fault(error));
    }
  };
  return {
    open: draw,
    refresh: (row) => current === row.id && draw(row),
    isOpen: (id) => current === id,
    close: () => node.open && node.close(),
    remove: () => node.remove(),
  };
}

function content(module, acts) {
  const buttons = acts
    .filter(([, , , fits]) => fits(module))
    .map(([label, kind, act]) =>
      h(
        "button",
        {
          class: kind,
          "data-act": label.toLowerCase().replace("…", ""),
          onclick: () => act(module),
        },
        label,
      ),
    );
  return [
    h("div", { class: "acts" }, buttons),
    h(
      "dl",
      { class: "facts" },
      facts(module).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
    ),
    Array.isArray(module.states) &&
      module.states.length > 0 && [
        h("h3", {}, "States"),
        states([...module.states].sort((a, b) => TIERS.indexOf(a.tier) - TIERS.indexOf(b.tier))),
      ],
    module.text && [
      h("h3", {}, "Text"),
      h("pre", { class: "text", tabindex: "0" }, module.text),
      h(
        "button",
        { class: "link", onclick: () => openDocument(module.collection, module.document) },
        "Whole document",
      ),
    ],
  ];
}

function facts(module) {
  const attributes = Object.entries(module.attributes ?? module.metadata ?? {});
  return [
    [
      "Document",
      h(
        "a",
        {
          href: withQuery("#/modules", {
            collection: module.collection,
            document: module.document,
          }),
          title: "All modules of this document",
        },
        module.document,
      ),
    ],
    ["Collection", module.collection],
    ["Address", module.uri === module.document ? null : module.uri],
    ["Tokens", count(module.tokens)],
    ["Size", bytes(module.nbytes)],
    ["Tiers", module.tiers.length ? tierChips(module.tiers) : "none: encoded when needed"],
    ["Hits", count(module.hits)],
    [
      "Last use",
      module.used_at
        ? moment(module.used_at, `${ago(module.used_at)}, ${date(module.used_at)}`)
        : "never",
    ],
    ["Pinned", module.pinned ? "yes" : "no"],
    ["Expires", module.expires_at ? moment(module.expires_at, date(module.expires_at)) : "never"],
    ...attributes.map(([name, value]) => [name, told(value)]),
  ].filter(([, value]) => value !== undefined && value !== null && value !== "");
}

function told(value) {
  if (Array.isArray(value)) return value.join(" › ");
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

function states(all) {
  const columns = [
    { title: "Tier", cell: ({ tier }) => tierChip(tier) },
    {
      title: "Key",
      wide: true,
      cell: ({ key }) => h("code", { title: key }, String(key ?? "").slice(0, 12)),
    },
    { title: "Size", num: true, cell: ({ nbytes }) => bytes(nbytes) },
    { title: "Uses", num: true, cell: ({ hits }) => count(hits) }, // from whichever tier
  ];
  return plainTable(columns, all, "States of the module");
}
