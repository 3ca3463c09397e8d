// Every call to the server: the key, problems as errors, pages, events, and whether it answers.
const ROOT = new URL("../../", import.meta.url); // below any prefix of a proxy
const STORED = "ragcache.key";
const RETRIED = 3;
const PING_SECONDS = 2;
let askKey = async () => null;
let [declined, asking] = [false, null];

/** A value that components watch (`useStore` in ui.js). */
export function store(value) {
  const heard = new Set();
  const made = { value, heard };
  made.set = (next) => {
    made.value = next;
    for (const each of heard) each(next);
  };
  return made;
}

/** Whether the server answers; false until it does again. */
export const reached = store(true);
/** Whether this tab has a key. */
export const keyed = store(sessionStorage.getItem(STORED) !== null);

/** asked: (whether a key was refused) → Promise of a key or null, called on 401. */
export function connect(asked) {
  askKey = asked;
}

export function setKey(key) {
  declined = false;
  if (key) sessionStorage.setItem(STORED, key);
  else sessionStorage.removeItem(STORED);
  keyed.set(Boolean(key));
}

/** An error of the server. status 0: no answer; wait: seconds after which to try again; request:
 *  its id; errors: [{loc, msg}], where parts of the request are at fault. */
export class Problem extends Error {
  constructor(status, body, headers = new Headers()) {
    const said = body?.error ?? body ?? {};
    super(said.detail ?? said.message ?? said.title ?? "");
    this.status = status;
    this.wait = Number(headers.get("Retry-After")) || 0;
    this.request = headers.get("X-Request-ID");
    this.errors = said.errors ?? [];
    this.title = said.title ?? null;
  }
}

/** The response; asks for a key on 401 and tries again. body: a plain value, or FormData. */
export async function request(method, path, { body, headers = {}, signal } = {}) {
  for (let attempt = 1; ; attempt += 1) {
    const used = sessionStorage.getItem(STORED);
    const response = await sent(method, path, body, headers, used, signal);
    if (response.ok) return response;
    if (response.status === 401 && attempt <= RETRIED && (await renewed(used, attempt > 1))) continue;
    const said = await response.json().catch(() => null);
    if (!said && response.status >= 502 && response.status <= 504) lost(); // a proxy says it is gone
    throw new Problem(response.status, said, response.headers);
  }
}

// Many calls may be refused at once: one asks for all, and none whose key was replaced meanwhile.
async function renewed(used, refused) {
  if (sessionStorage.getItem(STORED) !== used) return true;
  if (!declined) asking ??= askKey(refused || used !== null).finally(() => (asking = null));
  const key = await asking;
  if (key) setKey(key);
  else declined = true; // asked once; the page's own button asks again
  return Boolean(key);
}

async function sent(method, path, body, headers, key, signal) {
  const json = body !== undefined && !(body instanceof FormData);
  const all = { ...(json && { "Content-Type": "application/json" }), ...headers };
  if (key) all.Authorization = `Bearer ${key}`;
  try {
    const whole = json ? JSON.stringify(body) : body;
    const response = await fetch(new URL(path, ROOT), { method, signal, cache: "no-store", headers: all, body: whole });
    if (response.ok && !reached.value) reached.set(true);
    return response;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    lost();
    throw new Problem(0, null);
  }
}

/** Notes that the server is gone, and looks for it until it is back. */
export async function lost() {
  if (!reached.value) return;
  reached.set(false);
  while (!reached.value) {
    await pause(PING_SECONDS);
    const ready = await fetch(new URL("health/ready", ROOT), { cache: "no-store" }).catch(() => null);
    if (ready?.ok) reached.set(true);
  }
}

export const pause = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));

/** The JSON of an answer; null where it has no body. */
export async function call(method, path, options) {
  const text = await (await request(method, path, options)).text();
  return text ? JSON.parse(text) : null;
}

export const get = (path, options) => call("GET", path, options);
export const post = (path, body = {}, options = {}) => call("POST", path, { ...options, body });
export const remove = (path, options) => call("DELETE", path, options);

export const collectionPath = (name) => `v1/collections/${encodeURIComponent(name)}`;
export const documentPath = (collection, id, kind = "documents") =>
  `${collectionPath(collection)}/${kind}/${id.split("/").map(encodeURIComponent).join("/")}`;

/** A path with those parameters that are given. */
export function withQuery(path, parameters) {
  const given = Object.entries(parameters).filter(([, value]) => (value ?? "") !== "");
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

/** Up to `most` items of a paged listing. */
export async function everything(path, { signal, most = 1000 } = {}) {
  const items = [];
  let cursor = null;
  do {
    const page = await get(withQuery(path, { cursor, limit: 200 }), { signal });
    items.push(...page.items);
    cursor = page.next ?? null;
  } while (cursor && items.length < most);
  return items;
}

/** The events of a text/event-stream. EventSource cannot send the key, so it is read by hand. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      if (error.name !== "AbortError") lost();
      throw error;
    });
    if (done) return;
    pending = (pending + value).replaceAll("\r\n", "\n");
    const blocks = pending.split("\n\n");
    pending = blocks.pop();
    for (const block of blocks) {
      const of = (name) => block.split("\n").filter((line) => line.startsWith(name)).map((line) => line.slice(name.length).trim());
      const data = of("data:").join("\n");
      if (data && data !== "[DONE]") yield { event: of("event:")[0] ?? "message", data: JSON.parse(data) };
    }
  }
}
