// The rail at the left: views, what the server says of itself, appearance and key.
import { forgetKey, get, hasKey } from "./api.js";
import { appearance, nextAppearance } from "./appearance.js";
import { h, show } from "./dom.js";
import { span } from "./format.js";
import { icon } from "./icons.js";

const NAMES = { system: "System", light: "Light", dark: "Dark" };
const AGAIN = 15000;

/** Fills `node`. entered(id) marks a view; reached(boolean) says whether the server answers. */
export function rail(node, views) {
  const links = views.map(({ id, title }) =>
    h("a", { href: `#/${id}`, "data-view": id, title }, icon(id), h("span", {}, title)),
  );
  const key = keyButton();
  const server = h("div", { class: "server", role: "status" });
  const menu = menuButton(node);
  show(
    node,
    h(
      "div",
      { class: "brand" },
      h("img", { src: "icon.svg", alt: "", width: 20, height: 20 }),
      h("span", {}, "ragcache"),
    ),
    menu.button,
    h(
      "div",
      { class: "menu", id: "menu" },
      h("nav", { "aria-label": "Views" }, links),
      server,
      h("div", { class: "settings" }, appearanceButton(), key),
    ),
  );
  const state = watched(server);
  return {
    reached(answered) {
      key.hidden = !hasKey();
      state.reached(answered);
    },
    entered(id) {
      menu.turn(false);
      for (const link of links) {
        if (link.dataset.view === id) link.setAttribute("aria-current", "page");
        else link.removeAttribute("aria-current");
      }
    },
  };
}

// Where the window is narrow the rail is a bar, and this opens what else it holds.
function menuButton(node) {
  const button = h(
    "button",
    {
      class: "ghost icon menubutton",
      "aria-label": "Menu",
      "aria-controls": "menu",
      "aria-expanded": "false",
      onclick: () => turn(!node.classList.contains("open")),
    },
    icon("menu"),
  );
  const turn = (open) => {
    node.classList.toggle("open", open);
    button.setAttribute("aria-expanded", String(open));
  };
  node.addEventListener("keydown", ({ key }) => {
    if (key !== "Escape" || !node.classList.contains("open")) return;
    turn(false);
    button.focus();
  });
  document.addEventListener("click", ({ target }) => node.contains(target) || turn(false));
  return { button, turn };
}

function watched(server) {
  let stats = null;
  let reachable = true;
  const draw = () =>
    show(
      server,
      h("i", { class: `dot ${reachable ? "ok" : "bad"}` }),
      h(
        "span",
        {},
        reachable ? h("strong", {}, stats?.model ?? "Connected") : h("strong", {}, "Not reachable"),
        reachable && stats && h("small", {}, `up ${span(stats.uptime)}`),
      ),
    );
  const reached = (answered) => {
    if (answered === reachable) return;
    reachable = answered;
    draw();
  };
  const turn = async () => {
    if (!document.hidden) stats = await get("stats").catch(() => stats);
    draw();
    setTimeout(turn, AGAIN);
  };
  draw();
  setTimeout(turn, 0); // once the page has said how it asks for a key
  return { reached };
}

function appearanceButton() {
  const label = h("span", {}, NAMES[appearance()]);
  const button = h(
    "button",
    {
      class: "ghost",
      title: "Appearance",
      "data-action": "appearance",
      "aria-label": `Appearance: ${NAMES[appearance()]}`,
    },
    icon("theme"),
    label,
  );
  button.addEventListener("click", () => {
    const name = NAMES[nextAppearance()];
    show(label, name);
    button.setAttribute("aria-label", `Appearance: ${name}`);
  });
  return button;
}

function keyButton() {
  const forget = () => {
    forgetKey();
    location.reload();
  };
  return h(
    "button",
    {
      class: "ghost",
      hidden: !hasKey(),
      "data-action": "forget",
      title: "Forget the API key of this tab",
      "aria-label": "Forget the API key",
      onclick: forget,
    },
    icon("keys"),
    h("span", {}, "Forget key"),
  );
}
