// The API keys of the service: who may call it, as what, and in which namespace.
import { everything, keyed, post, setKey } from "../api.js";
import { bytes, date, plain, t } from "../format.js";
import { acting, Button, column, complain, Field, figured, form, html, Listed, Moment, Name, named, timed, toast, usePolled } from "../ui.js";
import { removed } from "./changes.js";

export function Keys() {
  const state = usePolled(async (signal) => everything("admin/keys", { signal }), 0);
  const first = state.value?.length === 0;
  const create = async () => {
    const wanted = await fields(first);
    if (!wanted) return;
    const key = await post("admin/keys", wanted).catch(complain);
    if (!key) return;
    if (first && !keyed.value) setKey(key.secret); // without it the page is locked out
    await created(key, first);
    state.again();
  };
  const button = state.value && html`<${Button} kind="primary" data-act="create-key" onClick=${create}>${t("key_create")}<//>`;
  const sorted = (rows) => [...rows].sort((a, b) => Boolean(a.revoked_at) - Boolean(b.revoked_at));
  return html`<${Listed} title=${t("view_keys")} actions=${button} state=${state} rows=${sorted} columns=${columns(state.again)} empty="no_keys" text="no_keys_text" />`;
}

const stateOf = ({ revoked_at: at }) =>
  at ? html`<span class="state">${t("revoked")} <${Moment} at=${at} /></span>` : html`<span class="state ok">${t("active")}</span>`;

function columns(again) {
  const revoke = ({ id, name }) =>
    removed(again, t("revoke"), t("revoke_text", { name: plain(name) }), `admin/keys/${id}`, t("revoked_name", { name }));
  const revoking = acting("revoke", "revoke", "revoke_name", revoke);
  return [
    column("name", "name", ({ name, current }) => html`<${Name} text=${name} />${current && html` <span class="tag">${t("this_page")}</span>`}`),
    column("role", "role", ({ role }) => t(`role_${role}`)),
    named("namespace"),
    column("pins", "pin_budget", ({ role, pin_bytes: most }) => (role === "admin" ? t("no_limit") : bytes(most)), { num: true }),
    column("secret", "secret", ({ prefix }) => html`<code>${prefix}…</code>`),
    figured("created_at", "created", date),
    timed("last_used", "last_used", t("never")),
    column("state", "state", stateOf),
    { ...revoking, cell: (row) => !row.revoked_at && !row.current && revoking.cell(row) },
  ];
}

async function fields(first) {
  const more = html`
    <${Field} label=${t("role")}><select name="role"><option value="user">${t("role_user")}</option><option value="admin">${t("role_admin")}</option></select><//>
    <${Field} label=${t("namespace")}><input name="namespace" required maxlength="200" value="default" autocomplete="off" /><//>
    <${Field} label=${t("pin_budget_mib")}><input name="pins" type="number" min="0" value="0" /><//>`;
  const given = await form(t("key_create"), html`${first && html`<p class="muted">${t("key_first")}</p>`}
    <${Field} label=${t("name")}><input name="name" required maxlength="100" autofocus autocomplete="off" /><//>${!first && more}`, t("create"));
  return given && {
    name: given.get("name").trim(),
    role: given.get("role") ?? "admin",
    namespace: given.get("namespace")?.trim() ?? "default",
    pin_bytes: Math.round(Number(given.get("pins") ?? 0) * 2 ** 20),
  };
}

function created({ name, secret }, first) {
  const copy = () => navigator.clipboard?.writeText(secret).then(() => toast("ok", t("copied")), complain);
  return form(t("key_of", { name }), html`<p>${t(first ? "key_once_first" : "key_once")}</p>
    <${Field} label=${t("secret")}><input class="secret" readonly value=${secret} onFocus=${({ target }) => target.select()} /><//>`,
  t("done"), { other: html`<${Button} onClick=${copy}>${t("copy")}<//>` });
}
