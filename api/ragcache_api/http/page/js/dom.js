// Elements from calls. Text becomes text nodes only: nothing from outside is read as markup.
const SVG = "http://www.w3.org/2000/svg";
const SCROLLED = ".scroll, .segments";

/** An HTML element. attributes: `on…` a listener, `style` an object of properties, `true` bare. */
export function h(tag, attributes = {}, ...children) {
  return furnish(document.createElement(tag), attributes, children);
}

/** An SVG element, as `h`. */
export function s(tag, attributes = {}, ...children) {
  return furnish(document.createElementNS(SVG, tag), attributes, children);
}

function furnish(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") setStyle(node, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...present(children));
  return node;
}

// Properties set from scripts are allowed under a style-src of 'self'; style attributes are not.
function setStyle(node, properties) {
  for (const [name, value] of Object.entries(properties)) node.style.setProperty(name, value);
}

function present(children) {
  return children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false);
}

/** Puts `children` in place of what `node` holds. */
export function show(node, ...children) {
  node.replaceChildren(...present(children));
  return node;
}

/** As `show`; what was scrolled inside stays where it was, for panels that are read anew. */
export function renew(node, ...children) {
  const places = [...node.querySelectorAll(SCROLLED)].map(({ scrollTop, scrollLeft }) => [
    scrollTop,
    scrollLeft,
  ]);
  show(node, ...children);
  [...node.querySelectorAll(SCROLLED)].slice(0, places.length).forEach((each, index) => {
    [each.scrollTop, each.scrollLeft] = places[index];
  });
  return node;
}

/** Calls `action` once typing has paused for `wait` milliseconds. */
export function afterPause(wait, action) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(action, wait, ...args);
  };
}
