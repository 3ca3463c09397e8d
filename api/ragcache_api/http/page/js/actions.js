// What an operator does to modules, with the server's account of what became of it.
import { get, post, remove, withQuery } from "./api.js";
import { chosen } from "./dialogs.js";
import { h } from "./dom.js";
import { plural } from "./format.js";
import { complain, toast } from "./toasts.js";

const AT_ONCE = 4;
const SAYS = {
  device: "Device: read by the model as it is",
  host: "Host: one copy away",
  disk: "Disk: kept over restarts",
  remote: "Remote: shared by machines",
};

export const modulePath = (id) => `modules/${encodeURIComponent(id)}`;

export const pin = (rows, after) =>
  each(rows, "Pinned", after, ({ id }) => post(`${modulePath(id)}/pin`));
export const unpin = (rows, after) =>
  each(rows, "Unpinned", after, ({ id }) => remove(`${modulePath(id)}/pin`));
export const warm = (rows, after) =>
  each(rows, "Warmed", after, ({ id }) => post(`${modulePath(id)}/warm`));
export const drop = (rows, tier, after) =>
  each(rows, "Evicted", after, ({ id }) => remove(withQuery(modulePath(id), { tier })));

/** What `drop` would do: the changes of every module. */
export async function dropped(rows, tier) {
  const { done, errors } = await spread(rows, ({ id }) =>
    remove(withQuery(modulePath(id), { tier, dry_run: true })),
  );
  if (errors.length) throw errors[0];
  return done.map(([, answer]) => answer);
}

export async function move(rows, after) {
  const what = rows.length === 1 ? rows[0].name : plural(rows.length, "module");
  const tiers = await get("tiers").then(
    ({ items }) => items.map(({ name }) => name),
    () => Object.keys(SAYS),
  );
  const choices = tiers.map((value) => ({ value, label: SAYS[value] ?? value }));
  const tier = await chosen(
    "Move states",
    h("p", {}, "The states of ", h("b", {}, what), " go to:"),
    choices,
    { action: "Move" },
  );
  if (tier)
    await each(rows, `Moved to ${tier}:`, after, ({ id }) =>
      post(`${modulePath(id)}/move`, { tier }),
    );
}

const LIMITS = [
  { value: "3600", label: "In an hour" },
  { value: "86400", label: "In a day" },
  { value: "604800", label: "In a week" },
  { value: "", label: "Never: as long as there is room" },
];

export async function expire(rows, after) {
  const what = rows.length === 1 ? rows[0].name : plural(rows.length, "module");
  const choice = await chosen(
    "Limit the time of states",
    h("p", {}, "The states of ", h("b", {}, what), " go, unless they are pinned:"),
    LIMITS,
    { action: "Set" },
  );
  if (choice === null) return;
  const seconds = choice === "" ? null : Number(choice);
  await each(rows, seconds === null ? "Limit lifted:" : "Limit set:", after, ({ id }) =>
    post(`${modulePath(id)}/expire`, { seconds }),
  );
}

// One toast for all that went well, one for what did not. after(row): read anew.
async function each(rows, verb, after, act) {
  const { done, errors } = await spread(rows, async (row) => {
    const answer = await act(row);
    await after(row);
    return answer;
  });
  const idle = ([, answer]) => answer?.changes?.length === 0;
  report(
    verb,
    done.filter((pair) => !idle(pair)).map(([row]) => row),
    done.filter(idle),
    errors,
  );
}

// A few at once: [row, answer] of those that went well, and the errors of the others.
async function spread(rows, act) {
  const waiting = [...rows];
  const done = [];
  const errors = [];
  const worker = async () => {
    for (let row = waiting.shift(); row; row = waiting.shift()) {
      try {
        done.push([row, await act(row)]);
      } catch (error) {
        errors.push(error);
      }
    }
  };
  await Promise.all(Array.from({ length: Math.min(AT_ONCE, rows.length) }, worker));
  return { done, errors };
}

function report(verb, done, unchanged, errors) {
  const same = unchanged.length ? `${plural(unchanged.length, "module")} needed no change.` : "";
  if (done.length)
    toast(
      "ok",
      `${verb} ${done.length === 1 ? done[0].name : plural(done.length, "module")}`,
      same,
    );
  else if (unchanged.length) toast("ok", "Nothing changed", same);
  if (errors.length === 1) complain(errors[0]);
  else if (errors.length)
    toast(
      "error",
      `${plural(errors.length, "call")} failed`,
      [...new Set(errors.map(({ message }) => message))].join(" "),
    );
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
