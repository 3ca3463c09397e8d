// What operators change: states of modules, and documents. Evictions and deletions are shown before.
import { collectionPath, get, post, remove, withQuery } from "../api.js";
import { bytes, t } from "../format.js";
import { attempt, Bar, complain, confirmed, Empty, Field, form, html, sourceOf, toast } from "../ui.js";

const NAMED = 3; // modules in a notice
const HOURS = [1, 24, 24 * 7];

const modulePath = ({ id }, act = "") => `admin/modules/${encodeURIComponent(id)}${act}`;
const named = (rows) => (rows.length <= NAMED ? rows.map(({ name }) => name).join(", ") : "");

// Each in turn, since the service takes them one by one; ends with the first refusal.
async function each(rows, act, said) {
  const done = [];
  await attempt(async () => {
    for (const row of rows) done.push((await act(row), row));
  });
  if (done.length) toast("ok", t(said, { n: done.length }), named(done));
  return done.length > 0;
}

export const pin = (rows) => each(rows, (row) => post(modulePath(row, "/pin")), "pinned_n");
export const unpin = (rows) => each(rows, (row) => remove(modulePath(row, "/pin")), "unpinned_n");
export const warm = (rows) => each(rows, (row) => post(modulePath(row, "/warm")), "warmed_n");

export async function expire(rows) {
  const given = await form(t("expire"), html`<p class="muted">${t("expire_text")}</p>
    <${Field} label=${t("expire_in")}><select name="hours">
      ${HOURS.map((each) => html`<option value=${each}>${t(`hours_${each}`)}</option>`)}<option value="never">${t("never")}</option>
    </select><//>`, t("set"));
  if (!given) return false;
  const hours = given.get("hours");
  const never = hours === "never";
  const body = { seconds: never ? null : Number(hours) * 3600 };
  return each(rows, (row) => post(modulePath(row, "/expire"), body), never ? "limit_lifted" : "limit_set");
}

export async function move(rows) {
  const tiers = (await get("admin/tiers").catch((error) => complain(error)))?.items ?? [];
  if (!tiers.length) return false;
  const options = tiers.map(({ name }) => html`<option value=${name}>${sourceOf(name).label}</option>`);
  const given = await form(t("move"), html`<p class="muted">${t("move_text")}</p>
    <${Field} label=${t("tier")}><select name="tier">${options}</select><//>`, t("move"));
  return given ? each(rows, (row) => post(modulePath(row, "/move"), { tier: given.get("tier") }), "moved_n") : false;
}

// The bytes of states by tier, as a bar.
function Preview({ said, tiers }) {
  const parts = Object.entries(tiers).map(([name, value]) => ({ ...sourceOf(name), value }));
  return html`<span class="sum">${said}</span>${parts.length > 0 && html`<${Bar} label=${t("by_tier")} parts=${parts} format=${bytes} />`}`;
}

function byTier(changes) {
  const tiers = {};
  for (const { tier, nbytes } of changes) tiers[tier] = (tiers[tier] ?? 0) + nbytes;
  return tiers;
}

// Shows what would change, and changes it once that was agreed to. change: (query) → what it tells.
async function agreed(title, change, view, said, action) {
  const told = await change({ dry_run: true }).catch(complain);
  if (!told || !(await confirmed(title, view(told), action)) || told.length === 0) return false;
  return attempt(() => change({}), said);
}

function evicted(change) {
  const view = (changes) => {
    if (!changes.length) return html`<${Empty} title=${t("would_evict_none")} />`;
    const size = bytes(changes.reduce((sum, { nbytes }) => sum + nbytes, 0));
    return html`<${Preview} said=${t("would_evict", { n: changes.length, size })} tiers=${byTier(changes)} />`;
  };
  return agreed(t("evict"), change, view, (gone) => t("evicted_n", { n: gone.length }));
}

export const evict = (rows) =>
  evicted(async (query) => {
    const found = [];
    for (const row of rows) found.push(...(await remove(withQuery(modulePath(row), query))).changes);
    return found;
  });

/** Evicts states of a collection or of all, from one tier or from all. */
export function evictCollection(collection, tier) {
  const body = { ...(collection && { collection }), ...(tier && { tier }) };
  return evicted(async (query) => (await post(withQuery("admin/evict", query), body)).changes);
}

function deleted(title, change) {
  const view = ({ deleted: documents, modules, states, bytes: size, tiers }) => {
    const said = t("would_delete", { documents: t("documents_n", { n: documents }), modules: t("modules_n", { n: modules }), states: t("states", { n: states }), size: bytes(size) });
    return html`<${Preview} said=${said} tiers=${tiers} />`;
  };
  return agreed(title, change, view, t("deleted_name", { name: title }), t("delete"));
}

/** ids: at most the 100 that one request takes. */
export function deleteDocuments(collection, ids) {
  const path = `${collectionPath(collection)}/documents?${new URLSearchParams(ids.map((id) => ["id", id]))}`;
  const title = ids.length === 1 ? ids[0] : t("documents_n", { n: ids.length });
  return deleted(title, (query) => remove(`${path}&${new URLSearchParams(query)}`));
}

export const deleteCollection = (name) =>
  deleted(name, (query) => remove(withQuery(collectionPath(name), query)));

/** Ends or forgets something once that was agreed to, and calls `again`. */
export async function removed(again, title, text, path, said) {
  if (!(await confirmed(title, text))) return;
  await attempt(() => remove(path), said);
  again();
}
