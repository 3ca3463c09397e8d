// Documents in: a drop zone, and the jobs that read and encode them.
import { collectionPath, events, everything, get, post, request, withQuery } from "../api.js";
import { h, show } from "../dom.js";
import { dropped } from "../dropped.js";
import { bytes, count, plural, seconds } from "../format.js";
import { icon } from "../icons.js";
import { empty, fault, loading, moment, panel } from "../parts.js";
import { poll } from "../polling.js";
import { complain, toast } from "../toasts.js";

const PERIOD = 5;
const LISTED = 50;
const PORTION_BYTES = 32 * 2 ** 20;
const PORTION_FILES = 500;
const WATCHED = 3; // streams at once: browsers open six connections to a server of HTTP/1.1
const ENDED = ["done", "failed", "canceled", "interrupted"];

export const ingestion = {
  id: "ingestion",
  title: "Ingestion",
  about: "Documents are split into modules and encoded once, in the background.",
  mount,
};

function mount({ body, signal }) {
  const list = h("ul", { class: "jobs", "aria-label": "Jobs" }, h("li", {}, loading()));
  const jobs = { list, signal, lines: new Map(), watched: new Set() };
  show(
    body,
    h(
      "div",
      { class: "panels ingest" },
      panel("Add documents", {}, form(jobs)),
      panel("Jobs", { note: "the newest first" }, list),
    ),
  );
  let read = false;
  poll(
    signal,
    PERIOD,
    async () => {
      const page = await get(withQuery("../v1/jobs", { limit: LISTED }), { signal });
      listed(jobs, page.items);
      read = true;
    },
    (error) => (read ? complain(error) : show(list, h("li", {}, fault(error)))),
  );
}

function form(jobs) {
  const chosen = [];
  const collection = collectionField(jobs.signal);
  const files = h("input", {
    type: "file",
    multiple: true,
    id: "files",
    class: "unseen",
    onchange: () => add([...files.files].map((file) => ({ file, name: file.name }))),
  });
  const picked = h("ul", { class: "picked", "aria-label": "Files to ingest" });
  const send = h("button", { type: "submit", class: "primary", disabled: true }, "Ingest");
  const add = (more) => {
    chosen.push(...more);
    files.value = "";
    draw();
  };
  const draw = () => {
    show(
      picked,
      chosen.map((each, index) => pickedLine(each, () => draw(chosen.splice(index, 1)))),
    );
    const ready = chosen.filter(({ refused }) => !refused).length;
    send.disabled = ready === 0;
    show(send, ready ? `Ingest ${plural(ready, "file")}` : "Ingest");
  };
  const submit = async (event) => {
    event.preventDefault();
    send.disabled = true;
    await ingest(jobs, event.target.elements.collection.value.trim(), chosen);
    draw();
  };
  return h(
    "form",
    { class: "ingestform", onsubmit: submit },
    collection,
    dropZone(files, add),
    picked,
    send,
  );
}

// Any name will do; those that exist are offered.
function collectionField(signal) {
  const names = h("datalist", { id: "collections" });
  const input = h("input", {
    name: "collection",
    required: true,
    list: "collections",
    autocomplete: "off",
    placeholder: "handbook",
  });
  everything("../v1/collections", { signal })
    .then((items) => names.append(...items.map(({ name }) => h("option", { value: name }))))
    .catch(complain);
  return h("label", { class: "field" }, h("span", {}, "Collection"), input, names);
}

function dropZone(files, add) {
  const zone = h(
    "label",
    { class: "drop", for: "files" },
    files,
    icon("ingestion"),
    h("strong", {}, "Drop files or folders here"),
    h(
      "span",
      { class: "muted" },
      "or press to choose: PDF, Word, PowerPoint, Excel, HTML, EPUB, CSV, JSON, e-mail, notebooks, Markdown, any text or code",
    ),
  );
  const over = (on) => (event) => {
    event.preventDefault();
    zone.classList.toggle("over", on);
  };
  zone.addEventListener("dragover", over(true));
  zone.addEventListener("dragleave", over(false));
  zone.addEventListener("drop", (event) => {
    over(false)(event);
    dropped(event.dataTransfer).then(add).catch(complain);
  });
  return zone;
}

function pickedLine({ file, name, refused }, away) {
  return h(
    "li",
    { class: refused ? "refused" : null },
    icon(refused ? "warning" : "file"),
    h(
      "span",
      { class: "name", title: name },
      name,
      refused && h("small", { class: "fault" }, refused),
    ),
    h("span", { class: "num muted" }, bytes(file.size)),
    h(
      "button",
      { type: "button", class: "ghost icon", "aria-label": `Remove ${name}`, onclick: away },
      icon("close"),
    ),
  );
}

// A job each: a body has a limit, and work that was taken up is not lost with what was not.
function portions(files) {
  const all = [];
  let room = 0;
  for (const each of files) {
    if (!all.length || each.file.size > room || all.at(-1).length === PORTION_FILES) {
      all.push([]);
      room = PORTION_BYTES;
    }
    all.at(-1).push(each);
    room -= each.file.size;
  }
  return all;
}

// Takes from `files` what was handed over, and notes why others were refused; stops where the server
// takes none for another reason.
async function ingest(jobs, collection, files) {
  for (const portion of portions(files.filter(({ refused }) => !refused))) {
    const reasons = await handOver(jobs, collection, portion);
    if (!reasons) return;
    for (const each of portion) {
      each.refused = reasons.get(each.name);
      if (!each.refused) files.splice(files.indexOf(each), 1);
    }
  }
}

// The reasons of refused files by name; null where nothing was looked at.
async function handOver(jobs, collection, files) {
  const body = new FormData();
  for (const { file, name } of files) body.append("files", file, name);
  try {
    const job = await post(`${collectionPath(collection)}/documents`, body, {
      headers: { "Idempotency-Key": randomKey() },
    });
    listed(jobs, [job]);
    const skipped = job.report?.skipped ?? [];
    const taken = files.length - skipped.length;
    toast(
      "ok",
      `${plural(taken, "file")} handed over`,
      skipped.length ? `${count(skipped.length)} cannot be read.` : `Collection ${collection}`,
    );
    return new Map(skipped.map(({ name, reason }) => [name, reason]));
  } catch (error) {
    const told = error.errors?.filter(({ loc }) => loc[0] === "files") ?? [];
    if (!told.length) {
      complain(error);
      return null;
    }
    toast("error", "Not handed over", `${plural(told.length, "file")} cannot be read.`);
    return new Map(told.map(({ loc, msg }) => [loc[1], msg]));
  }
}

// crypto.randomUUID exists on secure origins only; an operator may come over plain HTTP.
function randomKey() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) =>
    byte.toString(16).padStart(2, "0"),
  ).join("");
}

function listed(jobs, items) {
  const started = ({ started_at: at }) => at ?? Infinity;
  for (const job of items) update(jobs, job);
  const newer = (a, b) =>
    started(a.job) === started(b.job) ? 0 : started(a.job) < started(b.job) ? 1 : -1;
  const sorted = [...jobs.lines.values()].sort(newer);
  show(
    jobs.list,
    sorted.length
      ? sorted.map(({ node }) => node)
      : h("li", {}, empty("No jobs yet", "Drop a few files to begin.")),
  );
}

function update(jobs, job) {
  const line = jobs.lines.get(job.id) ?? { node: h("li", { class: "job", "data-job": job.id }) };
  line.job = { ...line.job, ...job };
  jobs.lines.set(job.id, line);
  show(line.node, jobLine(line.job));
  line.node.dataset.status = line.job.status;
  if (!ENDED.includes(line.job.status) && jobs.watched.size < WATCHED) watch(jobs, job.id);
}

function jobLine({
  id,
  target,
  status,
  done,
  total,
  error,
  report,
  started_at: started,
  finished_at: finished,
}) {
  const share = total ? Math.min(1, done / total) : status === "done" ? 1 : 0;
  const when = finished
    ? [`took ${seconds(finished - started)} · `, moment(finished)]
    : started
      ? `for ${seconds(Math.max(0, Date.now() / 1000 - started))}`
      : "waiting";
  return [
    h(
      "div",
      { class: "line" },
      h("strong", {}, target ?? id),
      h("span", { class: `state ${status}` }, status),
    ),
    h(
      "div",
      {
        class: "progress",
        role: "progressbar",
        "aria-label": `Job of ${target ?? id}`,
        "aria-valuemin": 0,
        "aria-valuemax": total || 1,
        "aria-valuenow": done || 0,
      },
      h("i", { style: { "--share": `${share * 100}%` } }),
    ),
    h(
      "div",
      { class: "line muted num" },
      h("span", {}, total ? `${count(done)} of ${plural(total, "module")}` : uncounted(status)),
      h("span", {}, when),
    ),
    error && h("p", { class: "fault" }, error),
    ...(report?.skipped ?? []).map(({ name, reason }) =>
      h("p", { class: "fault" }, `${name}: ${reason}`),
    ),
  ];
}

const uncounted = (status) => (status === "done" ? "nothing new" : "counting");

async function watch(jobs, id) {
  if (jobs.watched.has(id)) return;
  jobs.watched.add(id);
  try {
    const response = await request("GET", `../v1/jobs/${encodeURIComponent(id)}`, {
      headers: { Accept: "text/event-stream" },
      signal: jobs.signal,
    });
    for await (const { event, data } of events(response)) {
      if (event === "progress") update(jobs, data);
    }
  } catch (error) {
    if (!jobs.signal.aborted) complain(error);
  } finally {
    jobs.watched.delete(id);
  }
}
