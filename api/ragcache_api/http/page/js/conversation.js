// What was said: kept in this tab, sent to the service, answered as it arrives.
import { answerOf } from "./answer.js";
import { events, post, Problem, remove, request, store } from "./api.js";
import { t } from "./format.js";
import { onForget } from "./shell.js";
import { useEffect, useRef, useState } from "./ui.js";

const STORED = "ragcache.conversation";
const FOUND = 10; // texts of a search, at least

const begun = () => ({ name: `page-${Math.random().toString(36).slice(2, 12)}`, exchanges: [] });

onForget(() => sessionStorage.removeItem(STORED));

function remembered() {
  const { name, exchanges } = JSON.parse(sessionStorage.getItem(STORED)) ?? begun();
  const ended = (each) => (each.status === "streaming" ? { ...each, status: "stopped" } : each);
  return { name, exchanges: exchanges.map(ended) };
}

function remember(conversation) {
  sessionStorage.removeItem(STORED);
  if (!conversation.exchanges.length) return;
  try {
    sessionStorage.setItem(STORED, JSON.stringify(conversation));
  } catch {
    // it has outgrown the browser's room
  }
}

function messagesOf(exchanges, question) {
  const before = exchanges.filter(({ kind, answer }) => kind === "ask" && answer?.text);
  const said = before.flatMap(({ question: asked, answer }) => [
    { role: "user", content: asked },
    { role: "assistant", content: answer.text },
  ]);
  return [...said, { role: "user", content: question }];
}

/** Filters as the service's own routes take them, and as searches do, in OpenAI's form. */
const given = (filters) => filters.filter(({ field }) => field);
const ownFilters = (filters) =>
  Object.fromEntries(given(filters).map(({ field, operator, value }) => [field, { [`$${operator}`]: value }]));
const openFilters = (filters) => ({
  type: "and",
  filters: given(filters).map(({ field, operator, value }) => ({ type: operator, key: field, value })),
});

/** The whole answer. arrived(text): called as the text grows. */
async function answered(body, signal, arrived) {
  const response = await request("POST", "v1/chat/completions", { body, signal });
  let [text, sources] = ["", []];
  for await (const { data } of events(response)) {
    sources = data.sources ?? sources;
    if (data.error) throw new Problem(500, { title: t("failed"), detail: data.error.message });
    const piece = data.choices?.[0]?.delta?.content;
    if (piece) arrived((text += piece));
    if (data.ragcache) return answerOf(text, data.ragcache, sources);
  }
  throw new Problem(502, { title: t("failed"), detail: t("cut_off") });
}

async function found(collection, query, { k, filters }, signal) {
  const body = { query, max_num_results: Math.min(50, Math.max(FOUND, k)) };
  if (given(filters).length) body.filters = openFilters(filters);
  const path = `v1/vector_stores/${encodeURIComponent(collection)}/search`;
  const { data } = await post(path, body, { signal });
  return data.map(({ file_id: document, score, content }) => ({ document, score, text: content[0].text }));
}

/** A conversation with a collection: {exchanges, busy, live, ask(kind, question, at), stop(),
 *  cut(at), begin()}. `at` is the place of the first exchange that is replaced; live: the text that
 *  arrives now. */
export function useConversation(collection, options) {
  const [conversation, converse] = useState(remembered);
  const [busy, setBusy] = useState(false);
  const [live] = useState(() => store(""));
  const running = useRef(null);
  const { name, exchanges } = conversation;
  useEffect(() => remember(conversation), [conversation]);

  const say = (change) => converse((now) => ({ ...now, exchanges: change(now.exchanges) }));
  const stream = (before, question, signal) => {
    const { k, mode, citations, filters } = options;
    const body = { messages: messagesOf(before, question), collection, stream: true, k, mode, citations, prompt_cache_key: name };
    if (given(filters).length) body.filters = ownFilters(filters);
    let frame = 0;
    return answered(body, signal, (text) => {
      live.value = text;
      frame ||= requestAnimationFrame(() => (frame = 0, live.set(live.value)));
    });
  };
  const ask = async (kind, question, at = exchanges.length) => {
    const before = exchanges.slice(0, at);
    const mine = { id: `${Date.now()}`, kind, question, collection, status: "streaming" };
    const ended = (changes) => say((all) => all.map((each) => (each.id === mine.id ? { ...each, ...changes } : each)));
    const { signal } = (running.current = new AbortController());
    live.set("");
    setBusy(true);
    say(() => [...before, mine]);
    try {
      if (kind === "search") ended({ hits: await found(collection, question, options, signal), status: "done" });
      else ended({ answer: await stream(before, question, signal), status: "done" });
    } catch (error) {
      const partial = live.value ? { answer: { text: live.value } } : {};
      const { status, title, message, request: id } = error;
      if (signal.aborted) ended({ ...partial, status: "stopped" });
      else ended({ ...partial, status: "failed", error: { status, title, message, request: id } });
    }
    setBusy(false);
  };
  const forget = () => remove(`v1/conversations/${name}`).catch(() => {}); // its states; a folder may keep none
  const begin = () => (converse(begun()), forget());
  const cut = (at) => say((all) => all.slice(0, at));
  return { exchanges, busy, live, ask, cut, begin, stop: () => running.current?.abort() };
}
