// What is kept for whom: pins of users, texts that recur in prompts, and conversations.
import { get } from "../api.js";
import { bytes, count, plain, t } from "../format.js";
import { acting, Bar, Button, column, Empty, Exact, figured, html, Listed, Name, Panel, Polled, sourceOf, timed, usePolled } from "../ui.js";
import { removed } from "./changes.js";
import { Pager, usePage } from "./lists.js";

const PERIOD = 10;

export const Kept = () => html`<${Pins} /><${Observed} /><${Conversations} />`;

const ownerOf = ({ owner }) => owner || t("nobody");

function pinned({ documents }) {
  if (!documents) return t("all");
  const text = documents.length === 1 ? documents[0] : t("documents_n", { n: documents.length });
  return html`<${Name} text=${text} title=${documents.slice(0, 20).join(", ")} />`;
}

function Pins() {
  const list = usePage("admin/pins", {}, get, { period: PERIOD });
  const end = (pin) =>
    removed(list.again, t("pin_end"), t("pin_end_text", { name: plain(ownerOf(pin)) }), `admin/pins/${encodeURIComponent(pin.id)}`, t("pin_ended"));
  const columns = [
    column("owner", "owner", (pin) => html`<${Name} text=${ownerOf(pin)} />`),
    column("collection", "collection", ({ collection }) => html`<${Name} text=${collection} />`),
    column("documents", "documents", pinned),
    figured("states", "states_title"),
    figured("bytes", "size", bytes),
    timed("created_at", "created"),
    column("expires", "expires", ({ expires_at: at }) => (at ? html`<${Exact} at=${at} />` : t("never")), { num: true }),
    acting("end-pin", "pin_end", "pin_end_name", end),
  ];
  const rows = ({ items }) => items.map((pin) => ({ ...pin, name: pin.collection }));
  const after = list.value?.items.length > 0 && html`<${Pager} pager=${list.pager} />`;
  return html`<${Listed} title=${t("pins")} note=${t("pins_note")} state=${list} rows=${rows} columns=${columns} empty="no_pins" text="no_pins_text" after=${after} />`;
}

function Observed() {
  const state = usePolled((signal) => get("admin/observed", { signal }), PERIOD);
  const forget = (ids) => {
    const query = new URLSearchParams(ids.map((id) => ["id", id]));
    return removed(state.again, t("forget"), t("forget_text"), `admin/observed?${query}`, t("forgotten"));
  };
  const kept = ({ kept_by: by, kept_until: until }) => (by ? html`<${Name} text=${by} /> <${Exact} at=${until} />` : "–");
  const columns = [
    column("excerpt", "begins_with", ({ excerpt }) => html`<${Name} text=${excerpt} />`),
    figured("tokens", "tokens"),
    figured("nbytes", "size", bytes),
    figured("hits", "hits"),
    timed("used_at", "last_use"),
    column("kept_by", "kept_by", kept),
    acting("forget", "forget", "forget_name", ({ id }) => forget([id])),
  ];
  const rows = ({ items }) => items.map((each) => ({ ...each, name: each.excerpt.slice(0, 30) }));
  const whole = state.value?.items.length > 0 &&
    html`<${Button} kind="danger" data-act="forget-all" onClick=${() => forget([])}>${t("forget_all")}<//>`;
  return html`<${Listed} title=${t("observed")} note=${t("observed_note")} actions=${whole} state=${state} rows=${rows} columns=${columns} empty="no_observed" text="no_observed_text" />`;
}

function Conversations() {
  const state = usePolled((signal) => get("v1/conversations", { signal }), PERIOD);
  const byTier = (values) => Object.entries(values ?? {}).map(([name, value]) => ({ ...sourceOf(name), value }));
  const parts = byTier(state.value?.bytes);
  const some = parts.some(({ value }) => value);
  const drop = () => removed(state.again, t("conversations_delete"), t("conversations_delete_text"), "v1/conversations", t("conversations_deleted"));
  const whole = some && html`<${Button} kind="danger" data-act="delete-conversations" onClick=${drop}>${t("conversations_delete")}<//>`;
  return html`<${Panel} title=${t("conversations")} note=${t("conversations_note")} actions=${whole}>
    <${Polled} state=${state}>${() => some
      ? html`<div class="tier"><${Bar} label=${t("conversations")} parts=${parts} format=${bytes} /></div>
        <div class="tier" data-bar="resumed"><div class="line"><span>${t("resumed_tokens")}</span></div><${Bar} label=${t("resumed_tokens")} parts=${byTier(state.value.resumed_tokens)} format=${count} /></div>`
      : html`<${Empty} title=${t("no_conversations")}>${t("no_conversations_text")}<//>`}<//>
  <//>`;
}
