// The functions that an answer calls, each with a box for its result.

import { h, newId } from "./dom.js";

// Arguments as one reads them; what is no JSON, or not yet, stays as it is.
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

export class Calls {
  constructor() {
    this.list = []; // as the API has them
    this.cards = [];
    this.items = h("ul", { class: "calls", "aria-label": "Functions that are called" });
    this.element = h("form", { class: "called", hidden: true }, this.items);
  }

  get length() {
    return this.list.length;
  }

  feed(news) {
    for (const { index, id, function: called } of news) {
      const call = (this.list[index] ??= { id, type: "function", function: { name: "", arguments: "" } });
      call.function.name += called?.name ?? "";
      call.function.arguments += called?.arguments ?? "";
      const card = (this.cards[index] ??= this.makeCard());
      card.name.textContent = call.function.name;
      card.given.textContent = pretty(call.function.arguments);
    }
    this.element.hidden = !this.length;
  }

  makeCard() {
    const [name, given, result] = [h("code"), h("code"), h("div")];
    const box = h("pre", { tabindex: "0", role: "group", "aria-label": "Arguments" }, given);
    this.items.append(h("li", { class: "call" }, h("p", {}, "Calls ", name), box, result));
    return { name, given, result };
  }

  // Results are typed into boxes that hold those known so far. `send` is called when each box has one.
  ask(known, onInput, send) {
    const boxes = this.cards.map(({ name, result }, place) => {
      const id = newId("result");
      const box = h("textarea", { id, rows: 1, oninput: onInput });
      box.value = known[place]?.content ?? this.boxes?.[place]?.value ?? "";
      box.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
        event.preventDefault();
        this.element.requestSubmit();
      });
      result.replaceChildren(h("label", { for: id, class: "caption" }, `Result of ${name.textContent}`), box);
      return box;
    });
    this.boxes = boxes;
    this.button?.remove();
    this.button = h("button", { type: "submit", class: "primary" }, this.length > 1 ? "Send the results" : "Send the result");
    this.element.append(this.button);
    this.element.onsubmit = (event) => {
      event.preventDefault();
      const empty = this.boxes.find((box) => !box.value.trim());
      if (empty) empty.focus();
      else send();
    };
  }

  // The results as messages; of empty boxes there is none.
  results() {
    const made = (this.boxes ?? []).map((box, place) => ({ role: "tool", tool_call_id: this.list[place].id, content: box.value }));
    return made.filter(({ content }) => content.trim());
  }

  // Results that were sent.
  show(results) {
    this.boxes = null;
    this.button?.remove();
    this.cards.forEach(({ result }, place) => {
      const content = results[place]?.content;
      const box = [h("p", { class: "caption" }, "Result"), h("pre", { tabindex: "0", role: "group", "aria-label": "Result" }, content ?? "")];
      result.replaceChildren(...(content === undefined ? [] : box));
    });
  }
}
