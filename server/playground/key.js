// The field for the API key: shown when the server asks for one.

import { getKey, setKey } from "./api.js";
import { byId } from "./dom.js";

export function setUpKey(onKey) {
  const form = byId("key-form");
  const field = byId("key-field");
  const button = byId("key-button");
  const problem = byId("key-problem");

  const show = (message) => {
    form.hidden = false;
    problem.textContent = message;
    field.focus();
  };

  document.addEventListener("octavo:key", (event) => {
    button.hidden = false;
    byId("model").textContent = "An API key is needed.";
    for (const link of document.querySelectorAll(".top nav a")) link.hidden = true; // a link cannot send a key
    show(getKey() ? event.detail.message : "");
  });
  button.addEventListener("click", () => (form.hidden ? show("") : (form.hidden = true)));
  button.hidden = !getKey();
  for (const link of document.querySelectorAll(".top nav a")) link.hidden = Boolean(getKey());
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    setKey(field.value.trim());
    field.value = "";
    form.hidden = true;
    onKey();
  });
}
