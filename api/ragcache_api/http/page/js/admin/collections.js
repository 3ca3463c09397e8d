// Collections and their documents: read, and deleted once it is shown what goes with them.
import { collectionPath, everything, get, withQuery } from "../api.js";
import { count, plain, t } from "../format.js";
import { acting, Button, column, html, Listed, Listing, Name, Panel, usePicked, usePolled } from "../ui.js";
import { deleteCollection, deleteDocuments } from "./changes.js";
import { Chosen, Pager, usePage } from "./lists.js";
import { read } from "./modules.js";

const to = (view, parameters) => withQuery(`#/${view}`, parameters);
const adding = (collection) => html`<a class="button" href=${to("jobs", { collection })}>${t("add_documents")}</a>`;

export function Collections({ query }) {
  const name = query.get("collection");
  return name ? html`<${Documents} key=${name} collection=${name} />` : html`<${List} />`;
}

const COLLECTIONS = [
  column("name", "collection", ({ name }) => html`<a href=${to("collections", { collection: name })}><${Name} text=${name} /></a>`),
  column("documents", "documents", ({ documents }) => count(documents), { num: true }),
  column("modules", "view_modules", ({ modules, name }) => html`<a href=${to("modules", { collection: name })}>${count(modules)}</a>`, { num: true }),
  column("act", "acts", ({ name }) => html`<a class="button small" href=${withQuery("../", { collection: name })}>${t("ask")}</a>`, { num: true }),
];

function List() {
  const state = usePolled((signal) => everything("v1/collections", { signal }), 0);
  const rows = (items) => items.map((each) => ({ ...each, id: each.name }));
  return html`<${Listed} title=${t("view_collections")} state=${state} rows=${rows} columns=${COLLECTIONS} empty="no_collections">${adding()}<//>`;
}

function Documents({ collection }) {
  const list = usePage(`${collectionPath(collection)}/documents`, {}, get);
  const picked = usePicked();
  const rows = list.value?.items ?? [];
  const chosen = picked.of(rows).map(({ id }) => id);
  const gone = async (ids) => {
    if (!(await deleteDocuments(collection, ids))) return;
    picked.clear();
    list.again();
  };
  const whole = async () => (await deleteCollection(collection)) && (location.hash = "#/collections");
  const opening = ({ id }) =>
    html`<button type="button" class="link" onClick=${() => read(collection, id)}><${Name} text=${id} /></button>`;
  const columns = [
    column("name", "document", opening),
    column("uri", "address", ({ uri, id }) => (uri && uri !== id ? html`<${Name} text=${uri} />` : "–")),
    column("modules", "view_modules", ({ modules, id }) => html`<a href=${to("modules", { collection, document: id })}>${count(modules)}</a>`, { num: true }),
    acting("delete-one", "delete", "delete_name", ({ id }) => gone([id])),
  ];
  const actions = html`<a class="button" href="#/collections">${t("all_collections")}</a>${adding(collection)}
    <${Button} kind="danger" data-act="delete-collection" onClick=${whole}>${t("delete_collection")}<//>`;
  return html`<${Panel} title=${plain(collection)} actions=${actions}>
    <${Chosen} n=${chosen.length}><${Button} kind="danger small" data-act="delete" onClick=${() => gone(chosen)}>${t("delete")}<//><//>
    <${Listing} state=${list} columns=${columns} picked=${picked.for(rows)} label=${t("documents")} empty="no_documents">${adding(collection)}<//>
    <${Pager} pager=${list.pager} />
  <//>`;
}
