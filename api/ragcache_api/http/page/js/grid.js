// A table of any length: only the rows in sight exist, and pages are fetched as they come in sight.
import { h, show } from "./dom.js";
import { count } from "./format.js";
import { icon } from "./icons.js";
import { fault } from "./parts.js";

const ROW = 38;
const TALL_ROW = 62; // two lines, where there is no room for columns
const BEYOND = 8;
const narrow = matchMedia("(max-width: 640px)"); // as in the style sheets
const PAGE = 200;

/** columns: [{id, title, cell, sort?, num?, width}]; load(query) → {items, next, total} with query
 *  {cursor, limit, sort, descending}; opened(row) on Enter or a click; selected(rows) when the
 *  selection changes; blank: what to show where there is no row; failed(error) once some are
 *  shown. */
export function grid(options) {
  const state = {
    ...options,
    rows: [],
    total: 0,
    next: null,
    shown: new Map(),
    picked: new Map(),
    turn: 0,
    fetching: null,
  };
  state.sort ??= "id";
  state.descending ??= false;
  build(state);
  return {
    node: state.box,
    reload: () => reload(state),
    clear: () => pick(state, [], false),
    update: (row) => replace(state, row),
    marked: (id) => mark(state, id),
  };
}

function build(state) {
  const { columns, label } = state;
  const all = h("input", {
    type: "checkbox",
    "aria-label": "Select every row that was fetched",
    onchange: () => pick(state, all.checked ? state.rows : [], all.checked),
  });
  state.all = all;
  state.heads = columns.map((column) => heading(state, column));
  state.above = h("tr", { class: "spacer", "aria-hidden": "true" }, h("td"));
  state.below = h("tr", { class: "spacer", "aria-hidden": "true" }, h("td"));
  state.body = h("tbody", {}, state.above, state.below);
  const widths = h(
    "colgroup",
    {},
    h("col", { style: { width: "38px" } }),
    columns.map(({ id, width }) => h("col", { class: `c-${id}`, style: width ? { width } : {} })),
  );
  state.table = h(
    "table",
    { class: "grid", "aria-label": label },
    widths,
    h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "pick" }, all), state.heads)),
    state.body,
  );
  state.notice = h("div", { class: "notice" });
  state.view = h("div", { class: "gridview" }, state.table, state.notice);
  state.status = h("span", { class: "muted num", role: "status" });
  state.box = h("div", { class: "gridbox" }, state.view, h("footer", {}, state.status));
  state.view.addEventListener("scroll", () => requestAnimationFrame(() => draw(state)), {
    passive: true,
  });
  state.body.addEventListener("keydown", (event) => keyed(state, event));
  const watcher = new ResizeObserver(() => draw(state));
  watcher.observe(state.view);
  state.signal.addEventListener("abort", () => watcher.disconnect());
  const fit = () => {
    state.row = narrow.matches ? TALL_ROW : ROW;
    draw(state);
  };
  narrow.addEventListener("change", fit, { signal: state.signal });
  state.row = narrow.matches ? TALL_ROW : ROW;
}

function heading(state, { id, title, sort, num }) {
  const kind = `c-${id} ${num ? "num" : ""}`;
  if (!sort) return h("th", { scope: "col", class: kind }, title);
  const turn = () => {
    state.descending = state.sort === id ? !state.descending : Boolean(num);
    state.sort = id;
    state.sorted?.(state.sort, state.descending);
    reload(state);
  };
  return h(
    "th",
    { scope: "col", class: kind, "data-sort": id },
    h("button", { class: "sort", onclick: turn }, title, h("span", { class: "arrow" })),
  );
}

function markSort({ heads, sort, descending }) {
  for (const head of heads) {
    const current = head.dataset.sort === sort;
    if (current) head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
    const arrow = head.querySelector(".arrow");
    if (arrow) show(arrow, current && icon(descending ? "down" : "up"));
  }
}

async function reload(state) {
  state.turn += 1;
  Object.assign(state, { rows: [], next: null, total: 0, fetching: null, begun: false });
  for (const row of state.shown.values()) row.remove();
  state.shown.clear();
  state.view.scrollTop = 0;
  pick(state, [], false);
  markSort(state);
  show(state.notice);
  await fetchUntil(state, 0);
}

// Cursors lead from page to page, so a far row is reached through those before it.
async function fetchUntil(state, index) {
  state.wanted = index;
  if (state.fetching) return;
  const turn = state.turn;
  state.fetching = turn;
  try {
    while (
      turn === state.turn &&
      (!state.begun || (state.rows.length <= state.wanted && state.next))
    ) {
      const page = await state.load({
        cursor: state.next,
        limit: PAGE,
        sort: state.sort,
        descending: state.descending,
      });
      if (turn !== state.turn) return;
      state.begun = true;
      state.rows.push(...page.items);
      state.next = page.next ?? null;
      // the first page counts the list, those after it do not
      const known = state.next ? Math.max(state.total, state.rows.length + 1) : state.rows.length;
      state.total = page.total ?? known;
      arrived(state);
    }
  } catch (error) {
    if (turn === state.turn) broken(state, error);
  } finally {
    if (turn === state.turn) state.fetching = null;
  }
}

function broken(state, error) {
  if (error.name === "AbortError") return;
  state.table.hidden = state.rows.length === 0;
  if (state.rows.length) state.failed(error);
  else show(state.notice, fault(error));
}

function arrived(state) {
  state.table.setAttribute("aria-rowcount", state.total + 1);
  show(state.status, `${count(state.total)} in all`);
  show(state.notice, !state.total && state.blank());
  state.table.hidden = !state.total;
  for (const [index, node] of state.shown) {
    if (!node.classList.contains("waiting") || index >= state.rows.length) continue;
    const row = line(state, index);
    node.replaceWith(row); // in its place: a table that shrinks for a moment would scroll
    state.shown.set(index, row);
  }
  draw(state);
}

function draw(state) {
  const { view, shown, total, rows } = state;
  const last = Math.min(
    total,
    Math.ceil((view.scrollTop + view.clientHeight) / state.row) + BEYOND,
  );
  const first = Math.max(0, Math.min(last, Math.floor(view.scrollTop / state.row) - BEYOND));
  for (const [index, node] of shown) {
    if (index >= first && index < last) continue;
    node.remove();
    shown.delete(index);
  }
  let after = state.below;
  for (let index = last - 1; index >= first; index -= 1) {
    if (!shown.has(index)) {
      shown.set(index, index < rows.length ? line(state, index) : waiting(state, index));
      after.before(shown.get(index));
    }
    after = shown.get(index);
  }
  state.above.firstChild.style.setProperty("height", `${first * state.row}px`);
  state.below.firstChild.style.setProperty("height", `${(total - last) * state.row}px`);
  if (last > rows.length && state.next) fetchUntil(state, last);
}

function line(state, index) {
  const row = state.rows[index];
  const box = h("input", {
    type: "checkbox",
    tabindex: "-1",
    "aria-label": `Select ${row.name}`,
    onchange: () => pick(state, [row], box.checked),
  });
  box.checked = state.picked.has(row.id);
  const open = ({ target }) => target.closest("button, input, a, .pick") || state.opened(row);
  return h(
    "tr",
    {
      "aria-rowindex": index + 2,
      "data-id": row.id,
      "data-index": index,
      tabindex: index === 0 ? "0" : "-1",
      "aria-current": state.current === row.id ? "true" : null,
      onclick: open,
    },
    h("td", { class: "pick" }, box),
    state.columns.map(({ id, cell, num }) =>
      h("td", { class: `c-${id} ${num ? "num" : ""}` }, cell(row)),
    ),
  );
}

function waiting({ columns }, index) {
  return h(
    "tr",
    { class: "waiting", "aria-rowindex": index + 2, "aria-busy": "true" },
    h("td"),
    columns.map(({ id }) => h("td", { class: `c-${id}` }, h("i", { class: "skeleton" }))),
  );
}

function replace(state, row) {
  const index = state.rows.findIndex(({ id }) => id === row.id);
  if (index < 0) return;
  state.rows[index] = { ...state.rows[index], ...row };
  if (state.picked.has(row.id)) state.picked.set(row.id, state.rows[index]);
  const old = state.shown.get(index);
  if (!old) return;
  const node = line(state, index);
  state.shown.set(index, node);
  const focused = old === document.activeElement;
  old.replaceWith(node);
  if (focused) node.focus();
}

function mark(state, id) {
  state.current = id;
  for (const node of state.shown.values()) {
    if (node.dataset.id === String(id)) node.setAttribute("aria-current", "true");
    else node.removeAttribute("aria-current");
  }
}

function pick(state, rows, picked) {
  if (!picked && !rows.length) state.picked.clear();
  for (const row of rows) {
    if (picked) state.picked.set(row.id, row);
    else state.picked.delete(row.id);
  }
  for (const [index, node] of state.shown) {
    const box = node.querySelector("input");
    if (box) box.checked = state.picked.has(state.rows[index].id);
  }
  state.all.checked = state.picked.size > 0 && state.picked.size === state.rows.length;
  state.all.indeterminate = state.picked.size > 0 && !state.all.checked;
  state.selected([...state.picked.values()]);
}

function keyed(state, event) {
  const node = event.target.closest("tr[data-index]");
  if (!node || event.target !== node) return;
  const index = Number(node.dataset.index);
  const page = Math.max(1, Math.floor(state.view.clientHeight / state.row) - 2);
  const moves = {
    ArrowDown: 1,
    ArrowUp: -1,
    PageDown: page,
    PageUp: -page,
    Home: -index,
    End: state.total,
  };
  if (event.key in moves) focusRow(state, index + moves[event.key]);
  else if (event.key === "Enter") state.opened(state.rows[index]);
  else if (event.key === " ")
    pick(state, [state.rows[index]], !state.picked.has(state.rows[index].id));
  else return;
  event.preventDefault();
}

function focusRow(state, wanted) {
  const index = Math.max(0, Math.min(state.rows.length - 1, wanted));
  const { view } = state;
  const head = state.table.tHead.offsetHeight;
  const top = index * state.row;
  if (top < view.scrollTop) view.scrollTop = top;
  else if (top + state.row + head > view.scrollTop + view.clientHeight)
    view.scrollTop = top + state.row + head - view.clientHeight;
  draw(state);
  state.shown.get(index)?.focus();
}
