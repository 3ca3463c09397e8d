// Every module: found, sorted, pinned, warmed, moved, evicted.
import { move, pin, reread, unpin, warm } from "../actions.js";
import { everything, get, withQuery } from "../api.js";
import { afterPause, h, show } from "../dom.js";
import { drawer } from "../drawer.js";
import { evictCollection, evictModules } from "../evicting.js";
import { bytes, count, lastUse } from "../format.js";
import { grid } from "../grid.js";
import { icon } from "../icons.js";
import { empty, pinMark, tierChips } from "../parts.js";
import { TIERS } from "../sources.js";
import { complain } from "../toasts.js";

const FILTERS = ["search", "collection", "document", "tier", "pinned"];
const PAUSE = 200;

export const modules = {
  id: "modules",
  title: "Modules",
  about: "Pieces of documents, and where their states are kept.",
  mount,
};

function mount({ body, actions, signal, parameters }) {
  const filters = Object.fromEntries(FILTERS.map((name) => [name, parameters.get(name) ?? ""]));
  const view = { signal, filters, names: [] };
  const acts = actsOf(view);
  view.drawer = drawer(acts, () => view.table.marked(null));
  signal.addEventListener("abort", () => view.drawer.remove());
  view.bar = h("div", {
    class: "bulk",
    role: "toolbar",
    "aria-label": "Actions on selected modules",
    hidden: true,
  });
  view.table = table(view, acts, parameters);
  show(
    actions,
    h(
      "button",
      {
        "data-act": "evict-scope",
        onclick: () => evictCollection(view.names, filters, () => view.table.reload()),
      },
      "Evict…",
    ),
    h("button", { onclick: () => view.table.reload() }, "Refresh"),
  );
  show(body, filterBar(view), view.bar, view.table.node);
  view.table.reload();
}

function actsOf(view) {
  const anew = async (row) => {
    const now = await reread(row);
    if (!now) return;
    view.table.update(now);
    view.drawer.refresh({ ...row, ...now });
  };
  const reload = () => {
    view.drawer.close();
    view.table.reload();
  };
  const list = (rows) => (Array.isArray(rows) ? rows : [rows]);
  const gone = async (row) => {
    const now = await reread(row);
    if (now) await anew(row);
    else reload();
  };
  return [
    ["Pin", "", (rows) => pin(list(rows), anew), ({ pinned }) => !pinned],
    ["Unpin", "", (rows) => unpin(list(rows), anew), ({ pinned }) => pinned],
    ["Warm", "", (rows) => warm(list(rows), anew), () => true],
    ["Move…", "", (rows) => move(list(rows), anew), () => true],
    ["Evict…", "danger", (rows) => evictModules(list(rows), { after: gone, reload }), () => true],
  ];
}

function table(view, acts, parameters) {
  const toggle = async (row) => acts.find(([, , , fits], index) => index < 2 && fits(row))[2](row);
  return grid({
    label: "Modules",
    signal: view.signal,
    columns: columns(toggle),
    sort: parameters.get("sort") ?? "hits",
    descending: parameters.get("descending") !== "false",
    load: (query) =>
      get(withQuery("modules", { ...view.filters, ...query }), { signal: view.signal }),
    sorted: (sort, descending) => remember(view.filters, { sort, descending }),
    opened: (row) => {
      view.table.marked(row.id);
      view.drawer.open(row);
    },
    selected: (rows) => bulk(view, acts, rows),
    blank: () => nothing(view.filters),
    failed: complain,
  });
}

function columns(toggle) {
  return [
    {
      id: "name",
      title: "Module",
      sort: true,
      cell: ({ name }) => h("span", { class: "name", title: name }, name),
    },
    {
      id: "document",
      title: "Document",
      width: "16%",
      cell: ({ document }) => h("span", { class: "muted", title: document }, document),
    },
    {
      id: "collection",
      title: "Collection",
      width: "104px",
      cell: ({ collection }) => h("span", { class: "muted", title: collection }, collection),
    },
    {
      id: "tiers",
      title: "Tiers",
      width: "196px",
      cell: ({ tiers }) =>
        tiers.length ? tierChips(tiers) : h("span", { class: "chips faint" }, "none"),
    },
    {
      id: "tokens",
      title: "Tokens",
      num: true,
      width: "74px",
      cell: ({ tokens }) => count(tokens),
    },
    {
      id: "nbytes",
      title: "Size",
      sort: true,
      num: true,
      width: "88px",
      cell: ({ nbytes }) => bytes(nbytes),
    },
    {
      id: "hits",
      title: "Hits",
      sort: true,
      num: true,
      width: "92px",
      cell: ({ hits }) => count(hits),
    },
    {
      id: "last_use",
      title: "Last use",
      sort: true,
      num: true,
      width: "104px",
      cell: ({ last_use: at }) => lastUse(at),
    },
    {
      id: "pinned",
      title: "Pin",
      width: "52px",
      cell: (row) =>
        h(
          "button",
          {
            class: "ghost icon pinbox",
            "aria-pressed": String(row.pinned),
            "aria-label": `${row.pinned ? "Unpin" : "Pin"} ${row.name}`,
            tabindex: "-1",
            onclick: () => toggle(row),
          },
          pinMark(),
        ),
    },
  ];
}

function filterBar(view) {
  const { filters, signal } = view;
  const changed = (name, value) => {
    filters[name] = value;
    remember(filters);
    view.table.reload();
  };
  const typed = afterPause(PAUSE, (value) => changed("search", value));
  const search = h("input", {
    type: "search",
    placeholder: "Search modules",
    "aria-label": "Search modules",
    value: filters.search,
    oninput: () => typed(search.value.trim()),
  });
  const select = (name, label, all, values) =>
    h(
      "select",
      { name, "aria-label": label, onchange: ({ target }) => changed(name, target.value) },
      h("option", { value: "" }, all),
      values.map((value) => h("option", { value, selected: value === filters[name] }, value)),
    );
  const collections = select(
    "collection",
    "Collection",
    "Every collection",
    filters.collection ? [filters.collection] : [],
  );
  everything("../v1/collections", { signal })
    .then((items) => {
      view.names = items.map(({ name }) => name);
      const fresh = view.names.filter((name) => name !== filters.collection);
      collections.append(...fresh.map((name) => h("option", { value: name }, name)));
    })
    .catch(complain);
  const pinned = h("input", {
    type: "checkbox",
    name: "pinned",
    checked: filters.pinned === "true",
    onchange: () => changed("pinned", pinned.checked ? "true" : ""),
  });
  const document =
    filters.document &&
    h(
      "button",
      {
        type: "button",
        class: "only",
        "aria-label": "Take away the filter by document",
        onclick: () => changed("document", "", document.remove()),
      },
      filters.document,
      icon("close"),
    );
  return h(
    "form",
    { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
    h("span", { class: "searchbox" }, icon("search"), search),
    collections,
    select("tier", "Tier", "Every tier", TIERS),
    h("label", { class: "check" }, pinned, "Pinned only"),
    document,
  );
}

// The address names the filters, so that it can be sent to somebody.
function remember(filters, sorting = {}) {
  const old = new URLSearchParams(location.hash.split("?")[1]);
  const sort = { sort: old.get("sort"), descending: old.get("descending"), ...sorting };
  history.replaceState(null, "", withQuery("#/modules", { ...filters, ...sort }));
}

function bulk({ bar, table: all }, acts, rows) {
  bar.hidden = rows.length === 0;
  const buttons = acts.map(([label, kind, act]) =>
    h(
      "button",
      { class: kind, "data-act": label.toLowerCase().replace("…", ""), onclick: () => act(rows) },
      label,
    ),
  );
  show(
    bar,
    h("strong", { class: "num" }, `${count(rows.length)} selected`),
    buttons,
    h("button", { class: "ghost", onclick: () => all.clear() }, "Clear"),
  );
}

function nothing(filters) {
  if (FILTERS.some((name) => filters[name]))
    return empty("No module fits", "Take a filter away, or search for less.");
  return empty(
    "No modules yet",
    "Documents become modules when they are ingested.",
    h("a", { href: "#/ingestion", class: "button" }, "Ingest documents"),
  );
}
