// Starts the page: the rail, the key, and the view that the address names.
import { connect } from "./api.js";
import { askedKey } from "./dialogs.js";
import { h, show } from "./dom.js";
import { rail } from "./rail.js";
import { ask } from "./views/ask.js";
import { documents } from "./views/documents.js";
import { ingestion } from "./views/ingestion.js";
import { keys } from "./views/keys.js";
import { modules } from "./views/modules.js";
import { overview } from "./views/overview.js";
import { replicas } from "./views/replicas.js";
import { requests } from "./views/requests.js";
import { schemas } from "./views/schemas.js";

/** A view: id (its address), title, about (a line below the title), mount({body, actions, signal,
 *  parameters}). signal aborts when the view is left. */
const VIEWS = [
  overview,
  ask,
  documents,
  ingestion,
  modules,
  requests,
  schemas,
  replicas,
  keys,
];

const main = document.getElementById("main");
const side = rail(document.getElementById("rail"), VIEWS);
let leaving = new AbortController();

function route() {
  const [id, query] = location.hash.replace(/^#\/?/, "").split("?");
  const view = VIEWS.find((each) => each.id === id) ?? VIEWS[0];
  leaving.abort();
  leaving = new AbortController();
  const actions = h("div", { class: "actions" });
  const body = h("div", { class: `view ${view.id}` });
  show(
    main,
    h(
      "header",
      { class: "top" },
      h("div", {}, h("h1", {}, view.title), h("p", { class: "muted" }, view.about)),
      actions,
    ),
    body,
  );
  document.title = `${view.title} · ragcache`;
  document.querySelectorAll("dialog.drawer").forEach((open) => open.close());
  side.entered(view.id);
  view.mount({ body, actions, signal: leaving.signal, parameters: new URLSearchParams(query) });
}

connect({ asked: askedKey, reached: side.reached });
window.addEventListener("hashchange", () => {
  route();
  main.focus({ preventScroll: true });
  window.scrollTo(0, 0);
});
route();
