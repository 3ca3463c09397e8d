// Modal dialogs on the platform's own <dialog>: focus stays inside, Escape cancels.
import { h, show } from "./dom.js";

let awaited = null;

/** Opens a dialog and answers what its form was submitted with, or null. fields: its body; final:
 *  there is nothing to cancel. */
function opened(title, fields, { action, danger = false, kind = "", final = false }) {
  return new Promise((resolve) => {
    const submit = h(
      "button",
      { type: "submit", class: danger ? "danger" : "primary", value: "go" },
      action,
    );
    const cancel = h("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
    const form = h(
      "form",
      { method: "dialog" },
      h("h2", {}, title),
      fields,
      h("footer", {}, !final && cancel, submit),
    );
    const dialog = h("dialog", { class: `modal ${kind}`, "aria-label": title }, form);
    dialog.addEventListener("close", () => {
      resolve(dialog.returnValue === "go" ? new FormData(form) : null);
      dialog.remove();
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Shows `body` until it is closed. */
export const shown = (title, body) =>
  opened(title, body, { action: "Close", kind: "wide", final: true });

/** Whether the user agrees to `action`. */
export async function confirmed(title, body, { action, danger = false }) {
  return (await opened(title, body, { action, danger })) !== null;
}

/** One of `choices` ({value, label}), or null. */
export async function chosen(title, body, choices, { action }) {
  const options = choices.map(({ value, label }, index) =>
    h(
      "label",
      { class: "choice" },
      h("input", { type: "radio", name: "choice", value, checked: index === 0 }),
      label,
    ),
  );
  const form = await opened(title, [body, h("fieldset", {}, options)], { action });
  return form && form.get("choice");
}

/** A dialog whose body is redrawn when its form changes, e.g. by the answer of a dry run.
 *  preview: (FormData) → Promise of nodes. Answers the form's values, or null. */
export function previewed(title, fields, preview, options) {
  const shown = h("div", { class: "preview", "aria-live": "polite" });
  let latest = 0;
  const body = h("div", {}, fields, shown);
  const redraw = async () => {
    const turn = (latest += 1);
    show(shown, h("p", { class: "muted" }, "Looking at what would go…"));
    const submit = body.closest("form").querySelector("[type=submit]");
    submit.disabled = true;
    const { nodes, possible } = await preview(new FormData(body.closest("form")));
    if (turn !== latest) return;
    show(shown, nodes);
    submit.disabled = !possible;
  };
  body.addEventListener("change", redraw);
  const answer = opened(title, body, { ...options, kind: "wide" });
  redraw();
  return answer;
}

/** Asks for the API key; calls while it is open share its answer. refused: a key was wrong. */
export function askedKey(refused) {
  awaited ??= keyForm(refused).finally(() => {
    awaited = null;
  });
  return awaited;
}

async function keyForm(refused) {
  const input = h("input", {
    name: "key",
    type: "password",
    autocomplete: "off",
    required: true,
    autofocus: true,
    spellcheck: "false",
  });
  const body = [
    h("p", {}, "This server asks for an API key. It stays in this tab until the tab is closed."),
    refused && h("p", { class: "fault", role: "alert" }, "The server did not accept the key."),
    h("label", { class: "field" }, h("span", {}, "API key"), input),
    h(
      "p",
      { class: "muted" },
      "Make one with ",
      h("code", {}, "ragcache keys create NAME --role admin"),
      ".",
    ),
  ];
  const form = await opened("API key", body, { action: "Continue", kind: "key" });
  return form && form.get("key").trim();
}

const ROLES = [
  ["user", "user: asks and ingests"],
  ["admin", "admin: also sees and changes what this page shows"],
];

/** What a key is to be: {name, role, namespace}, or null. first: the first of all has to be an
 *  operator's. namespaces: offered; any other will do. */
export async function keyFields(first, namespaces) {
  const field = (label, ...control) =>
    h("label", { class: "field" }, h("span", {}, label), ...control);
  const name = h("input", {
    name: "name",
    required: true,
    maxlength: 100,
    autofocus: true,
    autocomplete: "off",
    placeholder: "Who or what will use it",
  });
  const offered = h(
    "datalist",
    { id: "namespaces" },
    namespaces.map((value) => h("option", { value })),
  );
  const namespace = h("input", {
    name: "namespace",
    required: true,
    value: "default",
    list: "namespaces",
    autocomplete: "off",
  });
  const roles = ROLES.map(([value, label]) =>
    h(
      "label",
      { class: "choice" },
      h("input", { type: "radio", name: "role", value, checked: value === "user" }),
      label,
    ),
  );
  const body = first
    ? [
        h(
          "p",
          {},
          "The first key is an operator's: role admin, namespace default. From then on nobody calls the service without a key; this page goes on with the new one.",
        ),
        field("Name", name),
      ]
    : [
        field("Name", name),
        h("fieldset", {}, h("legend", {}, "Role"), roles),
        field("Namespace", namespace, offered),
        h(
          "p",
          { class: "muted" },
          "A key opens one namespace: its documents, modules and statistics. Only admins of default see what all share.",
        ),
      ];
  const form = await opened("Create key", body, { action: "Create" });
  if (!form) return null;
  const given = { role: "admin", namespace: "default", ...Object.fromEntries(form) };
  return { name: given.name.trim(), role: given.role, namespace: given.namespace.trim() };
}

/** Shows the secret of a new key, which nobody can see again. */
export function createdKey({ name, secret }, first) {
  const shown = h("input", {
    readonly: true,
    value: secret,
    class: "secret",
    "aria-label": "Secret of the key",
    onfocus: () => shown.select(),
  });
  const copied = h("span", { class: "muted", role: "status" });
  const copy = h("button", { type: "button", autofocus: true, onclick: copyNow }, "Copy");
  async function copyNow() {
    shown.select();
    // navigator.clipboard exists on secure origins only; an operator may come over plain HTTP
    const done = navigator.clipboard
      ? await navigator.clipboard.writeText(secret).then(
          () => true,
          () => false,
        )
      : document.execCommand("copy");
    show(copied, done ? "Copied." : "Copy it by hand: it is selected.");
  }
  const body = [
    h("p", {}, "The secret of ", h("b", {}, name), " is shown this once, and stored nowhere:"),
    h("div", { class: "withbutton" }, shown, copy),
    copied,
    first &&
      h("p", {}, "This tab keeps it until it is closed. Other tabs and clients will ask for it."),
  ];
  return opened("Key created", body, { action: "Done", kind: "wide", final: true });
}
