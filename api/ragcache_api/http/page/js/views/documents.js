// Collections and their documents: looked through, and deleted.
import { collectionPath, everything, get, withQuery } from "../api.js";
import { deleteCollection, deleteDocuments } from "../deleting.js";
import { h, show } from "../dom.js";
import { count, plural } from "../format.js";
import { grid } from "../grid.js";
import { icon } from "../icons.js";
import { empty, fault, loading, moduleName } from "../parts.js";
import { complain } from "../toasts.js";

export const documents = {
  id: "documents",
  title: "Documents",
  about: "What was ingested, by collection.",
  mount,
};

async function mount({ body, signal, parameters }) {
  show(body, loading());
  const view = { body, signal };
  await browse(view, parameters.get("collection"));
}

async function browse(view, wanted) {
  try {
    const collections = await everything("../v1/collections", { signal: view.signal });
    if (collections.length) choose(view, collections, wanted);
    else
      show(
        view.body,
        empty(
          "No collections yet",
          "The first documents that are ingested make one.",
          h("a", { href: "#/ingestion", class: "button" }, "Ingest documents"),
        ),
      );
  } catch (error) {
    if (!view.signal.aborted) show(view.body, fault(error));
  }
}

function choose(view, collections, wanted) {
  const stage = h("div", { class: "stage" });
  const links = collections.map((collection) =>
    h(
      "button",
      {
        class: "ghost",
        "data-collection": collection.name,
        onclick: () => open(collection),
      },
      h("span", {}, collection.name),
      h("small", { class: "muted num" }, held(collection)),
    ),
  );
  const open = (collection) => {
    for (const link of links)
      link.setAttribute("aria-pressed", String(link.dataset.collection === collection.name));
    const address = withQuery("#/documents", { collection: collection.name });
    history.replaceState(null, "", address);
    listed(view, stage, collection);
  };
  show(
    view.body,
    h(
      "div",
      { class: "browse" },
      h("nav", { class: "picks", "aria-label": "Collections" }, links),
      stage,
    ),
  );
  open(collections.find(({ name }) => name === wanted) ?? collections[0]);
}

const held = ({ documents: number, modules }) =>
  `${plural(number, "document")} · ${plural(modules, "module")}`;

function listed(view, stage, collection) {
  const { name } = collection;
  const again = () => browse(view, name);
  const bar = h("div", {
    class: "bulk",
    role: "toolbar",
    "aria-label": "Actions on selected documents",
    hidden: true,
  });
  const table = grid({
    label: `Documents of ${name}`,
    signal: view.signal,
    columns: columns((row) => deleteDocuments(name, [row], again)),
    load: ({ cursor, limit }) => page(name, cursor, limit, view.signal),
    opened: ({ id }) => {
      location.hash = withQuery("#/modules", { collection: name, document: id });
    },
    selected: (rows) => bulk(bar, rows, name, table, again),
    blank: () =>
      empty(
        "No documents",
        "This collection is empty.",
        h("a", { href: "#/ingestion", class: "button" }, "Ingest documents"),
      ),
    failed: complain,
  });
  const header = h(
    "header",
    { class: "head" },
    h("div", {}, h("h2", {}, name), h("p", { class: "muted num" }, held(collection))),
    h(
      "div",
      { class: "actions" },
      h("a", { class: "button", href: withQuery("#/ask", { collection: name }) }, "Ask"),
      h(
        "button",
        {
          class: "danger",
          "data-act": "delete-collection",
          onclick: () => deleteCollection(name, again),
        },
        "Delete collection…",
      ),
    ),
  );
  show(stage, header, bar, table.node);
  table.reload();
}

async function page(collection, cursor, limit, signal) {
  const path = withQuery(`${collectionPath(collection)}/documents`, { cursor, limit });
  const answer = await get(path, { signal });
  return { ...answer, items: answer.items.map((each) => ({ ...each, name: each.id })) };
}

function columns(away) {
  return [
    {
      id: "name",
      title: "Document",
      cell: ({ id }) => moduleName(id),
    },
    {
      id: "uri",
      title: "From",
      width: "32%",
      cell: ({ id, uri }) => uri !== id && h("span", { class: "muted" }, moduleName(uri)),
    },
    {
      id: "modules",
      title: "Modules",
      num: true,
      width: "92px",
      cell: ({ modules }) => [
        count(modules),
        h("span", { class: "unit" }, ` module${modules === 1 ? "" : "s"}`),
      ],
    },
    {
      id: "act",
      title: "",
      width: "52px",
      cell: (row) =>
        h(
          "button",
          {
            class: "ghost icon",
            "aria-label": `Delete ${row.id}`,
            title: "Delete…",
            onclick: () => away(row),
          },
          icon("trash"),
        ),
    },
  ];
}

function bulk(bar, rows, collection, table, again) {
  bar.hidden = rows.length === 0;
  show(
    bar,
    h("strong", { class: "num" }, `${count(rows.length)} selected`),
    h(
      "button",
      {
        class: "danger",
        "data-act": "delete",
        onclick: () => deleteDocuments(collection, rows, again),
      },
      "Delete…",
    ),
    h("button", { class: "ghost", onclick: () => table.clear() }, "Clear"),
  );
}
