// The page for people who ask: a collection, a conversation with it, and its documents.
import { Exchange } from "./answer.js";
import { collectionPath, everything, get, withQuery } from "./api.js";
import { useConversation } from "./conversation.js";
import { plain, t } from "./format.js";
import { Reader } from "./reader.js";
import { Brand, Settings, start } from "./shell.js";
import { Button, complain, dialog, Empty, Fault, Field, html, Icon, useEffect, useMemo, usePolled, useRef, useState, useStore } from "./ui.js";
import { ENDED, Job, jobs, Upload, useDrop } from "./upload.js";

const MODES = ["rooted", "primed", "primed:16", "isolated", "exact"];
const OPERATORS = ["eq", "ne", "gt", "gte", "lt", "lte"];
const DEFAULTS = { k: 4, mode: "rooted", citations: false, filters: [] };
const NEAR = 80; // pixels from the end within which an arriving answer is followed

// The collections of the service, and the chosen one, which the address holds.
function useCollections() {
  const { value, error, again } = usePolled((signal) => everything("v1/collections", { signal }), 0);
  const [wanted, choose] = useState(new URLSearchParams(location.search).get("collection") ?? "");
  const known = value ?? [];
  const name = wanted || (known.length === 1 ? known[0].name : "");
  const chosen = known.find((each) => each.name === name);
  useEffect(() => {
    history.replaceState(null, "", withQuery(location.pathname, { collection: name }));
    document.title = name ? `${plain(name)} · ragcache` : "ragcache";
  }, [name]);
  return { known: value, error, names: known.map((each) => each.name), chosen, choose, list: again };
}

function Ask() {
  const collections = useCollections();
  const collection = collections.chosen?.name ?? "";
  const [options, setOptions] = useState(DEFAULTS);
  const talk = useConversation(collection, options);
  const [shown, show] = useState(null); // {collection, id, place}
  const [draft, setDraft] = useState("");
  const begin = (close) => (close(), setTimeout(() => document.querySelector("[name=question]").focus()));
  const add = () =>
    dialog(t("add_documents"), (close) => html`<div class="body"><${Upload} collection=${collection} names=${collections.names} changed=${collections.list} chose=${collections.choose} asks=${() => begin(close)} /><${Progress} /></div>`, "wide");
  useDrop(() => document.querySelector("dialog") || add());
  const edit = (exchange, at) => (setDraft(exchange.question), talk.cut(at));
  return html`<div class="askpage ${shown ? "reading" : ""}">
    <header class="top">
      <${Brand} href="./" />
      <${Choice} names=${collections.names} value=${collection} set=${collections.choose} />
      <div class="actions">
        <${Button} icon="add" label=${t("add_documents")} data-act="add" onClick=${add}><span>${t("add_documents")}</span><//>
        <${Button} icon="ask" label=${t("new_conversation")} data-act="new" disabled=${talk.busy || !talk.exchanges.length} onClick=${talk.begin}><span>${t("new_conversation")}</span><//>
      </div>
      <${Settings} />
      <a class="button ghost" href="admin/" aria-label=${t("operate")} title=${t("operate")}><${Icon} name="operate" /><span>${t("operate")}</span></a>
    </header>
    <main id="main" tabindex="-1">
      <h1 class="unseen">${t("ask_documents")}</h1>
      <${Thread} talk=${talk}>
        ${collections.error && html`<${Fault} error=${collections.error} /><${Button} onClick=${collections.list}>${t("try_again")}<//>`}
        ${!talk.exchanges.length && collections.known && html`<${Welcome} collections=${collections} add=${add} />`}
        ${talk.exchanges.map((each, at) => html`<${Kept} key=${each.id} exchange=${each} busy=${talk.busy || !collection} live=${talk.live}
          open=${(id, place) => show({ collection: each.collection, id, place })}
          edit=${() => edit(each, at)} again=${() => talk.ask(each.kind, each.question, at)} />`)}
      <//>
      <${Progress} strip />
      <${Composer} collection=${collection} talk=${talk} draft=${draft} setDraft=${setDraft}>
        <${Options} collection=${collection} options=${options} set=${setOptions} />
      <//>
    </main>
    ${shown && html`<${Beside} shown=${shown} close=${() => show(null)} />`}
  </div>`;
}

// An exchange that has ended is drawn once.
function Kept(properties) {
  const { exchange, live, busy } = properties;
  return useMemo(() => html`<${Exchange} ...${properties} />`, [exchange, live, busy]);
}

// The document beside the conversation: the keyboard goes there, and back where it came from.
function Beside({ shown, close }) {
  const node = useRef(null);
  useEffect(() => {
    const before = document.activeElement;
    node.current.focus();
    return () => before?.isConnected && before.focus();
  }, [shown]);
  return html`<aside class="beside" ref=${node} tabindex="-1" aria-label=${t("document")} onKeyDown=${({ key }) => key === "Escape" && close()}>
    <${Reader} key=${`${shown.collection}/${shown.id}`} ...${shown} onClose=${close} />
  </aside>`;
}

function Choice({ names, value, set }) {
  return html`<label class="choice"><span class="unseen">${t("collection")}</span>
    <select name="collection" value=${value} onChange=${({ target }) => set(target.value)} disabled=${!names.length}>
      ${!value && html`<option value="">${t(names.length ? "choose_collection" : "no_collection")}</option>`}
      ${names.map((name) => html`<option value=${name} selected=${name === value}>${plain(name)}</option>`)}
    </select>
  </label>`;
}

function Welcome({ collections: { names, chosen }, add }) {
  if (chosen) return html`<${Empty} title=${t("welcome", { name: plain(chosen.name) })}>${t("welcome_text", { n: chosen.documents })}<//>`;
  if (names.length) return html`<${Empty} title=${t("welcome_choose")}>${t("welcome_choose_text")}<//>`;
  return html`<${Empty} title=${t("welcome_empty")}><p>${t("welcome_drop")}</p><${Button} kind="primary" icon="add" onClick=${add}>${t("add_documents")}<//><//>`;
}

// Follows an arriving answer while its end is in sight.
function Thread({ talk: { busy, exchanges }, children }) {
  const node = useRef(null);
  const following = useRef(true);
  const follow = () => following.current && (node.current.scrollTop = node.current.scrollHeight);
  useEffect(() => {
    following.current = true;
    follow();
  }, [exchanges.length]);
  useEffect(() => {
    const watcher = new ResizeObserver(follow);
    watcher.observe(node.current.firstElementChild);
    return () => watcher.disconnect();
  }, []);
  const moved = ({ target }) => {
    following.current = busy && target.scrollHeight - target.scrollTop - target.clientHeight < NEAR;
  };
  return html`<div class="thread" ref=${node} onScroll=${moved} tabindex="0" role="region" aria-label=${t("conversation")}>
    <div class="column">${children}</div>
  </div>`;
}

// The jobs of this tab, or only the oldest that runs.
function Progress({ strip = false }) {
  const listed = useStore(jobs);
  const shown = strip ? listed.filter(({ status }) => !ENDED.includes(status)).slice(-1) : listed;
  return html`<div class=${strip ? "strip" : ""} role="status">${shown.map((job) => html`<${Job} key=${job.id} job=${job} brief=${!strip} />`)}</div>`;
}

function Composer({ collection, talk, draft, setDraft, children }) {
  const node = useRef(null);
  const idle = talk.busy || !collection;
  useEffect(() => {
    if (!draft) return;
    node.current.value = draft;
    node.current.focus();
  }, [draft]);
  const submit = (kind) => (event) => {
    event.preventDefault();
    const question = node.current.value.trim();
    if (!question || idle) return;
    node.current.value = "";
    setDraft("");
    talk.ask(kind, question);
  };
  // Enter asks, with Shift it makes a new line.
  const pressed = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && submit("ask")(event);
  return html`<form class="composer" onSubmit=${submit("ask")}>
    <textarea name="question" rows="2" ref=${node} placeholder=${t("question_example")} aria-label=${t("question")} onKeyDown=${pressed} dir="auto"></textarea>
    <div class="row">
      ${children}
      <span class="buttons">
        ${talk.busy && html`<${Button} icon="stop" data-act="stop" onClick=${talk.stop}>${t("stop")}<//>`}
        <${Button} icon="search" data-act="search" disabled=${idle} title=${t("search_only")} onClick=${submit("search")}>${t("search")}<//>
        <button type="submit" class="primary" disabled=${idle}>${t("ask")}</button>
      </span>
    </div>
  </form>`;
}

function Options({ collection, options, set }) {
  const [known, setKnown] = useState([]); // metadata of documents
  const [opened, setOpened] = useState(false);
  useEffect(() => {
    if (!opened || !collection) return;
    get(withQuery(`${collectionPath(collection)}/documents`, { limit: 200 })).then(({ items }) => setKnown(items.map(({ metadata }) => metadata)), complain);
  }, [collection, opened]);
  const choices = (all) => [...new Set(all.flat())].map((value) => html`<option value=${String(value)} />`);
  const fields = [...new Set(known.flatMap(Object.keys))].filter((name) => name !== "omitted");
  const with_ = (changes) => set((now) => ({ ...now, ...changes }));
  const filter = (index, changes) => with_({ filters: options.filters.map((each, at) => (at === index ? { ...each, ...changes } : each)) });
  const used = options.filters.filter(({ field }) => field).length;
  return html`<details class="options" open=${opened} onToggle=${({ target }) => setOpened(target.open)}>
    <summary>${used ? t("options_filters", { n: used }) : t("options")}</summary>
    <div class="sheet">
      <div class="row">
        <${Field} label=${t("k")}><input name="k" type="number" min="1" max="64" value=${options.k} onChange=${({ target }) => with_({ k: Math.max(1, Math.min(64, Number(target.value) || 4)) })} /><//>
        <${Field} label=${t("mode")}><select name="mode" onChange=${({ target }) => with_({ mode: target.value })}>${MODES.map((mode) => html`<option value=${mode} selected=${mode === options.mode}>${t(`mode_${mode}`)}</option>`)}</select><//>
        <label class="check"><input name="citations" type="checkbox" checked=${options.citations} onChange=${({ target }) => with_({ citations: target.checked })} /> ${t("citations")}</label>
      </div>
      <fieldset>
        <legend>${t("filters")}</legend>
        <datalist id="fields">${choices(fields)}</datalist>
        ${options.filters.map(({ field, operator, value }, index) => html`<div class="row filter">
          <input name="field" list="fields" aria-label=${t("filter_field")} placeholder=${t("filter_field")} value=${field} onChange=${({ target }) => filter(index, { field: target.value.trim() })} />
          <select name="operator" aria-label=${t("filter_operator")} onChange=${({ target }) => filter(index, { operator: target.value })}>${OPERATORS.map((each) => html`<option value=${each} selected=${each === operator}>${t(`operator_${each}`)}</option>`)}</select>
          <datalist id="values-${index}">${choices(known.map((each) => each[field] ?? []))}</datalist>
          <input name="value" list="values-${index}" aria-label=${t("filter_value")} placeholder=${t("filter_value")} value=${String(value)} onChange=${({ target }) => filter(index, { value: valueOf(target.value) })} />
          <${Button} kind="ghost" icon="close" label=${t("filter_remove")} onClick=${() => with_({ filters: options.filters.filter((_, at) => at !== index) })} />
        </div>`)}
        <${Button} icon="add" data-act="filter" onClick=${() => with_({ filters: [...options.filters, { field: fields[0] ?? "", operator: "eq", value: "" }] })}>${t("filter_add")}<//>
      </fieldset>
    </div>
  </details>`;
}

// A number or a truth value where it looks like one.
function valueOf(text) {
  if (text === "true" || text === "false") return text === "true";
  return text.trim() !== "" && !Number.isNaN(Number(text)) ? Number(text) : text;
}

start(Ask);
