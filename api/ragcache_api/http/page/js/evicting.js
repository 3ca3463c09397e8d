// Eviction, seen before it is done: the server's dry run, or what the listing says of the modules.
import { post } from "./api.js";
import { drop } from "./actions.js";
import { previewed } from "./dialogs.js";
import { h } from "./dom.js";
import { bytes, count, plural } from "./format.js";
import { plainTable, tierChip, tierChips } from "./parts.js";
import { TIERS } from "./sources.js";
import { complain, toast } from "./toasts.js";

const LISTED = 200;

/** Evicts modules, or all that their documents have. after(row) per module, or reload() once. */
export async function evictModules(rows, { after, reload }) {
  const documents = [...new Set(rows.map(({ document }) => document))];
  const one = rows.length === 1;
  const scopes = [
    ["modules", one ? `Only ${rows[0].name}` : `Only these ${count(rows.length)} modules`],
    ["documents", one ? `All of document ${documents[0]}` : `All of their ${plural(documents.length, "document")}`],
  ];
  const scope = h("fieldset", { class: "scopes" }, h("legend", {}, "What goes"), scopes.map(([value, label], index) => h("label", { class: "choice" }, h("input", { type: "radio", name: "scope", value, checked: index === 0 }), label)));
  const preview = (form) => (form.get("scope") === "modules" ? Promise.resolve(ofModules(rows)) : dryRun(byCollection(rows)));
  const form = await previewed(one ? "Evict module" : "Evict modules", scope, preview, { action: "Evict", danger: true });
  if (!form) return;
  if (form.get("scope") === "modules") await drop(rows, after);
  else await evict(byCollection(rows), reload);
}

/** Evicts a whole collection, or a tier of it. */
export async function evictCollection(collections, chosen, reload) {
  const pick = (name, label, values, current) =>
    h("label", { class: "field" }, h("span", {}, label), h("select", { name }, values.map(([value, text]) => h("option", { value, selected: value === current }, text))));
  const fields = h(
    "div",
    { class: "fields" },
    pick("collection", "Collection", [["", "Every collection"], ...collections.map((name) => [name, name])], chosen.collection),
    pick("tier", "Tier", [["", "Every tier"], ...TIERS.map((name) => [name, name])], chosen.tier),
  );
  const scope = (form) => [Object.fromEntries(["collection", "tier"].filter((name) => form.get(name)).map((name) => [name, form.get(name)]))];
  const form = await previewed("Evict states", fields, (current) => dryRun(scope(current)), { action: "Evict", danger: true });
  if (form) await evict(scope(form), reload);
}

function byCollection(rows) {
  const scopes = new Map();
  for (const { collection, document } of rows) scopes.set(collection, (scopes.get(collection) ?? new Set()).add(document));
  return [...scopes].map(([collection, documents]) => ({ collection, documents: [...documents] }));
}

async function evict(scopes, reload) {
  try {
    const answers = await Promise.all(scopes.map((scope) => post("evict", scope)));
    const { left, stayed, size } = summed(answers);
    toast("ok", `Evicted ${plural(left, "state")}`, `${bytes(size)} freed.${stayed ? ` ${plural(stayed, "state")} stayed.` : ""}`);
    reload();
  } catch (error) {
    complain(error);
  }
}

async function dryRun(scopes) {
  try {
    const answers = await Promise.all(scopes.map((scope) => post("evict?dry_run=true", scope)));
    return account(answers);
  } catch (error) {
    return { nodes: h("p", { class: "fault", role: "alert" }, error.message), possible: false };
  }
}

const leaves = ({ action }) => !["keep", "kept", "skip", "skipped", "stay", "none"].includes(action);

function summed(answers) {
  const changes = answers.flatMap((answer) => answer.changes);
  const left = changes.filter(leaves).length;
  return { changes, left, stayed: changes.length - left, size: answers.reduce((sum, answer) => sum + answer.bytes, 0) };
}

function account(answers) {
  const { changes, left, stayed, size } = summed(answers);
  if (!changes.length) return { nodes: h("p", {}, "No states match: there is nothing to evict."), possible: false };
  const groups = new Map();
  for (const { action, tier, reason, nbytes } of changes) {
    const name = [action, tier, reason].join("\n");
    const group = groups.get(name) ?? { action, tier, reason, states: 0, nbytes: 0 };
    groups.set(name, { ...group, states: group.states + 1, nbytes: group.nbytes + nbytes });
  }
  const columns = [
    { title: "Action", cell: ({ action }) => action },
    { title: "Tier", cell: ({ tier }) => tierChip(tier) },
    { title: "Reason", cell: ({ reason }) => reason ?? "–" },
    { title: "States", num: true, cell: ({ states }) => count(states) },
    { title: "Size", num: true, cell: ({ nbytes }) => bytes(nbytes) },
  ];
  const nodes = [
    h("p", { class: "sum" }, h("b", {}, `${plural(left, "state")} would go`), `, ${bytes(size)} in all`, stayed ? `; ${plural(stayed, "state")} would stay.` : "."),
    plainTable(columns, [...groups.values()], "What a dry run says"),
    h("details", {}, h("summary", {}, "Keys"), h("ul", { class: "keys" }, changes.slice(0, LISTED).map(({ key, tier, action }) => h("li", {}, h("code", {}, key), ` ${tier}, ${action}`)), changes.length > LISTED && h("li", {}, `and ${count(changes.length - LISTED)} more`))),
  ];
  return { nodes, possible: left > 0 };
}

function ofModules(rows) {
  const pinned = rows.filter((row) => row.pinned).length;
  const held = rows.filter(({ tiers }) => tiers.length);
  const columns = [
    { title: "Module", wide: true, cell: ({ name }) => name },
    { title: "Leaves", cell: ({ tiers }) => (tiers.length ? tierChips(tiers) : "nothing") },
    { title: "Size", num: true, cell: ({ nbytes }) => bytes(nbytes) },
  ];
  const nodes = [
    h("p", {}, "Their states leave every tier, and are encoded again when a question needs them. The documents stay."),
    pinned > 0 && h("p", { class: "caution" }, `${plural(pinned, "module")} of these ${pinned === 1 ? "is" : "are"} pinned.`),
    plainTable(columns, rows.slice(0, LISTED), "What would go"),
  ];
  return { nodes, possible: held.length > 0 };
}
