// Modal dialogs on the platform's own <dialog>: focus stays inside, Escape cancels.
import { h, show } from "./dom.js";

let awaited = null;

/** Opens a dialog and answers what its form was submitted with, or null. fields: its body. */
function opened(title, fields, { action, danger = false, kind = "" }) {
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
      h("footer", {}, cancel, submit),
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
      h("code", {}, "ragcache keys create --role admin"),
      ".",
    ),
  ];
  const form = await opened("API key", body, { action: "Continue", kind: "key" });
  return form && form.get("key").trim();
}
