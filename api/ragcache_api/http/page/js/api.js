// Every call to the server: the key, problems as errors, pages, events of a stream.
const STORED = "ragcache.key";
const RETRIED = 3;
let askKey = async () => null;
let heard = () => {};
let declined = false;

/** asked: () → Promise of a key or null, called on 401; reached: (boolean) after every call. */
export function connect({ asked, reached }) {
  askKey = asked;
  heard = reached;
}

export const hasKey = () => sessionStorage.getItem(STORED) !== null;
export const setKey = (key) => sessionStorage.setItem(STORED, key);
export const forgetKey = () => sessionStorage.removeItem(STORED);

/** What the server said in application/problem+json, or in OpenAI's shape. status 0: no answer;
 *  wait: seconds after which to try again; request: its id; errors: [{loc, msg}], where parts of the request are at
 *  fault. */
export class Problem extends Error {
  constructor(status, body, headers = new Headers()) {
    const said = body?.error ?? body ?? {};
    super(said.detail ?? said.message ?? said.title ?? `The server answered ${status}.`);
    this.status = status;
    this.wait = Number(headers.get("Retry-After")) || 0;
    this.request = headers.get("X-Request-ID");
    this.errors = said.errors ?? [];
    this.title = said.title ?? (status ? `Error ${status}` : "No answer");
  }
}

/** The response; asks for a key on 401 and tries again. body: a plain value, or FormData. */
export async function request(method, path, { body, headers = {}, signal } = {}) {
  for (let attempt = 1; ; attempt += 1) {
    const used = sessionStorage.getItem(STORED);
    const response = await sent(method, path, body, headers, used, signal);
    if (response.ok) return response;
    if (response.status === 401 && attempt <= RETRIED && (await renewed(used, attempt > 1)))
      continue;
    throw new Problem(response.status, await response.json().catch(() => null), response.headers);
  }
}

// Many calls may be refused at once: those whose key was replaced meanwhile need not ask.
async function renewed(used, refused) {
  if (sessionStorage.getItem(STORED) !== used) return true;
  const key = declined ? null : await askKey(refused || used !== null);
  if (key) setKey(key);
  else declined = true; // asked once; the page's own button asks again
  return Boolean(key);
}

async function sent(method, path, body, headers, key, signal) {
  const plain = body !== undefined && !(body instanceof FormData);
  try {
    const response = await fetch(path, {
      method,
      signal,
      cache: "no-store",
      headers: {
        ...(plain && { "Content-Type": "application/json" }),
        ...(key && { Authorization: `Bearer ${key}` }),
        ...headers,
      },
      body: plain ? JSON.stringify(body) : body,
    });
    heard(true);
    return response;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    heard(false);
    const upload =
      body instanceof FormData
        ? " It may have refused the upload for its size (setting upload_bytes)."
        : "";
    throw new Problem(0, { title: "No answer", detail: `The server cannot be reached.${upload}` });
  }
}

/** The JSON of an answer; null where it has no body. */
export async function call(method, path, options) {
  const response = await request(method, path, options);
  const text = await response.text();
  return text ? JSON.parse(text) : null;
}

export const get = (path, options) => call("GET", path, options);
export const post = (path, body = {}, options = {}) => call("POST", path, { ...options, body });
export const remove = (path, options) => call("DELETE", path, options);

export const collectionPath = (name) => `../v1/collections/${encodeURIComponent(name)}`;

/** A path with those parameters that are given. */
export function withQuery(path, parameters) {
  const given = Object.entries(parameters).filter(
    ([, value]) => value !== null && value !== undefined && value !== "",
  );
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
    const { value, done } = await reader.read();
    if (done) return;
    pending = (pending + value).replaceAll("\r\n", "\n");
    const blocks = pending.split("\n\n");
    pending = blocks.pop();
    for (const block of blocks) {
      const event = parsed(block);
      if (event) yield event;
    }
  }
}

function parsed(block) {
  let event = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) event = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  return data.length ? { event, data: JSON.parse(data.join("\n")) } : null;
}
