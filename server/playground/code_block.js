// A block of code, with its colours and a button that copies it. The library is loaded when there is something to colour.

import { h } from "./dom.js";
import { copyText } from "./turn.js";

let library = null;
let loading = null;

export function codeBlock(text, language) {
  const code = h("code", {}, text);
  if (library) colour(code, text, language);
  else if (language) {
    loading ??= import("./vendor/highlight.js").then((loaded) => (library = loaded.default));
    loading.then(() => colour(code, text, language));
  }
  const copy = h("button", { type: "button", class: "quiet", onclick: () => copyText(text, copy) }, "Copy code");
  const top = h("div", { class: "block-top" }, h("span", {}, language), copy);
  return h("div", { class: "block" }, top, h("pre", { tabindex: "0", role: "group", "aria-label": "Code" }, code));
}

function colour(code, text, language) {
  if (!library.getLanguage(language)) return;
  const { value } = library.highlight(text, { language, ignoreIllegals: true });
  code.replaceChildren(...spans(new DOMParser().parseFromString(value, "text/html").body));
}

// Of the library's HTML only texts and the classes of spans are taken.
const spans = (element) =>
  [...element.childNodes].map((node) =>
    node.nodeName === "SPAN" ? h("span", { class: node.className.replace(/[^\w -]/g, "") }, spans(node)) : node.textContent,
  );
