// What the plain scripts of `vendor/` leave in the window, as a module.
export const { render } = globalThis.preact;
export const { useEffect, useLayoutEffect, useMemo, useRef, useState } = globalThis.preactHooks;
export const html = globalThis.htm.bind(globalThis.preact.h);
