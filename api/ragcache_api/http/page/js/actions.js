// What an operator does to modules, with the server's account of what became of it.
import { get, post, remove } from "./api.js";
import { chosen } from "./dialogs.js";
import { h } from "./dom.js";
import { plural } from "./format.js";
import { complain, toast } from "./toasts.js";

const AT_ONCE = 4;
const TIERS = [
  { value: "device", label: "Device: read by the model as it is" },
  { value: "host", label: "Host: one copy away" },
  { value: "disk", label: "Disk: kept over restarts" },
];

export const modulePath = (id) => `modules/${encodeURIComponent(id)}`;

export const pin = (rows, after) => each(rows, "Pinned", after, ({ id }) => post(`${modulePath(id)}/pin`));
export const unpin = (rows, after) => each(rows, "Unpinned", after, ({ id }) => remove(`${modulePath(id)}/pin`));
export const warm = (rows, after) => each(rows, "Warmed", after, ({ id }) => post(`${modulePath(id)}/warm`));
export const drop = (rows, after) => each(rows, "Evicted", after, ({ id }) => remove(modulePath(id)));

export async function move(rows, after) {
  const what = rows.length === 1 ? rows[0].name : plural(rows.length, "module");
  const tier = await chosen("Move states", h("p", {}, "The states of ", h("b", {}, what), " go to:"), TIERS, { action: "Move" });
  if (tier) await each(rows, `Moved to ${tier}:`, after, ({ id }) => post(`${modulePath(id)}/move`, { tier }));
}

// A few at once; one toast for all that went well, one for what did not. after(row): read anew.
async function each(rows, verb, after, act) {
  const waiting = [...rows];
  const done = [];
  const unchanged = [];
  const errors = [];
  const worker = async () => {
    for (let row = waiting.shift(); row; row = waiting.shift()) {
      try {
        const answer = await act(row);
        (answer?.changes?.length === 0 ? unchanged : done).push(row);
        await after(row);
      } catch (error) {
        errors.push(error);
      }
    }
  };
  await Promise.all(Array.from({ length: Math.min(AT_ONCE, rows.length) }, worker));
  report(verb, done, unchanged, errors);
}

function report(verb, done, unchanged, errors) {
  const same = unchanged.length ? `${plural(unchanged.length, "module")} needed no change.` : "";
  if (done.length) toast("ok", `${verb} ${done.length === 1 ? done[0].name : plural(done.length, "module")}`, same);
  else if (unchanged.length) toast("ok", "Nothing changed", same);
  if (errors.length === 1) complain(errors[0]);
  else if (errors.length) toast("error", `${plural(errors.length, "call")} failed`, [...new Set(errors.map(({ message }) => message))].join(" "));
}

/** A module as the server has it now; null where it is gone. */
export async function reread({ id }) {
  try {
    return await get(modulePath(id));
  } catch (error) {
    if (error.status === 404) return null;
    throw error;
  }
}
