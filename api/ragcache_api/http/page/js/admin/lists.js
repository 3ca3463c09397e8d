// Long lists, a page at a time.
import { everything, withQuery } from "../api.js";
import { count, t } from "../format.js";
import { Button, html, usePolled, useState } from "../ui.js";

const LIMIT = 100;

/** A page of a listing of the service. load(path, signal) → {items, next, total}. numbered: cursors
 *  are positions, so that the last page can be reached. */
export function usePage(path, parameters, load, { numbered = false, period = 0 } = {}) {
  const [cursors, move] = useState([null]);
  const asked = withQuery(path, { ...parameters, limit: LIMIT, cursor: cursors.at(-1) });
  const here = numbered ? Number(cursors.at(-1) ?? 0) : (cursors.length - 1) * LIMIT;
  const state = usePolled(async (signal) => ({ ...(await load(asked, { signal })), at: here }), period, [asked]);
  const first = () => move([null]);
  if (!state.value) return { ...state, first };
  const { items, next, total, at } = state.value; // of the page in sight, also while the next one comes
  const last = Math.floor(Math.max(0, (total ?? 1) - 1) / LIMIT) * LIMIT;
  const before = numbered ? [...cursors.slice(0, -2), at > LIMIT ? String(at - LIMIT) : null] : cursors.slice(0, -1);
  const pager = {
    range: items.length ? t("range", { from: count(at + 1), to: count(at + items.length), all: count(total) }) : t("range_none"),
    first: at > 0 && first,
    back: at > 0 && (() => move(before)),
    on: next != null && (() => move([...cursors, next])),
    last: numbered ? at < last && (() => move([String(last)])) : undefined,
  };
  return { ...state, first, pager };
}

/** The names of the collections; none until they are known. */
export function useNames() {
  const { value } = usePolled((signal) => everything("v1/collections", { signal }), 0);
  return (value ?? []).map(({ name }) => name);
}

export function Pager({ pager }) {
  if (!pager) return null;
  const button = (id) =>
    html`<${Button} data-page=${id} disabled=${!pager[id]} onClick=${pager[id] || undefined}>${t(`page_${id}`)}<//>`;
  return html`<nav class="pager" aria-label=${t("pages")}>
    <span class="muted" data-figure="range">${pager.range}</span>
    ${["first", "back", "on", "last"].filter((id) => pager[id] !== undefined).map(button)}
  </nav>`;
}

/** What can be done with the ticked rows. */
export const Chosen = ({ n, children }) =>
  n > 0 && html`<div class="bulk" role="toolbar" aria-label=${t("acts_on_chosen")}><strong>${t("chosen", { n })}</strong>${children}</div>`;
