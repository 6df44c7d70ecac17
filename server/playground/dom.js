// Elements in one call: h("p", {class: "hint"}, "text", other).

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

export const byId = (id) => document.getElementById(id);

let serial = 0;

// An id that nothing else on the page has.
export const newId = (prefix) => `${prefix}-${++serial}`;

// Not on each token: a screen would be drawn more often than it can show.
export function oncePerFrame(draw) {
  let due = false;
  return () => {
    if (due) return;
    due = true;
    requestAnimationFrame(() => {
      due = false;
      draw();
    });
  };
}

const PAUSE = 80; // milliseconds

// For what takes longer the longer a text is.
export function notTooOften(draw) {
  let due = false;
  return () => {
    if (due) return;
    due = true;
    setTimeout(() => {
      due = false;
      draw();
    }, PAUSE);
  };
}
