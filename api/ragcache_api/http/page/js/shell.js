// What both pages have around their views: appearance, language, key, and the state of the server.
import { connect, keyed, reached, setKey, store } from "./api.js";
import { LANGUAGES, language, speak, t } from "./format.js";
import { Button, Field, form, html, Icon, Overlays, render, toast, useEffect, useRef, useState, useStore } from "./ui.js";

const LOGO = new URL("../icon.svg", import.meta.url).pathname;
const STORED = "ragcache.theme";
const THEMES = ["system", "light", "dark"];
const forgotten = [];

/** Changes when the appearance does, for what is not drawn by the style sheet. */
export const themed = store(0);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => themed.set(themed.value + 1));

/** Calls `act` when the key is forgotten, so that nothing read with it stays. */
export const onForget = (act) => forgotten.push(act);

async function keyDialog(refused) {
  const given = await form(t("key_title"), html`
    ${refused && html`<p class="fault" role="alert">${t("key_refused")}</p>`}
    <p class="muted">${t("key_text")}</p>
    <${Field} label=${t("key")}><input name="key" type="password" required autofocus autocomplete="off" spellcheck="false" /><//>`, t("go_on"));
  return given?.get("key").trim() || null;
}

const themeOf = () => document.documentElement.dataset.theme ?? "system";

function setTheme(name) {
  localStorage.removeItem(STORED);
  delete document.documentElement.dataset.theme;
  if (name !== "system") localStorage.setItem(STORED, (document.documentElement.dataset.theme = name));
  themed.set(themed.value + 1);
}

/** The buttons for appearance, language and key. */
export function Settings() {
  const [theme, set] = useState(themeOf());
  const known = useStore(keyed);
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  const change = (key) => (setKey(key), location.reload());
  const forget = () => (forgotten.forEach((act) => act()), change(null));
  const give = () => keyDialog(false).then((key) => key && change(key));
  return html`<div class="settings">
    <${Button} kind="ghost" icon="theme" data-action="appearance" label="${t("appearance")}: ${t(`theme_${theme}`)}" onClick=${() => set(next, setTheme(next))}>
      <span>${t(`theme_${theme}`)}</span>
    <//>
    <label class="language" title=${t("language")}>
      <select name="language" aria-label=${t("language")} onChange=${({ target }) => speak(target.value)}>
        ${Object.entries(LANGUAGES).map(([id, name]) => html`<option value=${id} lang=${id} selected=${id === language}>${name}</option>`)}
      </select>
    </label>
    <${Button} kind="ghost" icon="keys" data-action=${known ? "forget" : "key"} label=${t(known ? "key_forget" : "key_give")} onClick=${known ? forget : give}>
      <span>${t(known ? "key_forget" : "key")}</span>
    <//>
  </div>`;
}

/** Says that the server is gone, and when it is back. */
function Connection() {
  const up = useStore(reached);
  const before = useRef(up);
  useEffect(() => {
    if (up && !before.current) toast("ok", t("reached_again"));
    before.current = up;
  }, [up]);
  return html`<div class="gone" role="status" hidden=${up}>${up ? "" : t("gone")}</div>`;
}

export const Brand = ({ href }) =>
  html`<a class="brand" href=${href} aria-label="ragcache"><img src=${LOGO} alt="" /><span>ragcache</span></a>`;

/** A menu that a telephone folds behind a button. */
export function Menu({ children }) {
  const [open, set] = useState(false);
  const button = useRef(null);
  const closed = ({ key }) => open && key === "Escape" && set(false, button.current.focus());
  return html`<div class="menu ${open ? "open" : ""}" onKeyDown=${closed} onClick=${({ target }) => target.closest("a") && set(false)}>
    <button type="button" class="menubutton ghost" ref=${button} aria-label=${t("menu")} aria-expanded=${String(open)} onClick=${() => set(!open)}>
      <${Icon} name=${open ? "close" : "menu"} />
    </button>
    <div class="folded">${children}</div>
  </div>`;
}

/** Draws a page. */
export function start(Page) {
  const skip = (event) => (event.preventDefault(), document.getElementById("main").focus());
  connect(keyDialog);
  document.querySelector("noscript")?.remove();
  render(
    html`<a class="skip" href="#main" onClick=${skip}>${t("skip")}</a><${Connection} /><${Page} /><${Overlays} />`,
    document.body,
  );
}
