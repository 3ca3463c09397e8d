// A tree by WAI-ARIA's pattern: arrow keys walk and fold, and long families come in portions.
import { h } from "./dom.js";
import { count } from "./format.js";
import { icon } from "./icons.js";

const PORTION = 100;
const FEW = 12;

/** root: {name, kind, tokens, children}. The root and small families start open. */
export function tree(root, label) {
  const widest = { tokens: root.tokens || 1 };
  const list = h("ul", { role: "tree", class: "tree", "aria-label": label }, item(root, 1, widest));
  list.querySelector(".node").tabIndex = 0;
  list.addEventListener("keydown", (event) => walk(list, event));
  list.addEventListener("focusin", ({ target }) => {
    if (!target.matches(".node")) return;
    for (const each of list.querySelectorAll(".node[tabindex='0']")) each.tabIndex = -1;
    target.tabIndex = 0;
  });
  return list;
}

function item(node, level, widest) {
  const children = node.children ?? [];
  const open = level === 1 || (level === 2 && children.length <= FEW);
  const row = h(
    "div",
    {
      class: "node",
      tabindex: "-1",
      role: "treeitem",
      "aria-level": level,
      "aria-expanded": children.length ? String(open) : null,
      "aria-label": `${node.kind} ${node.name}, ${count(node.tokens)} tokens`,
    },
    h("span", { class: "fold" }, children.length > 0 && icon("right")),
    h("span", { class: `kind ${node.kind}` }, node.kind),
    h("span", { class: "name", title: node.name }, node.name),
    h(
      "span",
      { class: "track", "aria-hidden": "true" },
      h("i", { style: { "--share": `${Math.min(100, (node.tokens / widest.tokens) * 100)}%` } }),
    ),
    h("span", { class: "num muted" }, count(node.tokens)),
  );
  const group = h("ul", { role: "group", hidden: !open });
  if (open) grow(group, children, level, widest);
  if (children.length)
    row.addEventListener("click", () => fold(row, group, children, level, widest));
  return h("li", { role: "none" }, row, children.length > 0 && group);
}

function fold(row, group, children, level, widest) {
  const open = row.getAttribute("aria-expanded") !== "true";
  row.setAttribute("aria-expanded", String(open));
  group.hidden = !open;
  if (open && !group.childElementCount) grow(group, children, level, widest);
}

// Children are made when they are first seen, PORTION at a time: a union may have thousands.
function grow(group, children, level, widest, from = 0) {
  group.append(
    ...children.slice(from, from + PORTION).map((child) => item(child, level + 1, widest)),
  );
  const left = children.length - from - PORTION;
  if (left <= 0) return;
  const more = h(
    "li",
    { role: "none" },
    h(
      "button",
      {
        class: "ghost more",
        onclick: () => {
          more.remove();
          grow(group, children, level, widest, from + PORTION);
        },
      },
      `Show more (${count(left)} left)`,
    ),
  );
  group.append(more);
}

function walk(list, event) {
  const row = event.target.closest(".node");
  if (!row) return;
  const rows = [...list.querySelectorAll(".node")].filter((each) => each.offsetParent !== null);
  const at = rows.indexOf(row);
  const open = row.getAttribute("aria-expanded");
  const moves = {
    ArrowDown: () => rows[at + 1]?.focus(),
    ArrowUp: () => rows[at - 1]?.focus(),
    ArrowRight: () => (open === "false" ? row.click() : rows[at + 1]?.focus()),
    ArrowLeft: () => (open === "true" ? row.click() : parentOf(row)?.focus()),
    Home: () => rows[0].focus(),
    End: () => rows.at(-1).focus(),
    Enter: () => row.click(),
    " ": () => row.click(),
  };
  if (!moves[event.key]) return;
  event.preventDefault();
  moves[event.key]();
}

function parentOf(row) {
  return row.closest("ul")?.closest("li")?.querySelector(".node");
}
