// Texts in a dialog: of a document, with a place in it marked, or of one module.
import { collectionPath, get, withQuery } from "./api.js";
import { shown } from "./dialogs.js";
import { h, show } from "./dom.js";
import { fault, loading } from "./parts.js";

/** Opens a document. place: {start, end}, in characters of its text, which is marked and in sight. */
export async function openDocument(collection, id, place = {}) {
  const body = h("div", { class: "reader", tabindex: "0" }, loading());
  shown(id, body);
  try {
    const path = `${collectionPath(collection)}/documents/${id.split("/").map(encodeURIComponent).join("/")}`;
    const { text } = await get(`${path}?text=true`);
    show(body, h("pre", { class: "text" }, marked(text ?? "", place)));
    body.querySelector("mark")?.scrollIntoView({ block: "center" });
  } catch (error) {
    show(body, fault(error));
  }
}

/** Opens the text of a module, with ways to its document and its states. */
export function openModule(collection, { document, module, text }) {
  const whole = h(
    "button",
    { type: "button", class: "link", onclick: () => openDocument(collection, document) },
    "Whole document",
  );
  const states = h("a", { href: withQuery("#/modules", { search: module, collection }) }, "States");
  const body = h("div", { class: "reader", tabindex: "0" }, h("pre", { class: "text" }, text));
  shown(module, [body, h("p", {}, whole, " · ", states)]);
}

// The server counts characters, and a string of JavaScript counts some of them twice.
function marked(text, { start, end }) {
  if (start == null) return text;
  const characters = [...text];
  const part = (from, to) => characters.slice(from, to).join("");
  return [part(0, start), h("mark", {}, part(start, end)), part(end)];
}
