// Every module: found, sorted, pinned, warmed, expired, moved, evicted.
import { expire, move, pin, reread, unpin, warm } from "../actions.js";
import { everything, get, withQuery } from "../api.js";
import { openDocument } from "../document.js";
import { afterPause, h, show } from "../dom.js";
import { drawer } from "../drawer.js";
import { evictCollection, evictModules } from "../evicting.js";
import { bytes, count } from "../format.js";
import { grid } from "../grid.js";
import { icon } from "../icons.js";
import { empty, moduleName, moment, pinMark, tierChips } from "../parts.js";
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
    ["Expire…", "", (rows) => expire(list(rows), anew), () => true],
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
      cell: ({ name }) => moduleName(name),
    },
    {
      id: "document",
      title: "Document",
      width: "15%",
      cell: ({ document }) => h("span", { class: "muted", title: document }, document),
    },
    {
      id: "collection",
      title: "Collection",
      width: "120px",
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
      id: "used_at",
      title: "Last use",
      sort: true,
      num: true,
      width: "112px",
      cell: ({ used_at: at }) => moment(at),
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
  const { filters } = view;
  const changed = (name, value) => {
    filters[name] = value;
    remember(filters);
    view.table.reload();
  };
  const pinned = h("input", {
    type: "checkbox",
    name: "pinned",
    checked: filters.pinned === "true",
    onchange: () => changed("pinned", pinned.checked ? "true" : ""),
  });
  return h(
    "form",
    { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
    searchBox(filters.search, (value) => changed("search", value)),
    collectionFilter(view, (value) => changed("collection", value)),
    filter("Tier", "Every tier", TIERS, filters.tier, (value) => changed("tier", value)),
    h("label", { class: "check" }, pinned, "Pinned only"),
    filters.document && onlyDocument(filters.document, () => changed("document", "")),
    filters.document &&
      filters.collection &&
      h(
        "button",
        { type: "button", onclick: () => openDocument(filters.collection, filters.document) },
        "Read it",
      ),
  );
}

function searchBox(value, found) {
  const typed = afterPause(PAUSE, found);
  const oninput = ({ target }) => typed(target.value.trim());
  const label = "Search modules";
  const input = h("input", {
    type: "search",
    placeholder: label,
    "aria-label": label,
    value,
    oninput,
  });
  return h("span", { class: "searchbox" }, icon("search"), input);
}

function filter(label, all, values, current, chosen) {
  const options = values.map((value) => h("option", { value, selected: value === current }, value));
  const onchange = ({ target }) => chosen(target.value);
  return h("select", { "aria-label": label, onchange }, h("option", { value: "" }, all), options);
}

// The chosen collection is offered at once, the others when the server has told them.
function collectionFilter(view, chosen) {
  const { collection: current } = view.filters;
  const node = filter("Collection", "Every collection", current ? [current] : [], current, chosen);
  everything("../v1/collections", { signal: view.signal })
    .then((items) => {
      view.names = items.map(({ name }) => name);
      const others = view.names.filter((name) => name !== current);
      node.append(...others.map((name) => h("option", { value: name }, name)));
    })
    .catch(complain);
  return node;
}

function onlyDocument(name, away) {
  const gone = () => {
    node.remove();
    away();
  };
  const label = "Take away the filter by document";
  const node = h(
    "button",
    { type: "button", class: "only", "aria-label": label, onclick: gone },
    name,
    icon("close"),
  );
  return node;
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
