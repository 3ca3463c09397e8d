// Files on their way into a collection: dropped or chosen, sent in portions, read by jobs.
import { collectionPath, everything, get, pause, post, store } from "./api.js";
import { bytes, count, plain, t, word } from "./format.js";
import { Button, complain, html, Icon, Name, toast, useEffect, useRef, useState, useStore } from "./ui.js";

const PORTION = { bytes: 32 * 2 ** 20, files: 500 };
const FIRST = { bytes: 2 * 2 ** 20, files: 8 }; // is read soon, so that questions can be asked
const PERIOD = 0.5; // seconds between looks at a job
export const ENDED = ["done", "failed", "canceled", "interrupted"];

/** Files of this tab: [{id, file, name, status, reason}]; status: chosen, sent, done or refused. */
export const files = store([]);
/** Jobs that this tab began, as the server tells them. */
export const jobs = store([]);
const askable = store(false); // documents of these files can be asked
let number = 0;

function choose(more) {
  const shown = more.filter(({ name }) => !name.includes("/.")); // of a folder, nothing that is hidden
  const ordered = shown.sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
  const added = ordered.map(({ file, name }) => ({ id: (number += 1), file, name, status: "chosen" }));
  files.set([...files.value, ...added]);
}

const forget = (id) => files.set(files.value.filter((each) => each.id !== id));
const change = (ids, changes) =>
  files.set(files.value.map((each) => (ids.has(each.id) ? { ...each, ...changes(each) } : each)));

/** The files of a drop, named by their paths inside a folder. Entries are taken before the event ends. */
async function dropped(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.length) return [...transfer.files].map((file) => ({ file, name: file.name }));
  return (await Promise.all(entries.map((entry) => within(entry, "")))).flat();
}

async function within(entry, path) {
  const name = path + entry.name;
  if (entry.name.startsWith(".")) return [];
  if (entry.isFile) return [{ file: await new Promise((found, failed) => entry.file(found, failed)), name }];
  const children = await listed(entry.createReader());
  return (await Promise.all(children.map((child) => within(child, `${name}/`)))).flat();
}

// A reader gives a folder's entries in portions, and an empty one at the end.
async function listed(reader) {
  const all = [];
  for (;;) {
    const portion = await new Promise((found, failed) => reader.readEntries(found, failed));
    if (!portion.length) return all;
    all.push(...portion);
  }
}

// A job each: a body has a limit, and work that was taken up is not lost with what was not.
function portions(chosen) {
  const all = [];
  let room = { files: 0 };
  for (const each of chosen) {
    if (room.files === 0 || each.file.size > room.bytes) {
      room = { ...(all.length ? PORTION : FIRST) };
      all.push([]);
    }
    all.at(-1).push(each);
    room = { files: room.files - 1, bytes: room.bytes - each.file.size };
  }
  return all;
}

const stored = (collection) =>
  everything("v1/collections").then((all) => all.find(({ name }) => name === collection)?.documents ?? 0, () => 0);

/** Sends the chosen files. changed() is called as documents become visible. */
export async function send(collection, changed = () => {}) {
  askable.set(false);
  const before = await stored(collection);
  const grown = async () => (changed(), askable.value || askable.set((await stored(collection)) > before));
  for (const portion of portions(files.value.filter(({ status }) => status === "chosen"))) {
    const ids = new Set(portion.map(({ id }) => id));
    const body = new FormData();
    for (const { file, name } of portion) body.append("files", file, name);
    change(ids, () => ({ status: "sent" }));
    try {
      const headers = { "Idempotency-Key": randomKey() };
      const job = await post(`${collectionPath(collection)}/documents`, body, { headers });
      judged(ids, new Map((job.report?.skipped ?? []).map(({ name, reason }) => [name, reason])));
      follow(job, ids, grown);
    } catch (error) {
      const told = error.errors?.filter(({ loc }) => loc[0] === "files") ?? [];
      if (!told.length) {
        change(ids, () => ({ status: "chosen" }));
        complain(error);
        return;
      }
      judged(ids, new Map(told.map(({ loc, msg }) => [loc[1], msg])));
      toast("error", t("not_taken"), t("cannot_read", { n: told.length }));
    }
  }
}

const judged = (ids, reasons) =>
  change(ids, ({ name }) => (reasons.has(name) ? { status: "refused", reason: reasons.get(name) } : {}));

// crypto.randomUUID exists on secure origins only; the page may come over plain HTTP.
const randomKey = () =>
  Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");

// Goes on while the service is away, and until the job has ended.
async function follow(job, ids, changed) {
  for (let now = job; ; ) {
    const before = jobs.value.find(({ id }) => id === job.id);
    jobs.set(before ? jobs.value.map((each) => (each === before ? now : each)) : [now, ...jobs.value]);
    const ended = ENDED.includes(now.status);
    if (ended || (before && before.done !== now.done)) changed();
    const over = now.status === "done" ? { status: "done" } : { status: "refused", reason: now.error || word("status", now.status) };
    if (ended) return change(ids, ({ status }) => (status === "sent" ? over : {}));
    await pause(PERIOD);
    try {
      now = await get(`v1/jobs/${encodeURIComponent(job.id)}`);
    } catch (error) {
      if (error.status) return complain(error); // else the service is away
    }
  }
}

/** A job's progress in one line, and, unless it is brief, the files that it could not read. */
export function Job({ job, brief, children }) {
  const { target, status, done, total, error, report } = job;
  const share = total ? Math.min(1, done / total) : status === "done" ? 1 : 0;
  const said = total ? t("modules_of", { done: count(done), n: total }) : t(status === "done" ? "nothing_new" : "counting");
  return html`<div class="job" data-status=${status} data-job=${job.id}>
    <div class="line"><strong><bdi>${plain(target)}</bdi></strong><span class="state ${status}">${word("status", status)}</span></div>
    <div class="progress" role="progressbar" aria-label=${t("job_of", { name: plain(target) })} aria-valuemin="0" aria-valuemax=${total || 1} aria-valuenow=${done || 0}>
      <i style=${{ width: `${share * 100}%` }}></i>
    </div>
    <div class="line muted"><span>${said}</span>${children}</div>
    ${error && html`<p class="fault">${plain(error)}</p>`}
    ${((!brief && report?.skipped) || []).map(({ name, reason }) => html`<p class="fault"><bdi>${plain(name)}</bdi>: ${plain(reason)}</p>`)}
    ${Object.values(report?.omitted ?? {}).flat().map((each) => html`<p class="muted">${plain(each)}</p>`)}
  </div>`;
}

/** Takes files that are dropped anywhere on the page, and then calls `taken`. */
export function useDrop(taken = () => {}) {
  const latest = useRef(taken);
  latest.current = taken;
  useEffect(() => {
    const leaving = new AbortController();
    const heard = (act) => (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      act(event);
    };
    const drop = ({ dataTransfer }) => dropped(dataTransfer).then(choose).then(() => latest.current(), complain);
    window.addEventListener("dragover", heard(() => {}), { signal: leaving.signal });
    window.addEventListener("drop", heard(drop), { signal: leaving.signal });
    return () => leaving.abort();
  }, []);
}

/** The form: a collection, files and folders, and what becomes of each. asks() goes on to ask. */
export function Upload({ collection, names, changed, chose = () => {}, asks }) {
  const [listed, early] = [useStore(files), useStore(askable)];
  const [over, setOver] = useState(false);
  const [typed, setTyped] = useState(collection || null);
  const [busy, setBusy] = useState(false);
  const chosen = listed.filter(({ status }) => status === "chosen");
  const target = typed ?? chosen.find(({ name }) => name.includes("/"))?.name.split("/")[0] ?? (chosen.length ? t("collection_example") : "");
  const ready = asks && !chosen.length && (early || listed.some(({ status }) => status === "done"));
  const submit = async (event) => {
    event.preventDefault();
    if (!target.trim()) return;
    setTyped(target);
    setBusy(true);
    chose(target.trim());
    await send(target.trim(), () => changed(target.trim()));
    setBusy(false);
  };
  return html`<form class="upload" onSubmit=${submit}>
    <label class="field"><span>${t("collection")}</span>
      <input name="into" required maxlength="200" list="names" autocomplete="off" placeholder=${t("collection_example")} value=${target} onInput=${({ target: node }) => setTyped(node.value)} />
      <datalist id="names">${names.map((name) => html`<option value=${name} />`)}</datalist>
    </label>
    <div class="drop ${over ? "over" : ""}" onDragOver=${() => setOver(true)} onDragLeave=${() => setOver(false)} onDrop=${() => setOver(false)}>
      <${Icon} name="jobs" />
      <strong>${t("drop_here")}</strong>
      <span class="muted">${t("drop_types")}</span>
      <div class="row"><${Picker} label=${t("choose_files")} /><${Picker} label=${t("choose_folder")} folder /></div>
    </div>
    <ul class="picked" aria-label=${t("files_to_add")}>${listed.map((each) => html`<${Picked} key=${each.id} each=${each} />`)}</ul>
    ${ready && html`<${Button} kind="primary" data-act="ask-now" onClick=${asks}>${t("ask_now")}<//>`}
    <button type="submit" class="primary" hidden=${ready} disabled=${busy || !chosen.length}>${chosen.length ? t("add_files", { n: chosen.length }) : t("add")}</button>
  </form>`;
}

function Picker({ label, folder = false }) {
  const node = useRef(null);
  const chosen = () => [...node.current.files].map((file) => ({ file, name: file.webkitRelativePath || file.name }));
  const take = () => (choose(chosen()), (node.current.value = ""));
  return html`<${Button} onClick=${() => node.current.click()}>${label}<//>
    <input ref=${node} type="file" multiple hidden webkitdirectory=${folder} onChange=${take} tabindex="-1" aria-label=${label} />`;
}

const Picked = ({ each: { id, name, file, status, reason } }) =>
  html`<li class=${status}>
    <${Icon} name="file" />
    <span class="what"><${Name} text=${name} />${reason && html`<small class="fault">${plain(reason)}</small>`}</span>
    <span class="muted">${word("file", status)}</span>
    <span class="num muted">${bytes(file.size)}</span>
    ${["chosen", "refused"].includes(status) && html`<${Button} kind="ghost" icon="close" label=${t("remove_file", { name: plain(name) })} onClick=${() => forget(id)} />`}
  </li>`;
