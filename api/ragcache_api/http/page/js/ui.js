// Components that both pages are made of.
import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor.js";
import { store } from "./api.js";
import { ago, count, date, iso, plain, t } from "./format.js";

export { html, render, useEffect, useMemo, useRef, useState } from "./vendor.js";

/** The value of a store, drawn again when it changes. */
export function useStore(watched) {
  const [value, set] = useState(watched.value);
  useEffect(() => {
    const hear = (next) => set(() => next);
    hear(watched.value);
    watched.heard.add(hear);
    return () => watched.heard.delete(hear);
  }, [watched]);
  return value;
}

/** Calls `read` now, every `period` seconds while the page can be seen, and by `again`. */
export function usePolled(read, period, inputs = []) {
  const [state, set] = useState({ value: null, error: null });
  const again = useRef(() => {});
  useLayoutEffect(() => {
    const leaving = new AbortController();
    const { signal } = leaving;
    let [timer, turns] = [0, 0];
    const turn = async () => {
      clearTimeout(timer);
      const mine = (turns += 1);
      let wait = period;
      try {
        const value = document.hidden && mine > 1 ? null : await read(signal);
        if (value && !signal.aborted && mine === turns) set({ value, error: null });
      } catch (error) {
        if (signal.aborted) return;
        set((now) => ({ value: now.value, error }));
        wait = [401, 403].includes(error.status) ? 0 : Math.max(period, error.wait ?? 0);
      }
      if (wait && mine === turns && !signal.aborted) timer = setTimeout(turn, wait * 1000);
    };
    again.current = turn;
    document.addEventListener("visibilitychange", () => document.hidden || turn(), { signal });
    turn();
    return () => (clearTimeout(timer), leaving.abort());
  }, inputs);
  return { ...state, again: () => again.current() };
}

const ICONS = new URL("../icons.svg", import.meta.url).pathname;

export const Icon = ({ name }) => html`<svg class="icon" aria-hidden="true"><use href="${ICONS}#${name}" /></svg>`;

/** A name from outside, which no character in it can turn around. */
export const Name = ({ text, title }) =>
  html`<bdi class="name" title=${plain(title ?? text)}>${plain(text)}</bdi>`;

/** A time as its age, with the date in the title. */
export const Moment = ({ at, none = "–" }) =>
  at ? html`<time dateTime=${iso(at)} title=${date(at)}>${ago(at)}</time>` : html`<span class="muted">${none}</span>`;

export const Exact = ({ at }) => html`<time dateTime=${iso(at)}>${date(at)}</time>`;
export const Loading = () => html`<p class="muted loading" role="status">${t("loading")}</p>`;

export const Empty = ({ title, children }) =>
  html`<div class="empty"><strong>${title}</strong><div class="muted">${children}</div></div>`;

const titleOf = (error) => error.title ?? (error.status ? t("error_status", { status: error.status }) : t("no_answer"));
const detailOf = (error) => (error.status === 0 ? t("unreachable") : error.message);

/** An error in the server's words, with the id that its log has. */
export function Fault({ error }) {
  const id = error.request && html` <code>${error.request}</code>`;
  return html`<p class="fault" role="alert">
    <strong>${plain(titleOf(error))}</strong> ${plain(detailOf(error))}${id}
  </p>`;
}

/** What `usePolled` gave: the value's view, the error, or a sign of waiting. */
export function Polled({ state, children }) {
  if (state.value === null) {
    if (!state.error) return html`<${Loading} />`;
    if (state.error.status !== 403) return html`<${Fault} error=${state.error} />`;
    return html`<${Empty} title=${t("not_for_key")}>${plain(state.error.message)}<//>`;
  }
  return html`${state.error && html`<${Fault} error=${state.error} />`}${children(state.value)}`;
}

export const Panel = ({ title, note, actions, children, ...rest }) =>
  html`<section class="panel" aria-label=${title} ...${rest}>
    <header>
      <h2>${title}</h2>
      ${note && html`<span class="muted">${note}</span>`}
      ${actions && html`<div class="actions">${actions}</div>`}
    </header>
    ${children}
  </section>`;

export const Figure = ({ name, label, value, note }) =>
  html`<div class="figure" data-figure=${name}>
    <dt>${label}</dt><dd>${value}</dd>${note && html`<dd class="muted">${note}</dd>`}
  </div>`;

/** facts: [[name, text or component]]. */
export const Facts = ({ facts }) =>
  facts.length > 0 && html`<dl class="facts">${facts.map(([name, told]) => html`<div><dt>${plain(name)}</dt><dd><bdi>${told}</bdi></dd></div>`)}</dl>`;

/** The metadata of a document or module, as facts. */
export function metadataOf({ metadata }) {
  const told = (value) => (Array.isArray(value) ? value.join(" › ") : typeof value === "object" ? JSON.stringify(value) : value);
  const known = Object.entries(metadata).filter(([name]) => name !== "omitted");
  return known.map(([name, value]) => [name, plain(told(value))]);
}

export const Field = ({ label, children, ...rest }) =>
  html`<label class="field" ...${rest}><span>${label}</span>${children}</label>`;

export const Button = ({ icon, label, kind = "", children, ...rest }) =>
  html`<button type="button" class=${kind} aria-label=${label} title=${label} ...${rest}>
    ${icon && html`<${Icon} name=${icon} />`}${children}
  </button>`;

const ARIA = { true: "descending", false: "ascending" };

/** columns: [{id, title, cell(row), num, sortable}]. On a telephone each row becomes a card.
 *  sort: {by, descending, set(id)}; picked: {has(id), toggle(id), all(on)}. placed: each row takes
 *  the place of the one that stood there, which is faster where a whole page of rows is turned. */
export function Table({ label, columns, rows, sort, picked, placed, row: attributes = () => ({}) }) {
  const heading = ({ id, title, num, sortable }) => {
    const sorted = sort?.by === id ? ARIA[sort.descending] : undefined;
    const inside = sortable
      ? html`<button type="button" class="link" onClick=${() => sort.set(id)}>${title}</button>`
      : title;
    return html`<th scope="col" class=${num ? "num" : ""} data-sort=${id} aria-sort=${sorted}>${inside}</th>`;
  };
  const whole = rows.length > 0 && rows.every((row) => picked?.has(row.id));
  const tick = (name, on, change) =>
    html`<input type="checkbox" aria-label=${name} checked=${on} onChange=${change} />`;
  return html`<div class="scroll" role="group" aria-label=${label} tabindex="0">
    <table role="table" aria-label=${label}>
      <thead role="rowgroup">
        <tr role="row">
          ${picked && html`<td class="tick">${tick(t("select_all"), whole, () => picked.all(!whole))}</td>`}
          ${columns.map(heading)}
        </tr>
      </thead>
      <tbody role="rowgroup">
        ${rows.map((row, at) => html`<tr role="row" key=${placed ? at : row.id} data-id=${row.id} ...${attributes(row)}>
          ${picked && html`<td role="cell" class="tick">${tick(t("select_one", { name: plain(row.name ?? row.id) }), picked.has(row.id), () => picked.toggle(row.id))}</td>`}
          ${columns.map(({ id, title, num, cell }) => html`<td role="cell" class="${num ? "num" : ""} c-${id}" data-title=${title}>
            <span>${cell(row)}</span>
          </td>`)}
        </tr>`)}
      </tbody>
    </table>
  </div>`;
}

/** Columns of a `Table`: any, of names, of figures, of times, and of a button a row. */
export const column = (id, title, cell, rest = {}) => ({ id, title: t(title), cell, ...rest });
export const named = (id, title = id) => column(id, title, (row) => html`<${Name} text=${row[id] || "–"} />`);
export const figured = (id, title, format = count, rest = {}) =>
  column(id, title, (row) => format(row[id]), { num: true, ...rest });
export const timed = (id, title, none, rest = {}) =>
  column(id, title, (row) => html`<${Moment} at=${row[id]} none=${none} />`, { num: true, ...rest });
export const acting = (id, label, said, run, kind = "danger small") =>
  column("act", "acts", (row) => {
    const told = t(said, { name: plain(row.name ?? row.id) });
    return html`<${Button} kind=${kind} data-act=${id} label=${told} onClick=${() => run(row)}>${t(label)}<//>`;
  }, { num: true });

/** What a poll gave, as a table, or as words where there is nothing. rows: (value) → rows. */
export function Listing({ state, rows = (value) => value.items, empty, text, children, ...table }) {
  const shown = (value) => {
    const all = rows(value);
    if (all.length) return html`<${Table} rows=${all} ...${table} />`;
    return html`<${Empty} title=${t(empty)}>${children ?? (text && t(text))}<//>`;
  };
  return html`<${Polled} state=${state}>${shown}<//>`;
}

/** A `Listing` in a panel of its own. after: what stands below it. */
export const Listed = ({ title, note, actions, after, ...listing }) =>
  html`<${Panel} title=${title} note=${note} actions=${actions}><${Listing} label=${title} ...${listing} />${after}<//>`;

/** The rows that are ticked, by id. */
export function usePicked() {
  const [ids, set] = useState(() => new Set());
  const changed = (change) => set((now) => { const next = new Set(now); change(next); return next; });
  return {
    ids, // a new set with each change
    of: (rows) => rows.filter(({ id }) => ids.has(id)),
    clear: () => set(new Set()),
    for: (rows) => ({
      has: (id) => ids.has(id),
      toggle: (id) => changed((next) => next.delete(id) || next.add(id)),
      all: (on) => changed((next) => rows.forEach(({ id }) => (on ? next.add(id) : next.delete(id)))),
    }),
  };
}

const SOURCES = ["device", "host", "disk", "remote", "shared", "encoded", "computed"];
const KEPT = SOURCES.slice(0, 5);
export const sources = SOURCES.map((id) => ({ id, label: t(`tier_${id}`), color: `var(--${id})` }));
export const sourceOf = (id) =>
  sources.find((each) => each.id === id) ?? { id, label: plain(id), color: "var(--muted)" };

/** The share of prompt tokens that were not computed, 0 to 1; null where there are none. */
export function keptShare(tokens) {
  const sum = (names) => names.reduce((all, name) => all + (tokens[name] ?? 0), 0);
  return sum(SOURCES) ? sum(KEPT) / sum(SOURCES) : null;
}

export const Tier = ({ id }) =>
  html`<span class="chip"><i style=${{ background: sourceOf(id).color }}></i>${sourceOf(id).label}</span>`;

export const Tiers = ({ names }) =>
  names.length
    ? html`<span class="chips">${names.map((id) => html`<${Tier} id=${id} />`)}</span>`
    : html`<span class="chips muted">${t("none")}</span>`;

/** A part of a bar. color: a variable of the style sheet; kind: a class of it. */
export const part = (label, color, value, kind) => ({ label, color: `var(--${color})`, value: Math.max(0, value), kind });

/** A bar of parts, with its legend. */
export function Bar({ label, parts, total, format, legend = true }) {
  const shown = parts.filter(({ value }) => value > 0);
  const whole = total || shown.reduce((sum, { value }) => sum + value, 0) || 1;
  const said = shown.map((part) => `${part.label} ${format(part.value)}`).join(", ");
  return html`<div class="bar" role="img" aria-label="${label}: ${said || format(0)}">
      ${shown.map(({ kind, color, value }) => html`<i class=${kind ?? ""} style=${{ background: color, width: `${Math.min(100, (value / whole) * 100)}%` }}></i>`)}
    </div>
    ${legend && shown.length > 0 && html`<ul class="legend">${shown.map((part) => html`<li><i style=${{ background: part.color }}></i>${part.label} ${format(part.value)}</li>`)}</ul>`}`;
}

const toasts = store([]);
const SHOWN_SECONDS = 6;

/** kind: ok or error. */
export function toast(kind, title, detail = "") {
  const mine = { kind, title, detail };
  toasts.set([...toasts.value.slice(-3), mine]);
  setTimeout(() => toasts.set(toasts.value.filter((each) => each !== mine)), SHOWN_SECONDS * 1000);
}

export function complain(error) {
  if (error.name !== "AbortError") toast("error", titleOf(error), detailOf(error));
}

/** Whether `act` succeeded. Shows its error, or `said`: words, or what makes them of the result. */
export async function attempt(act, said) {
  try {
    const result = await act();
    if (said) toast("ok", typeof said === "function" ? said(result) : said);
    return true;
  } catch (error) {
    complain(error);
    return false;
  }
}

const dialogs = store([]);

/** Shows a dialog and waits until it is closed. body: (close(result)) → content. */
export function dialog(title, body, kind = "") {
  return new Promise((done) => {
    const mine = { title, body, kind, id: Math.random() };
    mine.close = (result = null) => {
      dialogs.set(dialogs.value.filter((each) => each !== mine));
      done(result);
    };
    dialogs.set([...dialogs.value, mine]);
  });
}

/** Asks with a form, and returns its data, or null where it was left. */
export function form(title, fields, action, { danger = false, kind = "", other } = {}) {
  const submitted = (close) => (event) => (event.preventDefault(), close(new FormData(event.target)));
  return dialog(title, (close) => html`<form onSubmit=${submitted(close)}>
    <div class="body">${fields}</div>
    <footer>
      ${other ?? html`<${Button} onClick=${() => close(null)} autofocus=${danger}>${t("cancel")}<//>`}
      <button type="submit" class=${danger ? "danger" : "primary"}>${action}</button>
    </footer>
  </form>`, kind);
}

/** Whether a deletion or the like was agreed to. */
export const confirmed = async (title, text, action = title) =>
  (await form(title, html`<p>${text}</p>`, action, { danger: true })) !== null;

function Modal({ each }) {
  const node = useRef(null);
  const titled = `title-${each.id}`;
  useEffect(() => {
    const before = document.activeElement;
    node.current.showModal();
    node.current.querySelector("[autofocus]")?.focus();
    return () => before?.isConnected && before.focus();
  }, []);
  return html`<dialog ref=${node} class="modal ${each.kind}" aria-labelledby=${titled} onClose=${() => each.close()}>
    <header>
      <h2 id=${titled}><bdi>${plain(each.title)}</bdi></h2>
      <${Button} kind="ghost" icon="close" label=${t("close")} onClick=${() => each.close()} />
    </header>
    ${each.body(each.close)}
  </dialog>`;
}

/** Where dialogs and notices appear; once a page. */
export function Overlays() {
  return html`${useStore(dialogs).map((each) => html`<${Modal} key=${each.id} each=${each} />`)}
    <div class="toasts" role="region" aria-label=${t("notices")} aria-live="polite">
      ${useStore(toasts).map(({ kind, title, detail }) => html`<div class="toast ${kind}">
        <strong>${plain(title)}</strong> <span>${plain(detail)}</span>
      </div>`)}
    </div>`;
}
