// Eviction, seen before it is done: what goes is what the server says in a dry run.
import { drop, dropped } from "./actions.js";
import { post } from "./api.js";
import { previewed } from "./dialogs.js";
import { h } from "./dom.js";
import { bytes, count, plural } from "./format.js";
import { plainTable, tierChip } from "./parts.js";
import { TIERS } from "./sources.js";
import { complain, toast } from "./toasts.js";

const LISTED = 200;

/** Evicts modules, or all that their documents have. after(row) per module, or reload() once. */
export async function evictModules(rows, { after, reload }) {
  const whole = (form) => form.get("scope") === "documents";
  const preview = (form) => {
    const tier = form.get("tier");
    return told(whole(form) ? evict(ofDocuments(rows, tier), true) : dropped(rows, tier));
  };
  const title = rows.length === 1 ? "Evict module" : "Evict modules";
  const options = { action: "Evict", danger: true };
  const form = await previewed(title, scopeFields(rows), preview, options);
  if (form && whole(form)) await act(ofDocuments(rows, form.get("tier")), reload);
  else if (form) await drop(rows, form.get("tier"), after);
}

function scopeFields(rows) {
  const [{ name, document }] = rows;
  const one = rows.length === 1;
  const documents = new Set(rows.map((row) => `${row.collection}/${row.document}`)).size;
  const pinned = rows.filter((row) => row.pinned).length;
  return [
    h(
      "p",
      {},
      "States that leave are encoded again when a question needs them. The documents stay.",
    ),
    pinned > 0 &&
      h("p", { class: "caution" }, one ? "It is pinned." : `${count(pinned)} of these are pinned.`),
    h(
      "fieldset",
      { class: "scopes" },
      h("legend", {}, "What goes"),
      scopeChoice(
        "modules",
        one ? `Only ${name}` : `Only these ${count(rows.length)} modules`,
        true,
      ),
      scopeChoice(
        "documents",
        one ? `All of document ${document}` : `All of their ${plural(documents, "document")}`,
        false,
      ),
    ),
    tierField(""),
  ];
}

function scopeChoice(value, label, checked) {
  return h(
    "label",
    { class: "choice" },
    h("input", { type: "radio", name: "scope", value, checked }),
    label,
  );
}

/** Evicts a whole collection, or a tier of it. */
export async function evictCollection(collections, chosen, reload) {
  const fields = h(
    "div",
    { class: "fields" },
    select("collection", "Collection", "Every collection", collections, chosen.collection),
    tierField(chosen.tier),
  );
  const scope = (form) => [given({ collection: form.get("collection"), tier: form.get("tier") })];
  const form = await previewed(
    "Evict states",
    fields,
    (current) => told(evict(scope(current), true)),
    { action: "Evict", danger: true },
  );
  if (form) await act(scope(form), reload);
}

const tierField = (current) => select("tier", "Tier", "Every tier", TIERS, current);

function select(name, label, all, values, current) {
  const options = values.map((value) => h("option", { value, selected: value === current }, value));
  return h(
    "label",
    { class: "field" },
    h("span", {}, label),
    h("select", { name }, h("option", { value: "" }, all), options),
  );
}

const given = (scope) => Object.fromEntries(Object.entries(scope).filter(([, value]) => value));

function ofDocuments(rows, tier) {
  const scopes = new Map();
  for (const { collection, document } of rows)
    scopes.set(collection, (scopes.get(collection) ?? new Set()).add(document));
  return [...scopes].map(([collection, documents]) =>
    given({ collection, documents: [...documents], tier }),
  );
}

const evict = (scopes, dry) =>
  Promise.all(scopes.map((scope) => post(dry ? "evict?dry_run=true" : "evict", scope)));

async function act(scopes, reload) {
  try {
    const { changes, size } = summed(await evict(scopes, false));
    toast("ok", `Evicted ${plural(changes.length, "state")}`, `${bytes(size)} freed.`);
    reload();
  } catch (error) {
    complain(error);
  }
}

function summed(answers) {
  return {
    changes: answers.flatMap((answer) => answer.changes),
    size: answers.reduce((sum, answer) => sum + answer.bytes, 0),
  };
}

// What a preview shows of a dry run, and whether there is anything to do.
async function told(answering) {
  try {
    const { changes, size } = summed(await answering);
    if (!changes.length)
      return {
        nodes: h("p", {}, "No tier holds any of it: there is nothing to evict."),
        possible: false,
      };
    return { nodes: account(changes, size), possible: true };
  } catch (error) {
    return { nodes: h("p", { class: "fault", role: "alert" }, error.message), possible: false };
  }
}

function account(changes, size) {
  const columns = [
    { title: "Tier", cell: ({ tier }) => tierChip(tier) },
    {
      title: "What happens",
      cell: ({ action, reason }) => (reason ? `${action}, ${reason}` : action),
    },
    { title: "States", num: true, cell: ({ states }) => count(states) },
    { title: "Size", num: true, cell: ({ nbytes }) => bytes(nbytes) },
  ];
  const keys = changes
    .slice(0, LISTED)
    .map(({ key, tier, action }) => h("li", {}, h("code", {}, key), ` ${tier}, ${action}`));
  return [
    h(
      "p",
      { class: "sum" },
      h("b", {}, `${plural(changes.length, "state")} would go`),
      `, ${bytes(size)} in all.`,
    ),
    plainTable(columns, grouped(changes), "What a dry run says"),
    h(
      "details",
      {},
      h("summary", {}, "Keys"),
      h(
        "ul",
        { class: "keylist" },
        keys,
        changes.length > LISTED && h("li", {}, `and ${count(changes.length - LISTED)} more`),
      ),
    ),
  ];
}

function grouped(changes) {
  const groups = new Map();
  for (const { action, tier, reason, nbytes } of changes) {
    const name = [action, tier, reason].join("\n");
    const group = groups.get(name) ?? { action, tier, reason, states: 0, nbytes: 0 };
    groups.set(name, { ...group, states: group.states + 1, nbytes: group.nbytes + nbytes });
  }
  return [...groups.values()].sort((a, b) => TIERS.indexOf(a.tier) - TIERS.indexOf(b.tier));
}
