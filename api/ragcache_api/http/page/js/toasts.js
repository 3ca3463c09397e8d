// Notices at the corner: what was done, and what went wrong, in the server's words.
import { h } from "./dom.js";
import { icon } from "./icons.js";
import { logged } from "./parts.js";

const LASTING = { ok: 5000, error: 12000 };

/** kind: `ok` or `error`. */
export function toast(kind, title, detail = "") {
  const close = h(
    "button",
    { class: "ghost icon", "aria-label": "Dismiss", onclick: () => node.remove() },
    icon("close"),
  );
  const node = h(
    "div",
    { class: `toast ${kind}`, role: kind === "error" ? "alert" : "status" },
    icon(kind === "error" ? "warning" : "check"),
    h("div", {}, h("strong", {}, title), detail && h("p", {}, detail)),
    close,
  );
  document.getElementById("toasts").append(node);
  setTimeout(() => node.remove(), LASTING[kind]);
}

/** Says what went wrong; an aborted call is no error. */
export function complain(error) {
  if (error.name === "AbortError") return;
  toast("error", error.title ?? "Something went wrong", [error.message, " ", logged(error)]);
}
