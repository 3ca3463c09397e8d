// Deletion of documents and collections, shown before it is done: what goes is what the server says
// in a dry run.
import { collectionPath, remove } from "./api.js";
import { previewed } from "./dialogs.js";
import { h } from "./dom.js";
import { bytes, count, plural } from "./format.js";
import { plainTable, tierChip } from "./parts.js";
import { TIERS } from "./sources.js";
import { complain, toast } from "./toasts.js";

const AT_ONCE = 50; // ids in one address

/** Deletes documents ({id}) of a collection once the user agrees; done() afterwards. */
export async function deleteDocuments(collection, documents, done) {
  const ids = documents.map(({ id }) => id);
  const what = ids.length === 1 ? ids[0] : plural(ids.length, "document");
  const scopes = portions(ids).map((portion) => {
    const query = new URLSearchParams(portion.map((id) => ["id", id]));
    return `${collectionPath(collection)}/documents?${query}`;
  });
  await deletion({ what, kind: ids.length === 1 ? "document" : "documents", scopes, done });
}

/** Deletes a collection with its documents once the user agrees; done() afterwards. */
export async function deleteCollection(name, done) {
  await deletion({ what: name, kind: "collection", scopes: [collectionPath(name)], done });
}

function portions(ids) {
  const starts = Array.from(
    { length: Math.ceil(ids.length / AT_ONCE) },
    (_, turn) => turn * AT_ONCE,
  );
  return starts.map((start) => ids.slice(start, start + AT_ONCE));
}

async function deletion({ what, kind, scopes, done }) {
  const asked = h(
    "p",
    {},
    h("b", { class: "named" }, what),
    ` ${kind === "documents" ? "go" : "goes"} for good. Sources that you still have can be ingested again.`,
  );
  const preview = async () => {
    try {
      return { nodes: account(await told(scopes)), possible: true };
    } catch (error) {
      return { nodes: h("p", { class: "fault", role: "alert" }, error.message), possible: false };
    }
  };
  const options = { action: "Delete", danger: true };
  if (!(await previewed(`Delete ${kind}`, asked, preview, options))) return;
  try {
    const gone = await Promise.all(scopes.map((scope) => remove(scope)));
    const number = gone.reduce((sum, { deleted }) => sum + deleted, 0);
    toast(
      "ok",
      `Deleted ${what}`,
      kind === "document" ? "" : `${plural(number, "document")} went.`,
    );
  } catch (error) {
    complain(error);
  }
  done();
}

async function told(scopes) {
  const answers = await Promise.all(
    scopes.map((scope) => remove(`${scope}${scope.includes("?") ? "&" : "?"}dry_run=true`)),
  );
  const sum = (name) => answers.reduce((total, each) => total + each[name], 0);
  const tiers = {};
  for (const each of answers)
    for (const [tier, size] of Object.entries(each.tiers)) tiers[tier] = (tiers[tier] ?? 0) + size;
  return {
    documents: sum("deleted"),
    modules: sum("modules"),
    states: sum("states"),
    bytes: sum("bytes"),
    tiers,
  };
}

function account(gone) {
  const sizes = Object.entries(gone.tiers).sort(([a], [b]) => TIERS.indexOf(a) - TIERS.indexOf(b));
  const columns = [
    { title: "States in", cell: ([tier]) => tierChip(tier) },
    { title: "Size", num: true, cell: ([, size]) => bytes(size) },
  ];
  return [
    h(
      "p",
      { class: "sum" },
      h("b", {}, plural(gone.documents, "document")),
      ` with ${plural(gone.modules, "module")}, and ${plural(gone.states, "state")} of ${bytes(gone.bytes)} that nothing else needs.`,
    ),
    sizes.length > 0 && plainTable(columns, sizes, "What goes, by tier"),
    gone.states < gone.modules &&
      h(
        "p",
        { class: "muted" },
        `${count(gone.modules - gone.states)} of the modules have no states, or share them with others.`,
      ),
  ];
}
