// Every module: found, sorted, read, pinned, warmed, expired, moved, evicted.
import { get, withQuery } from "../api.js";
import { bytes, count, plain, t } from "../format.js";
import { Reader } from "../reader.js";
import { Button, column, dialog, Exact, Facts, Field, figured, html, Listing, metadataOf, Name, named, Polled, sources, Tier, Tiers, timed, useEffect, useMemo, usePicked, usePolled, useRef, useState } from "../ui.js";
import { evict, evictCollection, expire, move, pin, unpin, warm } from "./changes.js";
import { Chosen, Pager, useNames, usePage } from "./lists.js";

const FILTERS = ["search", "collection", "document", "tier", "pinned"];
const TIERS = sources.slice(0, 4);
const PAUSE = 200; // milliseconds without typing
const ACTS = [
  ["pin", pin, ({ pinned }) => !pinned],
  ["unpin", unpin, ({ pinned }) => pinned],
  ["warm", warm, () => true],
  ["expire", expire, () => true],
  ["move", move, () => true],
  ["evict", evict, () => true],
];

export function Modules({ query }) {
  const [filters, setFilters] = useState(() => Object.fromEntries(FILTERS.map((name) => [name, query.get(name) ?? ""])));
  const [sort, setSort] = useState(() => ({ by: query.get("sort") ?? "hits", descending: query.get("descending") !== "false" }));
  const list = usePage("admin/modules", { ...filters, sort: sort.by, descending: sort.descending }, get, { numbered: true });
  const picked = usePicked();
  const names = useNames();
  const changed = (changes) => {
    setFilters((now) => ({ ...now, ...changes }));
    list.first();
    picked.clear();
  };
  useEffect(() => {
    history.replaceState(null, "", withQuery("#/modules", { ...filters, sort: sort.by, descending: sort.descending }));
  }, [filters, sort]);
  const order = { ...sort, set: (by) => { setSort({ by, descending: by === sort.by ? !sort.descending : by !== "name" }); list.first(); } };
  const act = (run) => async (rows) => (await run(rows)) && list.again();
  const rows = list.value?.items ?? [];
  const chosen = picked.of(rows);
  const filtered = FILTERS.some((name) => filters[name]);
  const table = useMemo(() => html`<${Listing} state=${list} columns=${columns((row) => open(row, act))} sort=${order} picked=${picked.for(rows)} placed
    label=${t("view_modules")} empty=${filtered ? "no_module_fits" : "no_modules"} text="no_module_fits_text">
    ${!filtered && html`<a class="button" href="#/jobs">${t("add_documents")}</a>`}
  <//>`, [list.value, list.error, sort, filtered, picked.ids]);
  return html`
    <${Filters} filters=${filters} names=${names} changed=${changed}>
      <${Button} data-act="evict-scope" onClick=${async () => (await evictCollection(filters.collection, filters.tier)) && list.again()}>${t("evict_all")}<//>
    <//>
    <${Chosen} n=${chosen.length}><${Acts} rows=${chosen} act=${act} /><//>
    ${table}
    <${Pager} pager=${list.pager} />`;
}

const Acts = ({ rows, act }) =>
  ACTS.filter(([, , fits]) => rows.some(fits)).map(
    ([name, run, fits]) => html`<${Button} kind="small ${name === "evict" ? "danger" : ""}" data-act=${name} onClick=${() => act(run)(rows.filter(fits))}>${t(name)}<//>`,
  );

function Filters({ filters, names, changed, children }) {
  const timer = useRef(0);
  const typed = ({ target }) => {
    clearTimeout(timer.current);
    timer.current = setTimeout(() => changed({ search: target.value.trim() }), PAUSE);
  };
  const choice = (name, options, also = {}) => html`<${Field} label=${t(name)}>
    <select name=${name} onChange=${({ target }) => changed({ [name]: target.value, ...also })}>
      <option value="">${t("all")}</option>
      ${options.map(([value, label]) => html`<option value=${value} selected=${value === filters[name]}>${label}</option>`)}
    </select>
  <//>`;
  const known = [...new Set([...names, filters.collection].filter(Boolean))];
  return html`<div class="filters" role="search">
    <${Field} label=${t("search")}>
      <input type="search" name="search" value=${filters.search} onInput=${typed} placeholder=${t("search_modules")} />
    <//>
    ${choice("collection", known.map((name) => [name, plain(name)]), { document: "" })}
    ${choice("tier", TIERS.map(({ id, label }) => [id, label]))}
    <label class="check">
      <input type="checkbox" name="pinned" checked=${filters.pinned === "true"} onChange=${({ target }) => changed({ pinned: target.checked ? "true" : "" })} />
      ${t("only_pinned")}
    </label>
    ${filters.document && html`<span class="only">
      <${Name} text=${filters.document} />
      <${Button} kind="small" onClick=${() => read(filters.collection, filters.document)} disabled=${!filters.collection}>${t("read_it")}<//>
      <${Button} kind="ghost" icon="close" label=${t("all_documents")} onClick=${() => changed({ document: "" })} />
    </span>`}
    ${children}
  </div>`;
}

const SORTED = { sortable: true };
const columns = (show) => [
  column("name", "module", (row) => html`<button type="button" class="link" onClick=${() => show(row)}><${Name} text=${row.name} /></button>
    ${row.pinned && html`<span class="tag">${t("pinned")}</span>`}`, SORTED),
  named("document"),
  named("collection"),
  column("tiers", "tiers", ({ tiers }) => html`<${Tiers} names=${tiers} />`),
  figured("tokens", "tokens"),
  figured("nbytes", "size", bytes, SORTED),
  figured("hits", "hits", count, SORTED),
  timed("used_at", "last_use", t("never"), SORTED),
];
const HELD = [
  column("tier", "tier", ({ tier }) => html`<${Tier} id=${tier} />`),
  column("mode", "encoding", ({ mode, kv_dtype: dtype }) => html`${mode} <span class="muted">${dtype}</span>`),
  figured("tokens", "tokens"),
  figured("nbytes", "size", bytes),
  figured("hits", "hits"),
  timed("used_at", "last_use", t("never")),
  column("pinned", "pin", ({ pinned }) => (pinned ? t("pinned") : "–")),
];

/** Shows a document of a collection. */
export function read(collection, id) {
  return dialog(id, () => html`<div class="body"><${Reader} collection=${collection} id=${id} /></div>`, "wide reading");
}

const open = (row, act) => dialog(row.name, (close) => html`<${Detail} row=${row} act=${act} close=${close} />`, "wide drawer");

function Detail({ row, act, close }) {
  const state = usePolled((signal) => get(`admin/modules/${encodeURIComponent(row.id)}`, { signal }), 0, [row.id]);
  const renewed = (run) => async (rows) => {
    await act(run)(rows);
    state.again();
  };
  const exact = (at) => (at ? html`<${Exact} at=${at} />` : t("never"));
  const whole = ({ collection, document }) =>
    html`<a href=${withQuery("#/modules", { collection, document })} onClick=${close}><${Name} text=${document} /></a>`;
  const facts = (now) => [
    [t("document"), whole(now)],
    [t("collection"), html`<${Name} text=${now.collection} />`],
    [t("last_use"), exact(now.used_at)],
    [t("expires"), exact(now.expires_at)],
    ...metadataOf(now),
  ];
  const rows = (now) => now.states.map((each) => ({ ...each, id: `${each.key}${each.tier}` }));
  return html`<div class="body"><${Polled} state=${state}>${(now) => html`
    <div class="actions">
      <${Acts} rows=${[now]} act=${renewed} />
      <${Button} kind="small" onClick=${() => read(now.collection, now.document)}>${t("whole_document")}<//>
    </div>
    <${Facts} facts=${facts(now)} />
    <${Listing} state=${state} rows=${rows} columns=${HELD} label=${t("states_held")} empty="no_states" text="no_states_text" />
    <pre class="plain" tabindex="0">${plain(now.text)}</pre>`}<//></div>`;
}
