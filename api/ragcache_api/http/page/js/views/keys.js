// The API keys of the service: who may call it, as what, and in which namespace.
import { everything, hasKey, post, remove, setKey } from "../api.js";
import { confirmed, createdKey, keyFields } from "../dialogs.js";
import { h, show } from "../dom.js";
import { date } from "../format.js";
import { empty, fault, loading, moment, panel, plainTable, withheld } from "../parts.js";
import { complain, toast } from "../toasts.js";

export const keys = {
  id: "keys",
  title: "API keys",
  about: "Who may call the service, as what, and in which namespace.",
  mount,
};

function mount({ body, actions, signal }) {
  show(body, loading());
  const view = { body, signal, rows: [] };
  const reload = () => read(view, actions, reload);
  reload();
}

async function read(view, actions, reload) {
  try {
    view.rows = await everything("keys", { signal: view.signal });
    const create = () =>
      h(
        "button",
        { class: "primary", "data-act": "create-key", onclick: () => made(view.rows, reload) },
        "Create key…",
      );
    show(actions, view.rows.length > 0 && create());
    show(view.body, view.rows.length ? table(view.rows, reload) : none(create()));
  } catch (error) {
    if (view.signal.aborted) return;
    show(view.body, error.status === 403 ? withheld("list of keys") : fault(error));
  }
}

function none(create) {
  return empty(
    "No key is asked for",
    "The service answers this machine alone, without a key. The first key closes it to all who have none, and lets it listen on other addresses.",
    create,
  );
}

function table(rows, reload) {
  const sorted = [...rows].sort((a, b) => Boolean(a.revoked_at) - Boolean(b.revoked_at));
  const columns = [
    {
      title: "Name",
      wide: true,
      cell: (row) => [
        h("span", { class: "name", title: row.name }, row.name),
        row.current && h("span", { class: "tag" }, "this page"),
      ],
    },
    { title: "Role", cell: ({ role }) => role },
    { title: "Namespace", cell: ({ namespace }) => namespace },
    { title: "Secret", cell: ({ prefix }) => h("code", {}, `${prefix}…`) },
    { title: "Created", num: true, cell: (row) => moment(row.created_at, date(row.created_at)) },
    { title: "Last used", num: true, cell: (row) => moment(row.last_used) },
    { title: "State", cell: stateOf },
    { title: "", num: true, cell: (row) => revocable(row, reload) },
  ];
  return panel("Keys", { note: "the revoked ones last" }, plainTable(columns, sorted, "API keys"));
}

function stateOf({ revoked_at: at }) {
  if (!at) return h("span", { class: "state ok" }, "active");
  return h("span", { class: "state" }, "revoked ", moment(at));
}

function revocable(row, reload) {
  if (row.revoked_at || row.current) return null;
  return h(
    "button",
    {
      class: "danger",
      "data-act": "revoke",
      "aria-label": `Revoke ${row.name}`,
      onclick: () => revoked(row, reload),
    },
    "Revoke…",
  );
}

async function revoked(row, reload) {
  const body = h(
    "p",
    {},
    "Requests with the key ",
    h("b", {}, row.name),
    " are refused from now on, by other services over this ledger within ten seconds. Its documents stay.",
  );
  if (!(await confirmed("Revoke key", body, { action: "Revoke", danger: true }))) return;
  try {
    await remove(`keys/${row.id}`);
    toast("ok", `Revoked ${row.name}`);
  } catch (error) {
    complain(error);
  }
  reload();
}

async function made(rows, reload) {
  const first = rows.length === 0;
  const wanted = await keyFields(first, [...new Set(rows.map(({ namespace }) => namespace))]);
  if (!wanted) return;
  try {
    const key = await post("keys", wanted);
    if (first && !hasKey()) setKey(key.secret); // without it the page is locked out
    await createdKey(key, first);
  } catch (error) {
    complain(error);
  }
  reload();
}
