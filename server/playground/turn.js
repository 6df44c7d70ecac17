// One message of a conversation, with what can be done with it.

import { h } from "./dom.js";

const act = (label, onclick) => h("button", { type: "button", class: "quiet", onclick }, label);

// `acts` is a list of [label, action]; `body` is what the message shows.
export function makeTurn(body, role, acts = []) {
  const row = h("div", { class: "acts" }, acts.map(([label, action]) => act(label, action)));
  return h("div", { class: `turn of-${role}` }, body, acts.length ? row : null);
}

// A message in a field, in place of its turn; `save` gets its new text.
export function editTurn(turn, text, label, save) {
  const field = h("textarea", { "aria-label": "Edit the message" });
  field.value = text;
  const close = () => form.replaceWith(turn);
  const done = () => {
    close();
    if (field.value.trim() && field.value !== text) save(field.value);
  };
  const form = h(
    "form", { class: "edit", onsubmit: (event) => (event.preventDefault(), done()) },
    field, h("div", { class: "row" }, h("button", { type: "submit", class: "primary" }, label), act("Cancel", close)),
  );
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") event.stopPropagation();
    if (event.key === "Escape") close();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.target !== field) return;
    event.preventDefault();
    done();
  });
  turn.replaceWith(form);
  field.focus();
}

export async function copyText(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    const field = h("textarea", { class: "unseen", "aria-hidden": "true" }); // plain HTTP has no clipboard
    field.value = text;
    document.body.append(field);
    field.select();
    button.textContent = document.execCommand("copy") ? "Copied" : "Not copied";
    field.remove();
  }
  setTimeout(() => (button.textContent = label), 2000);
}
